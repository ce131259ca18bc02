"""The estimate at the start of `saccade rl`, before weights are loaded: what cannot fit is refused.

for line in preflight(config, family, data.samples): print(line)
"""

from __future__ import annotations

from collections.abc import Sequence

from saccade import devices
from saccade.config import Config
from saccade.devices import Device
from saccade.errors import ConfigError
from saccade.estimate import estimate, not_counted
from saccade.estimate.show import refusal
from saccade.estimate.sizing import described
from saccade.models.families import Family
from saccade.types import Sample

OFF = 1.15  # an estimate may be wrong by that


def preflight(
    config: Config, family: Family, samples: Sequence[Sample], *, device: Device | None = None
) -> list[str]:
    """What may not fit; what is too large by far is refused. A CPU has room for what a GPU has not,
    and of a model whose shapes are not known nothing can be said.
    """
    device = device or devices.unoccupied(config.run.device)
    if not device.is_gpu or not samples or described(config, family)[1] is None:
        return []
    found = estimate(config, device, family=family, samples=samples)
    if found.memory.fits:
        return []
    far = max(found.memory.peaks.values()) > OFF * found.device.memory
    if far and not any(not_counted(config)) and not config.run.overcommit:
        raise ConfigError(f"{refusal(found)}; run.overcommit=true starts all the same")
    return [f"the run starts, but by `saccade estimate` it {refusal(found)}"]
