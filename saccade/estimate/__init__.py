"""What a config of `saccade rl` needs of a device, before anything is loaded: memory by item,
seconds by phase, and the option to change where it does not fit.

Memory follows from shapes alone. Seconds are counted work over the peak of the device times a share
that was measured on one GPU: an estimate, and called that.

    found = estimate(load("run.yaml"), devices.named("H200"))
    found.memory.peaks, found.seconds, found.advice
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from saccade.algorithms.build import from_config
from saccade.config import ADAPTED, Config, load
from saccade.devices import Device, in_precision, no_limit
from saccade.estimate.advice import advice
from saccade.estimate.host import host_of
from saccade.estimate.memory import Item, Memory, memory_of, reward_folders, weights_in
from saccade.estimate.pace import Pace, pace_of
from saccade.estimate.plan import Plan, element_of, make_plan
from saccade.estimate.sizing import (
    build_skeleton,
    empty_model,
    full_rank,
    make_step,
    missing_data,
    prompts_of,
    typical_prompts,
)
from saccade.models.families import Family
from saccade.recipes import models
from saccade.types import Rendered, Sample


@dataclass(frozen=True, kw_only=True)
class Estimate:
    device: Device
    prompts: str  # how long they are, and who says so
    memory: Memory
    host: tuple[Item, ...]  # in main memory, beside a GPU
    pace: Pace | None  # none where it does not fit
    advice: tuple[str, ...]  # what lifts the limit, each alone; nothing where it fits
    notes: tuple[str, ...]  # what is not counted, or not as the config says


def estimate(
    config: Config,
    device: Device,
    *,
    prompt_tokens: int | None = None,
    image: tuple[int, int] | None = None,
    family: Family | None = None,
    samples: Sequence[Sample] | None = None,
) -> Estimate:
    """For prompts as long as said, or else as those of the data. What is loaded already need not
    be loaded again: the family, `samples` of the data.
    """
    family = family or models.family_of(config, models.start_folder(config))
    notes = [*not_counted(config), *missing_rewards(config)]
    if unlimited := no_limit(config.run.memory, device):
        notes.append(unlimited)
    if config.run.memory is not None and device.is_gpu:
        device = replace(device, memory=min(device.memory, config.run.memory))
    if (device := in_precision(known := device, config.model.dtype)) != known:
        notes.append("no seconds with model.dtype=float32: peaks are known in bfloat16 only")
    model, element = empty_model(config, family), element_of(config, device)
    notes += excessive_rank(config, model, family)
    build = cache(lambda train, lora: build_skeleton(lora, family, model, element, train))

    @cache
    def prompts(max_pixels: int) -> tuple[list[Rendered], str]:
        if samples is not None and max_pixels == config.data.max_pixels:
            return prompts_of(samples, family)
        changed = load(config, [f"data.max_pixels={max_pixels}"])
        return typical_prompts(changed, family, prompt_tokens=prompt_tokens, image=image)

    def planned(*changes: str) -> Plan:
        changed = load(config, " ".join(changes).split())
        algorithm = from_config(changed)
        step = make_step(changed, algorithm, family, prompts(changed.data.max_pixels)[0])
        return make_plan(changed, algorithm, device, step, build)

    first, about = prompts(config.data.max_pixels)
    longest = max(map(len, first))
    notes += too_long(config, longest)
    if samples is None and prompt_tokens is None:
        notes += missing_rows(config, longest)
    plan = planned()
    memory = memory_of(plan)
    if (chosen := plan.algorithm.filter).dynamic:
        notes.append(
            "one round of dynamic sampling is counted; a step takes up to "
            f"algorithm.filter.max_rounds={chosen.max_rounds}"
        )
    if config.env.turns > 1:
        notes.append(
            f"of an episode of env.name={config.env.name} one response is counted, and nothing "
            "that the environment says"
        )
    return Estimate(
        device=device,
        prompts=about,
        memory=memory,
        host=host_of(plan, memory),
        pace=pace_of(plan, memory) if memory.fits else None,
        notes=tuple(notes),
        advice=() if memory.fits else tuple(advice(plan, lambda c: memory_of(planned(*c)).fits)),
    )


def not_counted(config: Config) -> Iterator[str]:
    """The rollout is always counted as that of the embedded engine in the trainer's process."""
    rollout = config.rollout
    if rollout.engine != "embedded":
        yield (
            f"rollout.engine={rollout.engine} is not counted, the rollout is that of the embedded "
            f"engine; it holds {rollout.memory_share:g} of its GPUs (rollout.memory_share) while "
            "it generates"
        )
    elif rollout.replicas:
        yield (
            f"rollout.replicas={rollout.replicas} is not counted, the rollout is that of one "
            "engine in the trainer's process; each replica holds the weights once more"
        )


def missing_rewards(config: Config) -> Iterator[str]:
    for folder in reward_folders(config):
        if not weights_in(folder):
            yield f"the reward model {folder} is not counted: no *.safetensors lie there"


def excessive_rank(config: Config, model: Any, family: Family) -> Iterator[str]:
    settings = config.model.lora
    if config.model.train in ADAPTED and settings.rank > (
        full := full_rank(model, family, settings)
    ):
        yield f"model.lora.rank={settings.rank} adds nothing to {full}, the rank of whole matrices"


def missing_rows(config: Config, longest: int) -> Iterator[str]:
    if missing := missing_data(config):
        most = config.data.max_prompt_tokens
        planned = f"prompts are as long as data.max_prompt_tokens={most} allows"
        if longest > most:
            planned = "of prompts only the picture is counted"
        yield f"data.train: {', '.join(missing)} not found, so {planned}"


def too_long(config: Config, longest: int) -> Iterator[str]:
    if longest > (most := config.data.max_prompt_tokens):
        happens = {"drop": "leaves {} out", "error": "stops at {}"}
        what = happens.get(config.data.overlong, "shortens {}").format(
            f"prompts of {longest} tokens"
        )
        yield f"a run {what}: data.max_prompt_tokens={most}"
