"""What a config of `saccade rl` needs of a device, before anything is loaded: memory by item,
seconds by phase, and the option to change where it does not fit.

Memory follows from shapes alone. Seconds are counted work over the peak of the device times a share
that was measured on one GPU: an estimate, and called that.

    found = estimate(load("run.yaml"), devices.named("H200"))
    found.memory.peaks, found.seconds, found.advice
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from saccade.algorithms.build import from_config
from saccade.config import Config, load
from saccade.devices import Device
from saccade.estimate.advice import advice
from saccade.estimate.memory import Memory, memory_of
from saccade.estimate.pace import Pace, pace_of
from saccade.estimate.plan import Plan, make_plan
from saccade.estimate.sizing import make_step, typical_prompts
from saccade.recipes import parts

__all__ = ["Estimate", "estimate"]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    device: Device
    prompts: str  # how long they are, and who says so
    memory: Memory
    pace: Pace | None  # none where it does not fit
    advice: tuple[str, ...]  # what lifts the limit, each alone; nothing where it fits
    note: str  # what is not counted


def estimate(
    config: Config,
    device: Device,
    *,
    prompt_tokens: int | None = None,
    image: tuple[int, int] | None = None,
) -> Estimate:
    """For prompts as long as said, or else as those of the data."""
    family = parts.family_of(config, parts.start_folder(config))
    if config.run.memory is not None:
        device = replace(device, memory=min(device.memory, config.run.memory))
    prompts, said = typical_prompts(config, family, prompt_tokens=prompt_tokens, image=image)

    def planned(*changes: str) -> Plan:
        changed = load(config, changes)
        algorithm = from_config(changed)
        step = make_step(changed, algorithm, family, prompts)
        return make_plan(changed, algorithm, family, device, step)

    plan = planned()
    memory = memory_of(plan)
    return Estimate(
        device=device,
        prompts=said,
        memory=memory,
        pace=pace_of(plan, memory) if memory.fits else None,
        note=not_counted(config),
        advice=() if memory.fits else tuple(advice(plan, lambda c: memory_of(planned(*c)).fits)),
    )


def not_counted(config: Config) -> str:
    """The rollout is always counted as that of the embedded engine in the trainer's process."""
    rollout = config.rollout
    if rollout.engine != "embedded":
        return (
            f"rollout.engine={rollout.engine} is not counted, the rollout is that of the embedded "
            f"engine; it holds {rollout.memory_share:g} of its GPUs (rollout.memory_share) while "
            "it generates"
        )
    if rollout.replicas:
        return (
            f"rollout.replicas={rollout.replicas} is not counted, the rollout is that of one "
            "engine in the trainer's process; each replica holds the weights once more"
        )
    return ""
