"""FLOPs and bytes of the phases of a step, from its records; and seconds of a planned step: its work
divided by the device's peak and by the fraction of the peak that is reached.

`flops/PHASE` is in 1e12 operations that the phase needs, `bytes/rollout` in 1e9 bytes that decoding
has to read; MFU and bandwidth share are these per second, divided by the device's peak.

    values |= rl_work(policy, critic, updates, config.train, algorithm, step)()
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from typing import Any
from weakref import WeakKeyDictionary

from saccade.algorithms.resolved_algorithm import Algorithm
from saccade.config import ADAPTED, Config, TrainConfig
from saccade.forest.batch import Batch
from saccade.plugins.estimate import flops, memory_items
from saccade.plugins.estimate.batch_plan import ModelSize, Plan
from saccade.plugins.estimate.flops import FROZEN, Meter
from saccade.plugins.estimate.memory_items import GIB, Memory, state_sizes, total
from saccade.plugins.estimate.shapes import shape_of
from saccade.plugins.gpu.decode_state import FEW_ROWS
from saccade.plugins.ranks.layouts import CONTROLLER, Sizes, collective_seconds, exchange_seconds, key_repeats
from saccade.system.devices import Device
from saccade.trainer import Trainer
from saccade.types import Group

TERA, GIGA = 1e12, 1e9
SPEEDS = {  # metric: (amount, seconds)
    "perf/rollout_tokens_per_s": ("count/rollout_tokens", "time/rollout"),
    "perf/update_tokens_per_s": ("count/update_tokens", "time/update"),
    "perf/samples_per_s": ("count/samples", "time/step"),
    "perf/tokens_per_s_per_gpu": ("count/update_tokens", "time/step"),
}
# Fraction of the data sheet's peak that is reached, of bandwidth (reading, the optimizer) or of FLOPs;
# calibrated on one H200 and used for every GPU.
REACHED = {"reading": 0.8, "decode": 0.5, "prefill": 0.35, "score": 0.47, "optimizer": 0.7}
# In the update: matrix products, and decoder attention, whose rows are short and whose keys are gathered.
REACHED |= {"update": 0.68, "attention": 0.3}
# Bytes that norms, gates, rotations and sums read and write in the update, as a multiple of saved activations. They
# grow with a model's width, matrix products with its square, so a wide model reaches more of the peak.
MOVED = 12
REACHED["main memory"] = 0.87  # 55 GB/s in each direction, of pinned memory
# Seconds per layer that do not depend on the peak (kernel launches): "few" or "many" rows of a decode step, in
# addition to reading; "update" is the least time of forward and backward of a micro-batch, launched by the host.
LAYER = {
    "full": {"few": 43e-6, "many": 55e-6, "update": 2.5e-3},
    "lora": {"few": 107e-6, "many": 107e-6, "update": 3.4e-3},
    "qlora": {"few": 268e-6, "many": 268e-6, "update": 13e-3},
}
# By model: iterating over all parameters takes 40 ms, during which no other thread can launch kernels.
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
    """FLOPs of scoring and training by phase, and FLOPs of recomputation of policy and critic. A frozen tower
    encodes an image only in the first pass over it. `warming`: only the critic is trained. `train_step`
    may measure something else than FLOPs for the update.
    """
    known, frozen, work = False, flops.towers_frozen(policy.training), dict[str, float]()
    if algorithm.old == "recompute":
        work["logp_old"] = policy.score(scored)
        known = frozen
    if algorithm.needs_reference:
        shared = any(tower.adapters for tower in policy.training.values())  # then it is the policy without adapters
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
        looked = epoch > 0 or known or learner is critic  # it was encoded before (by the critic: for the values)
        shown = not (flops.towers_frozen(learner.training) and looked)
        useful, repeated = train_step(learner, trained, media=shown)
        work["update"] += useful
        again[name] += repeated
    return work, again


def meter(trainer: Trainer, repeats: float) -> Meter:
    """The meter of a trainer's model. `repeats`: share of the layers that recompute their activations."""
    model, tower_of = trainer.model, trainer.family.tower_of
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
    train: TrainConfig,
    algorithm: Algorithm,
    step: int,
) -> Callable[[], dict[str, float]]:
    """The work of a step of reinforcement learning after its rollouts, with the policy `trained`, the critic
    `judging`, and `updates` with their scales. The work is counted now. Call the returned function after
    the updates: only then is known how much was recomputed.
    """
    critic = meter(judging, 1.0) if judging is not None else None
    scaled = [part for part in updates if any(batch.scales is not None and batch.scales.any() for batch in part)]
    scored, learnt = [*chain(*updates)], [*chain(*scaled)]
    epochs, warming = train.epochs_per_batch, algorithm.is_warming(step)
    work, again = passes(meter(trained, 1.0), critic, scored, learnt, algorithm, epochs=epochs, warming=warming)

    def told() -> dict[str, float]:
        shares = {"policy": trained.recomputed_share(), "critic": judging.recomputed_share() if judging else 0.0}
        repeated = sum(shares[name] * count for name, count in again.items())
        return {f"flops/{phase}": count / TERA for phase, count in (work | {"recomputed": repeated}).items()}

    return told


def offline_work(trainer: Trainer, batches: Sequence[Batch]) -> dict[str, float]:
    useful, again = meter(trainer, trainer.recomputed_share()).train_step(batches)
    return {"flops/update": useful / TERA, "flops/recomputed": again / TERA}


def rates(metrics: Mapping[str, float], times: Mapping[str, Any], device: Device) -> dict[str, float]:
    """`perf/…` metrics: counts of the step (`count/…`) per second of their phases; `perf/mfu_PHASE` and
    `perf/bandwidth_rollout` relative to the device's peaks, if these are known.
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
    recomputed: float  # 1e12 operations of recomputation in the update
    seconds: dict[str, float]  # by phase; empty if the device's peak is unknown
    step: float = 0.0  # seconds: their sum; less if engines generate while GPUs beside them train


def pace_of(plan: Plan, memory: Memory) -> Pace:
    device, step, train = plan.device, plan.step, plan.config.train
    policy, *critic = meters = [_meter(plan, learner, memory.free) for learner in plan.learners]
    made = flops.generation(policy, step.groups, element=plan.element, four_bit=plan.config.model.train == "qlora")
    # Factors from the plan's groups to those that this GPU samples, and to those that its set of GPUs trains on.
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
    seconds = {phase: count / (peak * REACHED["score"]) for phase, count in work.items()}
    if plan.samples:
        seconds["rollout"] = _rollout_seconds(plan, made, peak, bandwidth, pool=memory.pool)
    updates = epochs * plan.algorithm.updates_per_step
    weights, gpus = sum(learner.trained for learner in plan.learners), plan.config.run.gpus
    stepped = updates * OPTIMIZER_BYTES * weights * plan.share("state") / (bandwidth * REACHED["optimizer"])
    timed, _ = made_by(epochs=epochs, train_step=partial(_forests_seconds, plan, peak, bandwidth))
    seconds["update"] = stepped + times * timed["update"]
    if train.offload and device.host is not None:  # both directions run at the same time
        kept = sum(state_sizes(plan).values()) * weights * plan.share("state")
        seconds["offload"] = updates * kept / (device.host * GIGA * REACHED["main memory"])
    if gpus > 1:
        links = device.link, device.network
        forests = epochs * times * len(step.batches)
        divided = [learner.weights for learner in plan.learners if plan.divides(learner)]
        adapters = policy.trained if plan.config.model.train in ADAPTED else 0  # replicated on every GPU
        trained, own = weights - adapters, policy.trained - adapters
        # With offload, the copy for generation was freed, so frozen weights are gathered again, too.
        copied = (policy.weights if train.offload else plan.element * own) * plan.divides(plan.policy) * plan.samples
        sizes = Sizes(sums=4 * trained, trained=plan.element * trained, divided=sum(divided), copied=copied)
        sent: Any = {"updates": updates, "forests": forests, "layers": shape.text.layers, "compute": seconds["update"]}
        layout = plan.layout if divided else "whole"
        seconds["exchange"] = exchange_seconds(layout, sizes, links, gpus=gpus, **sent)
        seconds["exchange"] += updates * collective_seconds((4 + plan.element) * adapters, links, gpus=gpus)
        # If GPUs share a forest, they exchange queries, keys, values and outputs of attention.
        scored = len(work.keys() - {"rollout", "update"})
        passed = sum(
            batch.tokens * (scored + sum(epochs * (2 + meter.repeats(batch)) for meter in meters))
            for batch in step.batches
        )
        heads = shape.text.queries + shape.text.keys * key_repeats(shape.key_heads, plan.together)
        size = 2 * plan.element * shape.text.layers * heads * times / plan.together * passed
        seconds["exchange"] += collective_seconds(size, links, gpus=plan.together)
        seconds["controller"] = CONTROLLER * made.sampled * sampled * gpus
    taken, sampling, chosen = sum(seconds.values()), seconds.get("rollout", 0.0), plan.config.rollout
    aside = min(sampling, taken - sampling) if chosen.ahead and chosen.replicas else 0.0
    return replace(pace, seconds=seconds, step=taken - aside)


def _rollout_seconds(plan: Plan, made: flops.Generation, peak: float, bandwidth: float, *, pool: float) -> float:
    """Seconds to sample a step, with as many sequences at a time as fit into the KV cache (`pool` GiB): on each GPU
    that trains, or on each engine beside them, which may have several GPUs and shares the prompts with the others.
    """
    rollout, shape, own = plan.config.rollout, plan.policy.shape, float(plan.config.train.prompts_per_step)
    least, at_once, gpus = LAYER.get(plan.config.model.train, LAYER["full"]), plan.sequences, 1
    if rollout.replicas:
        gpus, own = rollout.tensor_parallel, own * plan.config.run.gpus / rollout.replicas
        peak, bandwidth, pool = peak * gpus, bandwidth * gpus, pool * gpus
    sampled = own / len(plan.step.groups)
    per_sequence = shape.kv_bytes(plan.element) * plan.step.mean_length + shape.state_bytes
    at_once = max(1, min(at_once, int(pool * GIB / per_sequence)))
    steps = max(made.longest, made.sampled * sampled / at_once)
    rows = made.sampled * sampled / steps
    size = steps * made.weight_bytes(rows) + made.cache_bytes * sampled
    decode = steps * shape.text.layers * least["few" if rows <= FEW_ROWS else "many"] + max(
        size / (bandwidth * REACHED["reading"]), made.decode.total() * sampled / (peak * REACHED["decode"])
    )
    return decode + made.prefill.total() * sampled / (peak * REACHED["prefill"])


def _forests_seconds(
    plan: Plan, peak: float, bandwidth: float, learner: ModelSize, batches: Sequence[Batch], *, media: bool
) -> tuple[float, float]:
    """Seconds of forward and backward, summed over forests and towers: compute and memory traffic of the GPU, or the
    host's time to launch the kernels, if that is longer. The maximum is per tower, as the host is never far ahead of
    the GPU. Backward is two thirds of the time without recomputation, which adds another forward.
    """
    least, found = LAYER.get(plan.config.model.train, LAYER["full"]), 0.0
    works = learner.learn(batches, media=media)
    frozen = works[len(batches) :]  # media that frozen towers encode once; divided evenly among the forests
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
            if not computed:  # there are no media for this tower
                continue
            stack = learner.shape.senses.get(name, learner.shape.text)
            moved = MOVED * run * passed[name].layers * passed[name].kept if name in passed else 0.0
            each = (least if name == "llm" else LAYER["full"])["update"]  # only the decoder has adapters
            handed = stack.layers * each * (run if name in passed else 1 / 3)
            found += max(computed / plan.together + moved / (bandwidth * REACHED["optimizer"]), handed)
    return found, 0.0


def _meter(plan: Plan, learner: ModelSize, free: float) -> ModelSize:
    """The learner, with `repeats` set to the share of layers that recompute with this many GiB free."""
    left = free - total(memory_items.beside_activations(plan, learner))
    keeping, layers = partial(memory_items.layers_that_keep, plan, learner, free=left), learner.shape.text.layers
    return replace(learner, repeats=lambda batch: 1 - keeping(batch).layers[0] / layers)
