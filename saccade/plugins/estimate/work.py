"""FLOPs and bytes of the phases of a step, from its records; and the seconds of a planned one: counted
work over what a device can do at best, times how much of that is reached.

`flops/PHASE` are 1e12 operations that the phase needed, `bytes/rollout` 1e9 bytes that decoding had
to read; MFU and the share of the bandwidth are these against the peak of the device.

    values |= rl_work(policy, critic, updates, config, algorithm, step)()
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from typing import Any
from weakref import WeakKeyDictionary

from saccade.algorithms.resolved_algorithm import Algorithm
from saccade.config import ADAPTED, Config
from saccade.forest.batch import Batch
from saccade.plugins.estimate import flops, memory_items
from saccade.plugins.estimate.batch_plan import ModelSize, Plan
from saccade.plugins.estimate.flops import FROZEN, Meter
from saccade.plugins.estimate.memory_items import GIB, Memory, state_sizes, total
from saccade.plugins.estimate.shapes import shape_of
from saccade.plugins.gpu.decode_state import FEW_ROWS
from saccade.plugins.ranks.layouts import Sizes, collective_seconds, controller_seconds, exchange_seconds, key_repeats
from saccade.system.devices import Device
from saccade.trainer import Trainer
from saccade.types import Group

TERA, GIGA = 1e12, 1e9
SPEEDS = {  # amount, seconds
    "perf/rollout_tokens_per_s": ("count/rollout_tokens", "time/rollout"),
    "perf/update_tokens_per_s": ("count/update_tokens", "time/update"),
    "perf/samples_per_s": ("count/samples", "time/step"),
    "perf/tokens_per_s_per_gpu": ("count/update_tokens", "time/step"),
}
# Calibrated on one H200 and taken for every GPU: how much of the peak of a data sheet is reached,
# of bytes (reading, the optimizer) or of FLOPs.
REACHED = {"reading": 0.8, "decode": 0.5, "prefill": 0.35, "score": 0.47, "optimizer": 0.7}
# Of an update: the products of matrices, and the attention of the decoder, whose rows are short and gather their keys.
REACHED |= {"update": 0.68, "attention": 0.3}
# What norms, gates, rotations and sums read and write there, as a multiple of what layers keep; it grows with the width
# of a model, products with its square, so that a wide one reaches more of the peak.
MOVED = 12
REACHED["main memory"] = 0.87  # 55 GB/s in each direction, of pinned memory
# Seconds of a layer that no peak shortens, kernel after kernel: in a step of decoding few rows or
# many, beside what it reads, and at least in forward and backward of a micro-batch, which the host hands to the GPU.
LAYER = {
    "full": {"few": 43e-6, "many": 55e-6, "update": 2.5e-3},
    "lora": {"few": 107e-6, "many": 107e-6, "update": 3.4e-3},
    "qlora": {"few": 268e-6, "many": 268e-6, "update": 13e-3},
}
# By model. To look at all parameters of one takes 40 ms, during which no other thread hands kernels to a GPU.
METERS = WeakKeyDictionary[Any, Meter]()
OPTIMIZER_BYTES = 40  # read and written per trained weight: gradient, clipping, master, moments


def passes(
    policy: Meter,
    critic: Meter | None,
    scored: Sequence[Batch],
    trained: Sequence[Batch],
    algorithm: Algorithm,
    *,
    epochs: int,
    warming: bool = False,
    train_step: Callable[..., tuple[float, float]] = Meter.train_step,
) -> tuple[dict[str, float], dict[str, float]]:
    """FLOPs of scoring and training by phase, and those that policy and critic only repeat. A frozen tower
    encodes an image in the first pass that shows it. `warming`: the critic learns alone. `train_step` may
    count something else of an update.
    """
    known, frozen, work = False, flops.towers_frozen(policy.training), dict[str, float]()
    if algorithm.old == "recompute":
        work["logp_old"] = policy.score(scored)
        known = frozen
    if algorithm.needs_reference:
        shared = any(tower.adapters for tower in policy.training.values())  # it is the policy without its adapters
        reference = replace(policy, training=FROZEN)
        work["logp_ref"] = reference.score(scored, media=not (known and shared))
        known |= frozen and shared
    if critic is not None:
        work["values"] = critic.score(scored)
    work["update"], again = 0.0, {"critic": 0.0, "policy": 0.0}
    learners = {"critic": critic, "policy": None if warming else policy}
    for (name, learner), epoch in product(learners.items(), range(epochs)):
        if learner is None:
            continue
        looked = epoch > 0 or known or learner is critic  # for the values
        shown = not (flops.towers_frozen(learner.training) and looked)
        useful, repeated = train_step(learner, trained, media=shown)
        work["update"] += useful
        again[name] += repeated
    return work, again


def meter(backend: Trainer, repeats: float) -> Meter:
    """`repeats`: share of the layers that compute their activations again."""
    model, tower_of = backend.model, backend.family.tower_of
    if model not in METERS:
        trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
        training = flops.training_of(model, trained, tower_of)
        METERS[model] = Meter(shape=shape_of(model, tower_of), training=training, head=not hasattr(model, "score"))
    return replace(METERS[model], repeats=lambda batch: repeats)


def rollout_work(trained: Trainer, groups: Sequence[Group], config: Config) -> dict[str, float]:
    """The work of sampling these groups with the policy `trained`."""
    policy, four_bit = meter(trained, 0.0), config.model.train == "qlora"
    made = flops.generation(policy, groups, element=trained.dtype.itemsize, four_bit=four_bit)
    count, size = made.prefill.total() + made.decode.total(), made.read_bytes(config.rollout.max_sequences)
    return {"flops/rollout": count / TERA, "bytes/rollout": size / GIGA}


def rl_work(
    trained: Trainer,
    judging: Trainer | None,
    updates: Sequence[Sequence[Batch]],
    config: Config,
    algorithm: Algorithm,
    step: int,
) -> Callable[[], dict[str, float]]:
    """The work of a step of reinforcement learning behind its rollouts, with the policy `trained` and
    the critic `judging`. `updates` have their scales. It is counted at once; how much of it was repeated
    is asked for after the updates, by who calls the result.
    """
    critic = meter(judging, 1.0) if judging is not None else None
    scaled = [part for part in updates if any(batch.scales is not None and batch.scales.any() for batch in part)]
    scored, learnt = [*chain(*updates)], [*chain(*scaled)]
    epochs, warming = config.train.epochs_per_batch, algorithm.is_warming(step)
    work, again = passes(meter(trained, 1.0), critic, scored, learnt, algorithm, epochs=epochs, warming=warming)

    def told() -> dict[str, float]:
        shares = {"policy": trained.repeats(), "critic": judging.repeats() if judging is not None else 0.0}
        repeated = sum(shares[name] * count for name, count in again.items())
        return {f"flops/{phase}": count / TERA for phase, count in (work | {"recomputed": repeated}).items()}

    return told


def offline_work(backend: Trainer, batches: Sequence[Batch]) -> dict[str, float]:
    useful, again = meter(backend, backend.repeats()).train_step(batches)
    return {"flops/update": useful / TERA, "flops/recomputed": again / TERA}


def rates(metrics: Mapping[str, float], times: Mapping[str, Any], device: Device) -> dict[str, float]:
    """`perf/…`: what the step counted (`count/…`) for each second of its phases; `perf/mfu_PHASE` and
    `perf/bandwidth_rollout` over what the device could have done in that time, if its peaks are known.
    """
    found = {
        name: metrics[count] / times[seconds]
        for name, (count, seconds) in SPEEDS.items()
        if count in metrics and times.get(seconds)
    }
    peaks = {"flops": ("mfu", device.tflops), "bytes": ("bandwidth", (device.bandwidth or 0) * TERA / GIGA)}
    for name, amount in metrics.items():
        kind, _, phase = name.partition("/")
        share, peak = peaks.get(kind, ("", None))
        if peak and (seconds := times.get(f"time/{phase}")):
            found[f"perf/{share}_{phase}"] = amount / (seconds * peak)
    each = {name for name in found if name.endswith("_per_gpu") or name.startswith(("perf/mfu", "perf/bandwidth"))}
    return {name: value / device.count if name in each else value for name, value in found.items()}


# -- seconds of a plan ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pace:
    tflop: dict[str, float]  # 1e12 operations that each phase needs
    recomputed: float  # those that are repeated in the update
    seconds: dict[str, float]  # nothing where the device has no known peak


def pace_of(plan: Plan, memory: Memory) -> Pace:
    device, step, train = plan.device, plan.step, plan.config.train
    policy, *critic = meters = [_meter(plan, learner, memory.free) for learner in plan.learners]
    made = flops.generation(policy, step.groups, element=plan.element, four_bit=plan.config.model.train == "qlora")
    # How often the groups are sampled by this GPU, and their forests computed by those that share them.
    epochs, sampled, times = train.epochs_per_batch, train.prompts_per_step / len(step.groups), step.times
    made_by = partial(passes, *(policy, next(iter(critic), None), step.batches, step.batches), plan.algorithm)
    counted, repeated = made_by(epochs=epochs)
    work = {phase: count * times / plan.together for phase, count in counted.items()}
    if plan.samples:
        work = {"rollout": sampled * (made.prefill.total() + made.decode.total())} | work
    if plan.teacher:
        read = sum(batch.tokens for batch in step.batches)
        work["teacher"] = 2 * plan.teacher * read * times / plan.together
    again = times / plan.together * sum(repeated.values())
    pace = Pace(tflop={phase: count / TERA for phase, count in work.items()}, recomputed=again / TERA, seconds={})
    if device.tflops is None or device.bandwidth is None or device.link is None:
        return pace
    peak, bandwidth, shape = device.tflops * TERA, device.bandwidth * TERA, policy.shape
    least = LAYER.get(plan.config.model.train, LAYER["full"])
    seconds = {phase: count / (peak * REACHED["score"]) for phase, count in work.items()}
    if plan.samples:  # as many sequences at once as the pool of keys and values holds
        per_sequence = shape.kv_bytes(plan.element) * step.mean_length + shape.state_bytes
        at_once = max(1, min(plan.sequences, int(memory.pool * GIB / per_sequence)))
        steps = max(made.longest, made.sampled * sampled / at_once)
        rows = made.sampled * sampled / steps
        size = steps * made.weight_bytes(rows) + made.cache_bytes * sampled
        decode = steps * shape.text.layers * least["few" if rows <= FEW_ROWS else "many"] + max(
            size / (bandwidth * REACHED["reading"]), made.decode.total() * sampled / (peak * REACHED["decode"])
        )
        seconds["rollout"] = decode + made.prefill.total() * sampled / (peak * REACHED["prefill"])
    updates = epochs * plan.algorithm.updates_per_step
    weights, gpus = sum(learner.trained for learner in plan.learners), plan.config.run.gpus
    stepped = updates * OPTIMIZER_BYTES * weights * plan.share("state") / (bandwidth * REACHED["optimizer"])
    timed, _ = made_by(epochs=epochs, train_step=partial(_forests_seconds, plan, peak, bandwidth))
    seconds["update"] = stepped + times * timed["update"]
    if train.offload and device.host is not None:  # both directions at once
        kept = sum(state_sizes(plan).values()) * weights * plan.share("state")
        seconds["offload"] = updates * kept / (device.host * GIGA * REACHED["main memory"])
    if gpus > 1:
        links = device.link, device.network
        forests = epochs * times * len(step.batches)
        divided = [learner.weights for learner in plan.learners if plan.divides(learner)]
        adapters = policy.trained if plan.config.model.train in ADAPTED else 0  # whole on every GPU
        trained, own = weights - adapters, policy.trained - adapters
        # A copy that was given back lost what is frozen, too.
        copied = (policy.weights if train.offload else plan.element * own) * plan.divides(plan.policy) * plan.samples
        sizes = Sizes(sums=4 * trained, trained=plan.element * trained, divided=sum(divided), copied=copied)
        sent: Any = {"updates": updates, "forests": forests, "layers": shape.text.layers, "compute": seconds["update"]}
        layout = plan.layout if divided else "whole"
        seconds["exchange"] = exchange_seconds(layout, sizes, links, gpus=gpus, **sent)
        seconds["exchange"] += updates * collective_seconds((4 + plan.element) * adapters, links, gpus=gpus)
        # Where GPUs share a forest: queries, keys, values and results of attention.
        scored = len(work.keys() - {"rollout", "update"})
        passed = sum(
            batch.tokens * (scored + sum(epochs * (2 + meter.repeats(batch)) for meter in meters))
            for batch in step.batches
        )
        heads = shape.text.queries + shape.text.keys * key_repeats(shape.key_heads, plan.together)
        size = 2 * plan.element * shape.text.layers * heads * times / plan.together * passed
        seconds["exchange"] += collective_seconds(size, links, gpus=plan.together)
        seconds["controller"] = controller_seconds(made.sampled * sampled, gpus=gpus)
    return replace(pace, seconds=seconds)


def _forests_seconds(
    plan: Plan, peak: float, bandwidth: float, learner: ModelSize, batches: Sequence[Batch], *, media: bool
) -> tuple[float, float]:
    """Forward and backward, forest by forest and tower by tower: what the GPU computes and moves, or, if that takes
    longer, what the host takes to hand it the kernels. It gets little ahead of the GPU, so a small tower waits for it
    whatever a large decoder does. Backward is two thirds of what a layer takes that recomputes nothing.
    """
    least, found = LAYER.get(plan.config.model.train, LAYER["full"]), 0.0
    works = learner.learn(batches, media=media)
    frozen = works[len(batches) :]  # what their towers encode once is as much in each forest
    for batch, (useful, again) in zip(batches, works, strict=False):
        run = 1 + learner.repeats(batch) / 3
        passed = {tower.name: tower for tower in memory_items.passed_towers(plan, learner, batch)}
        spent = dict.fromkeys(("llm", *learner.shape.senses), 0.0)
        for work, share in ((useful, 1.0), (again, 1.0), *((once, 1 / len(batches)) for once, _ in frozen)):
            for part, count in work.items():
                reached = REACHED["attention" if part == "llm/attention" else "update"]
                tower = part.partition("/")[0]
                spent[tower if tower in learner.shape.senses else "llm"] += share * count / (peak * reached)
        for name, computed in spent.items():
            if not computed:  # it sees or hears nothing
                continue
            stack = learner.shape.senses.get(name, learner.shape.text)
            moved = MOVED * run * passed[name].layers * passed[name].kept if name in passed else 0.0
            each = (least if name == "llm" else LAYER["full"])["update"]  # adapters are in the decoder
            handed = stack.layers * each * (run if name in passed else 1 / 3)
            found += max(computed / plan.together + moved / (bandwidth * REACHED["optimizer"]), handed)
    return found, 0.0


def _meter(plan: Plan, learner: ModelSize, free: float) -> ModelSize:
    """The learner, which knows how much of a batch it computes again with so many GiB free."""
    left = free - total(memory_items.beside_activations(plan, learner))
    keeping, layers = partial(memory_items.layers_that_keep, plan, learner, free=left), learner.shape.text.layers
    return replace(learner, repeats=lambda batch: 1 - keeping(batch).layers[0] / layers)
