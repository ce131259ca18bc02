"""Seconds of a plan by phase: counted work over what a device can do at best, times how much of
that is reached.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from saccade.engines.embedded.decode_state import FEW_ROWS, members_of
from saccade.plugins.estimate import flops
from saccade.plugins.estimate.batch_plan import Plan
from saccade.plugins.estimate.flops import Generation
from saccade.plugins.estimate.memory_items import GIB, Memory, layers_that_keep

TERA = 1e12
# Calibrated on one H200 and taken for every GPU: how much of the peak of a data sheet is reached,
# of bytes (reading, the optimizer) or of FLOPs.
REACHED = {"reading": 0.8, "decode": 0.5, "prefill": 0.35, "score": 0.47, "update": 0.46, "optimizer": 0.7}
# Seconds of a layer that no peak shortens, kernel after kernel: in a step of decoding few rows or
# many, beside what it reads, and at least in forward and backward of a micro-batch.
LAYER = {
    "full": {"few": 43e-6, "many": 55e-6, "update": 4.6e-3},
    "lora": {"few": 107e-6, "many": 107e-6, "update": 10e-3},
    "qlora": {"few": 268e-6, "many": 268e-6, "update": 16e-3},
}
OPTIMIZER_BYTES = 40  # read and written per trained weight: gradient, clipping, master, moments


@dataclass(frozen=True, kw_only=True)
class Pace:
    tflop: dict[str, float]  # 1e12 operations that each phase needs
    recomputed: float  # those that are repeated in the update
    seconds: dict[str, float]  # nothing where the device has no known peak


def pace_of(plan: Plan, memory: Memory) -> Pace:
    made, step = _generation(plan), plan.step
    passes, again, layers = _passes(plan, memory)
    work = {"rollout": step.times * made.prefill.total + step.repeats * made.decode.total} | passes
    return Pace(
        tflop={phase: count / TERA for phase, count in work.items()},
        recomputed=again / TERA,
        seconds=_seconds(plan, memory, made, work, again, layers),
    )


def _generation(plan: Plan) -> Generation:
    shape = plan.policy.shape
    return flops.generation(
        shape,
        plan.step.groups,
        element=plan.element,
        together=members_of(shape.queries_per_key),
        four_bit=plan.model.train == "qlora",
        training=plan.policy.training,
    )


def _passes(plan: Plan, memory: Memory) -> tuple[dict[str, float], float, float]:
    """FLOPs of scoring and training, and of recomputed activations; layers that are trained, once
    for each micro-batch. A frozen tower encodes a picture in the first pass only.
    """
    shape, step, epochs = plan.policy.shape, plan.step, plan.train.epochs_per_batch

    def scored(**options: Any) -> float:
        return sum(flops.forward(shape, batch, **options).total for batch in step.batches)

    stands, known = plan.policy.training.towers_frozen, False
    work = {}
    if plan.algorithm.old == "recompute":
        work["logp_old"] = scored(training=plan.policy.training)
        known = stands
    if plan.algorithm.needs_reference:
        work["logp_ref"] = scored(media=not (known and plan.adapted))
        known |= stands and plan.adapted
    if plan.algorithm.needs_critic:
        work["values"] = scored(head=False)  # no logits
    work["update"] = again = layers = 0.0
    for learner in plan.learners:
        free = memory.free - 4 * learner.trained / GIB
        stack = shape.text.layers
        if (vision := shape.senses.get("vision")) and learner.training.mode("vision") != "frozen":
            stack += vision.stack.layers
        looks = epochs
        if learner.training.towers_frozen:
            looks = 0 if known or learner is plan.critic else 1
        for batch in step.batches:
            one = flops.forward(shape, batch, head=learner is plan.policy, training=learner.training)
            seen = one.of("vision")
            share = 1 - layers_that_keep(plan, learner, batch, free).text / shape.text.layers
            useful = one.total - seen + flops.backward(one, learner.training)
            work["update"] += epochs * useful + looks * seen
            again += epochs * share * flops.recomputed(shape, one, learner.training)
            layers += epochs * stack * (1 + share / 3)  # backward is two thirds
    work = {phase: count * step.repeats for phase, count in work.items()}
    return work, again * step.repeats, layers * step.repeats


def _seconds(
    plan: Plan, memory: Memory, made: Generation, work: dict[str, float], again: float, layers: float
) -> dict[str, float]:
    device, times, repeats = plan.device, plan.step.times, plan.step.repeats
    if device.tflops is None or device.bandwidth is None:
        return {}
    peak, bandwidth = device.tflops * TERA, device.bandwidth * TERA
    shape, least = plan.policy.shape, LAYER.get(plan.model.train, LAYER["full"])
    per_sequence = shape.kv_bytes(plan.element) * plan.step.mean_length
    at_once = max(1, min(plan.sequences, int(memory.pool * GIB / per_sequence)))
    steps = max(made.longest, made.sampled * repeats / at_once)
    rows = made.sampled * repeats / steps
    read = steps * made.weight_bytes(rows) + made.cache_bytes * repeats
    decode = steps * shape.text.layers * least["few" if rows <= FEW_ROWS else "many"] + max(
        read / (bandwidth * REACHED["reading"]), made.decode.total * repeats / (peak * REACHED["decode"])
    )
    updates = plan.train.epochs_per_batch * plan.algorithm.updates_per_step
    moved = updates * OPTIMIZER_BYTES * sum(learner.trained for learner in plan.learners)
    seconds = {phase: count / (peak * REACHED["score"]) for phase, count in work.items()}
    seconds["rollout"] = decode + made.prefill.total * times / (peak * REACHED["prefill"])
    trained = (work["update"] + again) / (peak * REACHED["update"])
    seconds["update"] = max(trained + moved / (bandwidth * REACHED["optimizer"]), layers * least["update"])
    return seconds
