"""The layout of a run on several GPUs where `train.layout` leaves it open: whole if a GPU has room for it, by the
estimate of what it needs.

    layout, reason = choose_layout(config, "rl", family)
"""

from saccade.config import Config
from saccade.errors import SaccadeError
from saccade.models.families import Family
from saccade.plugins.estimate import estimate
from saccade.plugins.ranks.layouts import candidates
from saccade.system import devices
from saccade.system.devices import Device


def choose_layout(config: Config, command: str, family: Family, device: Device | None = None) -> tuple[str, str]:
    """For the first GPU of this machine, with all its memory, not what is free now: a run that is resumed with the same
    options on such GPUs decides alike.
    """
    gpus, device = config.run.gpus, device or devices.present(config.run.device)
    (best, *others), reason = candidates(config.train.layout, gpus=gpus, cuda=device.is_gpu)
    if not others:
        return best, reason
    try:
        found = estimate(config, device, command=command, family=family)
    except SaccadeError as problem:
        return best, f"what it needs is not known ({problem})"
    return found.layout, found.reason
