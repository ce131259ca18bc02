"""Estimates what a config of `saccade rl` needs on a device before anything is loaded: memory by item,
seconds by phase, and, if it does not fit, which options to change.

Memory and work are derived from the model's modules, built without weights. Seconds are FLOPs or bytes
divided by the device's peak and by the fraction of it that one GPU reached in measurements.

    found = estimate(load("run.yaml"), devices.lookup("H200"))
    found.memory.peaks, found.pace.seconds, found.advice
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import gcd
from pathlib import Path
from typing import Any

from saccade.algorithms.resolved_algorithm import Algorithm
from saccade.checks.steps import algorithm_of
from saccade.config import ADAPTED, Config, DataConfig, LoraConfig, TrainConfig, load
from saccade.data.sources import parse_address
from saccade.models.families import Family
from saccade.plugins.estimate import batch_plan
from saccade.plugins.estimate.batch_plan import ModelSize, Plan, Prompts, Step
from saccade.plugins.estimate.flops import SENSE_OF
from saccade.plugins.estimate.memory_items import GIB, Item, Memory, host_items, memory_of, reward_folders, weights_in
from saccade.plugins.estimate.work import Pace, pace_of
from saccade.plugins.ranks.layouts import NODE, candidates, generates, more_gpus, numbers_in, require_heads
from saccade.plugins.reward_models.reward_model_term import model_terms
from saccade.recipes import model_setup, questions
from saccade.system.devices import Device, in_precision, limit_problem
from saccade.types import Sample

SMALLEST_BATCH, SHORTEST_RESPONSE = 1024, 256  # tokens
SMALLEST_PICTURE, SMALLEST_RANK = 224 * 224, 8
Fits = Callable[[Sequence[str]], bool]  # whether the plan fits with these options changed


@dataclass(frozen=True, kw_only=True)
class Estimate:
    device: Device  # each GPU, or the CPU
    gpus: int
    layout: str  # whole, sharded or hybrid
    reason: str  # for that layout, with several GPUs
    prompts: str  # their lengths, and the source of these
    memory: Memory
    host: tuple[Item, ...]  # main memory; empty without a GPU
    pace: Pace | None  # None if it does not fit
    efficiency: dict[str, float]  # speed per GPU relative to one GPU, with as many prompts per GPU or per step
    advice: tuple[str, ...]  # option changes, each of which makes it fit; empty if it fits
    notes: tuple[str, ...]  # what is not counted, or differs from the config


def estimate(
    config: Config,
    device: Device,
    *,
    command: str = "rl",
    prompt_tokens: int | None = None,
    image: tuple[int, int] | None = None,
    family: Family | None = None,
    samples: Sequence[Sample] | None = None,
) -> Estimate:
    """Estimate with prompts of `prompt_tokens` and `image` (width, height), by default those of the data.
    Pass `family` and `samples` (rows of the data) if they are loaded already.
    """
    family = family or model_setup.family_of(config, model_setup.start_folder(config))
    if config.run.gpus > 1:
        require_heads(config, family)
    named = config.sft.teacher if command == "sft" else None
    teacher = numbers_in(Path(named)) if named and not named.startswith("tiny:") else 0
    others = {"generates": generates(config, command), "samples": command == "rl", "teacher": teacher}
    config = as_rl(config, command, family)
    device, of_device = as_configured(device, config)
    paths = [parse_address(source.path).path for source in config.data.train]
    missing = [str(path) for path in paths if not Path(path).exists()]

    @cache
    def prompts(max_pixels: int) -> Prompts:
        """Typical prompts with images of at most `max_pixels`."""
        changed, rows = load(config, [f"data.max_pixels={max_pixels}"], "rl"), None
        if samples is not None and max_pixels == config.data.max_pixels:
            rows = samples
        elif paths and not missing and prompt_tokens is None:
            few = [source.model_copy(update={"max_samples": batch_plan.ROWS}) for source in config.data.train]
            rows = questions.load_prompts(changed, few, family).samples
        return batch_plan.typical_prompts(changed.data, family, rows, prompt_tokens=prompt_tokens, image=image)

    planned = planner(config, device, family, prompts, others)
    first, about = prompts(config.data.max_pixels)
    if command != "rl":
        rows = config.data.max_prompt_tokens + config.rollout.max_tokens
        about = about.replace("(data.max_prompt_tokens)", f"(of rows of {rows})")
    asked = samples is not None or prompt_tokens is not None
    lengths = length_notes(config.data, max(map(len, first)), [] if asked else missing)
    uncounted = not_counted(config) if others["generates"] else ()
    plan = planned()
    memory, pace = paced(plan)
    speed = {}
    if pace and pace.step and config.run.gpus > 1:  # of one GPU alone with the prompts of a rank, or of the step
        if not config.rollout.replicas:
            speed["prompts per GPU"] = 1 - (pace.seconds["exchange"] + pace.seconds["controller"]) / pace.step
        if alone := step_seconds(planned("run.gpus=1 rollout.replicas=0")):
            gpus = config.run.gpus + config.rollout.replicas * config.rollout.tensor_parallel
            speed["prompts per step"] = alone / gpus / pace.step
    return Estimate(
        device=device,
        gpus=config.run.gpus,
        layout=plan.layout,
        reason=layout_reason(plan),
        prompts=about,
        memory=memory,
        host=host_items(plan, memory, background=config.save.background),
        pace=pace,
        efficiency=speed,
        notes=(*unknown_towers(plan, family), *uncounted, *of_device, *lengths),
        advice=() if memory.fits else tuple(advice(plan, lambda c: memory_of(planned(*c)).fits)),
    )


def as_rl(config: Config, command: str, family: Family) -> Config:
    """A config of `saccade rl` that needs as much memory as this `command` with rows of the greatest length."""
    if command == "rl":
        return config
    tree = config.model_dump(mode="json", exclude_unset=True)
    kept = {part: tree.get(part, {}) for part in ("model", "data", "train", "run")}
    if generates(config, command):  # it generates answers in validation
        kept["rollout"] = {"replicas": config.rollout.replicas}
    longest, beside = getattr(config, command.replace("-", "_")).max_tokens, command == "dpo" and config.dpo.reference
    asked = min(config.data.max_prompt_tokens, family.max_positions // 2, longest // 2)
    kept["data"] |= {"train": [], "max_prompt_tokens": asked}
    changes = [f"rollout.max_tokens={longest - asked}", f"train.samples_per_prompt={1 + (command != 'sft')}"]
    changes += ["algorithm.preset=reinforce", f"algorithm.kl.coef={0.04 * (beside == 'compute')}"]
    return load(kept, changes, "rl")


def as_configured(device: Device, config: Config) -> tuple[Device, list[str]]:
    """The device as limited by the config (memory, dtype), and notes about that."""
    limit = config.run.gpu_memory_gib
    notes = [*filter(None, [limit_problem(limit, device)])]
    if limit is not None and device.is_gpu:
        device = replace(device, memory=min(device.memory, limit))
    if (precise := in_precision(device, config.model.dtype)) != device:
        notes.append("no seconds with model.dtype=float32: peaks are known in bfloat16 only")
    return precise, notes


def planner(
    config: Config, device: Device, family: Family, prompts: Callable[[int], Prompts], others: Mapping[str, Any]
) -> Callable[..., Plan]:
    """A function (*changes) → plan of the config with options changed as "a=1 b=2"; an open layout is the `best`."""
    model = config.model
    # Bytes per weight with `model.dtype` on that device.
    element = 4 if model.dtype == "float32" or (model.dtype == "auto" and not device.is_gpu) else 2
    empty = batch_plan.empty_model(family, trust_remote_code=model.trust_remote_code)

    @cache
    def size(train: str, lora: LoraConfig) -> ModelSize:
        return batch_plan.size_of(empty, family, lora, element=element, train=train)

    steps = list[tuple[Any, Step]]()  # and what each was made of, which few changes are to

    def step_of(changed: Config, train: TrainConfig, algorithm: Algorithm) -> Step:
        new, pixels = changed.rollout.max_tokens, changed.data.max_pixels
        given = (train.prompts_per_step, train.micro_tokens, new, pixels, algorithm)
        if not (known := [step for before, step in steps if before == given]):
            known.append(batch_plan.make_step(train, new, algorithm, prompts(pixels)[0]))
            steps.append((given, known[0]))
        return known[0]

    def planned(*changes: str) -> Plan:
        changed = load(config, " ".join(changes).split(), "rl")
        algorithm, (train, lora) = algorithm_of(changed), (changed.model.train, changed.model.lora)
        groups = (max(1, changed.run.gpus // together) for together in (1, changed.train.sequence_parallel))
        alone, shared = (  # with the most prompts per step of one rank, and of one sequence-parallel group
            changed.train.model_copy(update={"prompts_per_step": -(-changed.train.prompts_per_step // count)})
            for count in groups
        )
        layouts, _ = candidates(changed.train.layout, gpus=changed.run.gpus, cuda=device.is_gpu)
        plan = Plan(
            config=changed.model_copy(update={"train": alone}),
            algorithm=algorithm,
            device=device,
            layout=layouts[0],
            step=step_of(changed, shared, algorithm),
            policy=size(train, lora),
            whole=size("full" if train in ADAPTED else train, lora),
            element=element,
            **others,
        )
        return best([replace(plan, layout=layout) for layout in layouts])

    return planned


def best(plans: Sequence[Plan]) -> Plan:
    """Choose among plans that differ in layout: whole if it fits, else the fastest that fits, else the last."""
    if len(plans) == 1 or (plans[0].layout == "whole" and memory_of(plans[0]).fits):
        return plans[0]
    fitting = [plan for plan in plans if memory_of(plan).fits] or plans[-1:]
    return min(fitting, key=step_seconds) if len(fitting) > 1 else fitting[0]


def step_seconds(plan: Plan) -> float:
    """Seconds of a step; 0 if unknown."""
    _, pace = paced(plan)
    return pace.step if pace else 0.0


def paced(plan: Plan) -> tuple[Memory, Pace | None]:
    memory = memory_of(plan)
    return memory, pace_of(plan, memory) if memory.fits else None


def layout_reason(plan: Plan) -> str:
    config, whole = plan.config, memory_of(replace(plan, layout="whole"))
    known, reason = candidates(config.train.layout, gpus=config.run.gpus, cuda=plan.device.is_gpu)
    if len(known) == 1:
        return reason
    peak = f"{max(whole.peaks.values()):.1f} GiB, and {whole.limit:.1f} can be planned with"
    if whole.fits:
        return f"a GPU needs {peak}"
    seconds = {layout: step_seconds(replace(plan, layout=layout)) for layout in known[1:]}
    compared = "; a step takes " + ", ".join(f"{layout} {each:.1f} s" for layout, each in seconds.items())
    return f"whole, a GPU would need {peak}" + compared * (len(seconds) > 1 and all(seconds.values()))


# -- notes -----------------------------------------------------------------------------------------


def not_counted(config: Config) -> Iterator[str]:
    """Notes on what is not counted; another engine is counted as if it were the embedded one."""
    rollout, filtered = config.rollout, algorithm_of(config).filter
    if rollout.engine != "embedded":
        held = f"while it generates it holds {rollout.memory_share:g} of its GPUs (rollout.memory_share)"
        yield f"seconds of rollout.engine={rollout.engine} are those of the embedded engine; {held}"
    for folder in reward_folders(config.reward):
        if not weights_in(folder):
            yield f"the reward model {folder} is not counted: no *.safetensors lie there"
    if idle := max(0, config.run.gpus - config.train.prompts_per_step):
        yield f"train.prompts_per_step={config.train.prompts_per_step} leaves {idle} of {config.run.gpus} GPUs idle"
    if filtered.dynamic:
        most = f"algorithm.filter.max_rounds={filtered.max_rounds}"
        yield f"one round of dynamic sampling is counted; a step takes up to {most}"
    if config.env.max_turns > 1:
        what = "one response is counted, and nothing that the environment says"
        yield f"of an episode of env.name={config.env.name} {what}"


def unknown_towers(plan: Plan, family: Family) -> Iterator[str]:
    """Notes on towers that have no list of layers, such as pure convolutions."""
    for sense in set(SENSE_OF.values()) & set(family.spec.towers) - set(plan.policy.shape.senses):
        yield f"the {sense} tower is not counted, only its weights: it has no layers that repeat"


def length_notes(data: DataConfig, longest: int, missing: Sequence[str]) -> Iterator[str]:
    """Notes on what happens to prompts that are too long, and on missing data files."""
    most = data.max_prompt_tokens
    if longest > most:
        what = {"drop": "leaves {} out", "error": "stops at {}"}.get(data.overlong, "shortens {}")
        yield f"a run {what.format(f'prompts of {longest} tokens')}: data.max_prompt_tokens={most}"
    if missing:
        allowed = f"prompts are as long as data.max_prompt_tokens={most} allows"
        counted = "of prompts only the image is counted" if longest > most else allowed
        yield f"data.train: {', '.join(missing)} not found, so {counted}"


# -- which option makes a plan fit -----------------------------------------------------------------


def advice(plan: Plan, fits: Fits) -> Iterator[str]:
    """Every option change that is enough alone; if none is, one combination that is enough."""
    options = ladder(plan)
    alone = [next((value for value in values if fits([value])), None) for values in options.values()]
    yield from filter(None, alone)
    chosen = {name: values[-1] for name, values in options.items()}
    if not any(alone) and not fits(list(chosen.values())):
        chosen.pop("run.gpus", None)  # with several GPUs, the first one also holds the controller's process
    if any(alone) or not fits(list(chosen.values())):
        return
    # Weaken the strongest values to the mildest ones that still fit, beginning with the most costly option.
    for name in reversed(chosen.copy()):
        others = [value for other, value in chosen.items() if other != name]
        if fits(others):
            del chosen[name]
        else:
            chosen[name] = next(value for value in options[name] if fits([*others, value]))
    yield " ".join(chosen.values())


def ladder(plan: Plan) -> dict[str, list[str]]:
    """Options that save memory, the least costly first: name → changes, mildest first."""
    model, train, data, reward = (getattr(plan.config, part) for part in ("model", "train", "data", "reward"))
    rollout, wider = plan.config.rollout, _divisors(plan) if plan.config.rollout.replicas else []
    other = "vllm" if rollout.engine == "embedded" else rollout.engine
    gpus, without = plan.config.run.gpus, " train.ema=0" if train.ema else ""  # there is no average of adapters
    heads = plan.whole.shape.queries_per_key * plan.whole.shape.key_heads
    adapters = {"lora": ["qlora"], "qlora": []}.get(model.train, ["lora", "qlora"])
    shortest = max(SHORTEST_RESPONSE, 2 * (plan.config.algorithm.overlong.buffer or 0))
    smallest = max(data.min_pixels, SMALLEST_PICTURE) if plan.step.pictures else data.max_pixels
    smaller = ["adamw", "adamw_bf16", *(["adamw_8bit"] if gpus == 1 else [])]
    options = {
        "model.checkpointing": {"off": ["auto", "on"], "auto": ["on"]}.get(model.checkpointing, []),
        "train.micro_tokens": _halves(train.micro_tokens, SMALLEST_BATCH),
        "reward.offload": ["true"] if model_terms(reward) and not reward.offload else [],
        "rollout.max_sequences": _halves(plan.sequences, 1) if plan.generates else [],
        "train.offload": ["true"] if plan.device.is_gpu and not train.offload else [],
        "train.optimizer": smaller[smaller.index(train.optimizer) + 1 :] if plan.element < 4 else [],
        "rollout.replicas": _engines_beside(plan),
        "rollout.tensor_parallel": [f"{n} rollout.engine={other}" for n in wider if n > rollout.tensor_parallel],
        "train.ema": ["0"] if train.ema else [],
        "model.train": [f"{kind}{without}" for kind in adapters],
        "model.lora.rank": _halves(model.lora.rank, SMALLEST_RANK),
        "rollout.max_tokens": _halves(rollout.max_tokens, shortest),
        "data.max_pixels": _halves(data.max_pixels, smallest),
        "train.sequence_parallel": [f"{n}" for n in (2, 4, 8) if n > plan.together and gcd(gpus, heads) % n == 0],
        "train.layout": ["sharded"] * (gpus > 1 and plan.layout != "sharded"),
        "run.gpus": more_gpus(gpus, train.layout) if plan.device.is_gpu else [],
    }
    return {name: [f"{name}={value}" for value in values] for name, values in options.items() if values}


def _engines_beside(plan: Plan) -> list[str]:
    """Half of the GPUs generate, so the others hold no copy of all weights: as few GPUs for an engine as leave half of
    its memory to keys and values.
    """
    rollout, gpus = plan.config.rollout, plan.config.run.gpus // 2
    chosen = plan.layout == "whole" or rollout.replicas or rollout.engine != "embedded"
    if chosen or gpus < NODE // 2 or gpus % plan.together or not plan.samples:
        return []
    room = rollout.memory_share * plan.device.memory * GIB / 2
    enough = [n for n in _divisors(plan) if gpus % n == 0 and plan.policy.weights / n <= room][:1]
    vllm = " rollout.engine=vllm rollout.tensor_parallel="
    return [f"{gpus // n} run.gpus={gpus}" + f"{vllm}{n}" * (n > 1) for n in enough]


def _divisors(plan: Plan) -> list[int]:
    """Numbers of GPUs that an engine may have."""
    return [n for n in (1, 2, 4, NODE) if plan.whole.shape.key_heads % n == 0]


def _halves(value: int, least: int) -> list[str]:
    """Half the value, half of that and so on, down to `least`."""
    found = []
    while value > least:
        value = max(value // 2, least)
        found.append(f"{value}")
    return found
