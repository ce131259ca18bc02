"""What a config of `saccade rl` needs of a device, before anything is loaded: memory by item,
seconds by phase, and the option to change where it does not fit.

Memory and work are those of the model's modules, built without weights. Seconds are counted work
over the peak of the device times a share that was measured on one GPU: an estimate.

    found = estimate(load("run.yaml"), devices.named("H200"))
    found.memory.peaks, found.pace.seconds, found.advice
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from saccade.algorithms.build import from_config
from saccade.config import ADAPTED, Config, DataConfig, LoraConfig, RewardConfig, RolloutConfig, load
from saccade.data.sources import parse_address
from saccade.models.families import Family
from saccade.plugins.estimate.advice import advice
from saccade.plugins.estimate.batch_plan import ROWS, Plan, Prompts, make_step, prompts_of, typical_prompts
from saccade.plugins.estimate.memory_items import Item, Memory, host_items, memory_of, reward_folders, weights_in
from saccade.plugins.estimate.model_size import ModelSize, empty_model, full_rank, size_of
from saccade.plugins.estimate.pace import Pace, pace_of
from saccade.recipes import model_setup, questions
from saccade.system.devices import Device, in_precision, no_limit
from saccade.types import Sample


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
    family = known = family or model_setup.family_of(config, model_setup.start_folder(config))
    model, data, rollout = config.model, config.data, config.rollout
    notes = [*not_counted(rollout), *missing_rewards(config.reward)]
    if unlimited := no_limit(config.run.gpu_memory_gib, device):
        notes.append(unlimited)
    if config.run.gpu_memory_gib is not None and device.is_gpu:
        device = replace(device, memory=min(device.memory, config.run.gpu_memory_gib))
    if (precise := in_precision(device, model.dtype)) != device:
        notes.append("no seconds with model.dtype=float32: peaks are known in bfloat16 only")
        device = precise
    element = element_of(model.dtype, device)
    empty = empty_model(family, trust_remote_code=model.trust_remote_code)
    if model.train in ADAPTED and model.lora.rank > (full := full_rank(empty, family, model.lora)):
        notes.append(f"model.lora.rank={model.lora.rank} adds nothing to {full}, the rank of whole matrices")

    @cache
    def size(train: str, lora: LoraConfig) -> ModelSize:
        return size_of(empty, known, lora, element=element, train=train)

    @cache
    def prompts(max_pixels: int) -> Prompts:
        if samples is not None and max_pixels == data.max_pixels:
            return prompts_of(samples, known)
        changed = load(config, [f"data.max_pixels={max_pixels}"], "rl")
        few = [s.model_copy(update={"max_samples": ROWS}) for s in data.train]
        there = few and not missing_data(data)
        read = lambda: questions.load_prompts(changed, few, known).samples  # noqa: E731
        return typical_prompts(changed.data, known, read if there else None, prompt_tokens=prompt_tokens, image=image)

    def planned(*changes: str) -> Plan:
        changed = load(config, " ".join(changes).split(), "rl")
        algorithm, (train, lora) = from_config(changed), (changed.model.train, changed.model.lora)
        typical, _ = prompts(changed.data.max_pixels)
        return Plan(
            model=changed.model,
            train=changed.train,
            rollout=changed.rollout,
            data=changed.data,
            reward=changed.reward,
            algorithm=algorithm,
            device=device,
            step=make_step(changed.train, changed.rollout.max_tokens, algorithm, known, typical),
            policy=size(train, lora),
            # A copy, since the critic is no policy.
            whole=replace(size("full" if train in ADAPTED else train, lora)),
            element=element,
        )

    first, about = prompts(data.max_pixels)
    asked = samples is not None or prompt_tokens is not None
    notes += length_notes(data, max(map(len, first)), [] if asked else missing_data(data))
    plan = planned()
    memory = memory_of(plan)
    if (chosen := plan.algorithm.filter).dynamic:
        notes.append(
            "one round of dynamic sampling is counted; a step takes up to "
            f"algorithm.filter.max_rounds={chosen.max_rounds}"
        )
    if config.env.max_turns > 1:
        notes.append(
            f"of an episode of env.name={config.env.name} one response is counted, and nothing "
            "that the environment says"
        )
    return Estimate(
        device=device,
        prompts=about,
        memory=memory,
        host=host_items(plan, memory, background=config.save.background),
        pace=pace_of(plan, memory) if memory.fits else None,
        notes=tuple(notes),
        advice=() if memory.fits else tuple(advice(plan, lambda c: memory_of(planned(*c)).fits)),
    )


def element_of(dtype: str, device: Device) -> int:
    """Bytes of a weight as `model.dtype` loads it there."""
    wide = {"auto": not device.is_gpu, "float32": True, "bfloat16": False}
    return 4 if wide[dtype] else 2


def missing_data(data: DataConfig) -> list[str]:
    paths = [parse_address(source.path).path for source in data.train]
    return [str(path) for path in paths if not Path(path).exists()]


# -- notes -----------------------------------------------------------------------------------------


def not_counted(rollout: RolloutConfig) -> Iterator[str]:
    """The rollout is always counted as that of the embedded engine in the trainer's process."""
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


def missing_rewards(reward: RewardConfig) -> Iterator[str]:
    for folder in reward_folders(reward):
        if not weights_in(folder):
            yield f"the reward model {folder} is not counted: no *.safetensors lie there"


def length_notes(data: DataConfig, longest: int, missing: Sequence[str]) -> Iterator[str]:
    """What happens to prompts that are too long, and which files of the data are missing."""
    most = data.max_prompt_tokens
    if longest > most:
        happens = {"drop": "leaves {} out", "error": "stops at {}"}
        what = happens.get(data.overlong, "shortens {}").format(f"prompts of {longest} tokens")
        yield f"a run {what}: data.max_prompt_tokens={most}"
    if missing:
        planned = f"prompts are as long as data.max_prompt_tokens={most} allows"
        if longest > most:
            planned = "of prompts only the picture is counted"
        yield f"data.train: {', '.join(missing)} not found, so {planned}"
