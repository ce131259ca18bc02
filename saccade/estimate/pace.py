"""Seconds of a plan by phase: counted work over what a device can do at best, times how much of
that is reached.
"""

from __future__ import annotations

from dataclasses import dataclass

from saccade import flops
from saccade.engines.embedded.rows import FEW, members_of
from saccade.estimate.memory import GIB, Memory, layers_that_keep
from saccade.estimate.plan import Plan
from saccade.flops import Generation

TERA = 1e12
# Calibrated on one H200 and taken for every GPU: how much of the peak of a data sheet is reached,
# of bytes (reading, the optimizer) or of FLOPs.
REACHED = {
    "reading": 0.8,
    "decode": 0.5,
    "prefill": 0.35,
    "score": 0.47,
    "update": 0.46,
    "optimizer": 0.7,
}
# Seconds of a layer that no peak shortens, kernel after kernel: in a step of decoding FEW rows or
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
        together=members_of(shape.text.queries_per_key),
        four_bit=plan.config.model.train == "qlora",
        training=plan.policy.training,
    )


def _passes(plan: Plan, memory: Memory) -> tuple[dict[str, float], float, float]:
    """FLOPs of scoring and training, and of recomputed activations; layers that are trained, once
    for each micro-batch.
    """
    shape, step = plan.policy.shape, plan.step
    repeats = step.repeats * plan.config.train.epochs_per_batch
    scored, valued = (
        step.repeats * sum(flops.forward(shape, batch, head=head).total for batch in step.batches)
        for head in (True, False)  # values need no logits
    )
    extra = {
        "logp_old": scored if plan.algorithm.old == "recompute" else 0.0,
        "logp_ref": scored if plan.algorithm.needs_reference else 0.0,
        "values": valued if plan.algorithm.needs_critic else 0.0,
    }
    work = {phase: count for phase, count in extra.items() if count} | {"update": 0.0}
    again = layers = 0.0
    for learner in plan.learners:
        free = memory.free - 4 * learner.trained / GIB
        stack = shape.text.layers
        if shape.vision is not None and learner.training.mode("vision") != "frozen":
            stack += shape.vision.blocks.layers
        for batch in step.batches:
            one = flops.forward(
                shape, batch, head=learner is plan.policy, training=learner.training
            )
            share = 1 - layers_that_keep(plan, learner, batch, free).text / shape.text.layers
            work["update"] += one.total + flops.backward(one, learner.training)
            again += share * flops.recomputed(shape, one, learner.training)
            layers += stack * (1 + share / 3)  # backward is two thirds
    work["update"] *= repeats
    return work, again * repeats, layers * repeats


def _seconds(
    plan: Plan,
    memory: Memory,
    made: Generation,
    work: dict[str, float],
    again: float,
    layers: float,
) -> dict[str, float]:
    device, times, repeats = plan.device, plan.step.times, plan.step.repeats
    if device.tflops is None or device.bandwidth is None:
        return {}
    peak, bandwidth = device.tflops * TERA, device.bandwidth * TERA
    shape, least = plan.policy.shape, LAYER.get(plan.config.model.train, LAYER["full"])
    per_sequence = shape.kv_bytes(plan.element) * plan.step.mean_length
    at_once = max(1, min(plan.sequences, int(memory.pool * GIB / per_sequence)))
    steps = max(made.longest, made.sampled * repeats / at_once)
    rows = made.sampled * repeats / steps
    read = steps * made.weight_bytes(rows) + made.cache_bytes * repeats
    decode = steps * shape.text.layers * least["few" if rows <= FEW else "many"] + max(
        read / (bandwidth * REACHED["reading"]),
        made.decode.total * repeats / (peak * REACHED["decode"]),
    )
    updates = plan.config.train.epochs_per_batch * plan.algorithm.updates_per_step
    moved = updates * OPTIMIZER_BYTES * sum(learner.trained for learner in plan.learners)
    seconds = {phase: count / (peak * REACHED["score"]) for phase, count in work.items()}
    seconds["rollout"] = decode + made.prefill.total * times / (peak * REACHED["prefill"])
    trained = (work["update"] + again) / (peak * REACHED["update"])
    seconds["update"] = max(
        trained + moved / (bandwidth * REACHED["optimizer"]), layers * least["update"]
    )
    return seconds
