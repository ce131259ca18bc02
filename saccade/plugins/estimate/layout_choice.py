"""Chooses the layout of a run on several GPUs with train.layout=auto: whole if it fits on a GPU by the estimate,
else the fastest that fits.

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
    """Returns (layout, reason). Assumes all memory of this machine's first GPU, not what is free now, so that a resumed
    run with the same options and GPUs chooses the same layout.
    """
    gpus, device = config.run.gpus, device or devices.current_device(config.run.device)
    (best, *others), reason = candidates(config.train.layout, gpus=gpus, cuda=device.is_gpu)
    if not others:
        return best, reason
    try:
        found = estimate(config, device, command=command, family=family)
    except SaccadeError as problem:
        return best, f"what it needs is not known ({problem})"
    return found.layout, found.reason
