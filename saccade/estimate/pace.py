"""Seconds of a plan by phase: counted work over what a device can do at best, times how much of
that is reached.
"""

from __future__ import annotations

from dataclasses import dataclass

from saccade import flops
from saccade.estimate.memory import GIB, Memory, layers_that_keep
from saccade.estimate.plan import Plan
from saccade.flops import Generation

TERA = 1e12
# Calibrated on one H200 and taken for every GPU: how much of the peak of a data sheet a phase
# reaches, of FLOPs or (decoding, the optimizer) of bytes.
REACHED = {"prefill": 0.4, "decode": 0.4, "score": 0.47, "update": 0.48, "optimizer": 0.7}
OPTIMIZER_BYTES = 40  # read and written per trained weight: gradient, clipping, master, moments


@dataclass(frozen=True, kw_only=True)
class Pace:
    tflop: dict[str, float]  # 1e12 operations that each phase needs
    recomputed: float  # those that are repeated in the update
    seconds: dict[str, float]  # nothing where the device has no known peak


def pace_of(plan: Plan, memory: Memory) -> Pace:
    made, step = _generation(plan), plan.step
    passes, again = _passes(plan, memory)
    work = {"rollout": step.times * (made.prefill.total + made.decode.total)} | passes
    return Pace(
        tflop={phase: count / TERA for phase, count in work.items()},
        recomputed=again / TERA,
        seconds=_seconds(plan, memory, made, work, again),
    )


def _generation(plan: Plan) -> Generation:
    return flops.generation(
        plan.policy.shape, plan.step.groups, element=plan.element, training=plan.policy.training
    )


def _passes(plan: Plan, memory: Memory) -> tuple[dict[str, float], float]:
    """FLOPs of scoring and training, and of recomputed activations."""
    shape, step = plan.policy.shape, plan.step
    epochs = plan.config.train.epochs_per_batch
    forward = step.times * sum(flops.forward(shape, batch).total for batch in step.batches)
    extra = {
        "logp_old": plan.algorithm.old == "recompute",
        "logp_ref": plan.algorithm.needs_reference,
        "values": plan.algorithm.needs_critic,
    }
    work = {phase: forward for phase, made in extra.items() if made} | {"update": 0.0}
    again = 0.0
    for learner in plan.learners:
        free = memory.free - 4 * learner.trained / GIB
        for batch in step.batches:
            one = flops.forward(
                shape, batch, head=learner is plan.policy, training=learner.training
            )
            keeping, _ = layers_that_keep(plan, learner, batch, free)
            share = 1 - keeping / shape.text.layers
            work["update"] += one.total + flops.backward(one, learner.training)
            again += share * flops.recomputed(shape, one, learner.training)
    work["update"] *= step.times * epochs
    return work, again * step.times * epochs


def _seconds(
    plan: Plan, memory: Memory, made: Generation, work: dict[str, float], again: float
) -> dict[str, float]:
    device, times = plan.device, plan.step.times
    if device.tflops is None or device.bandwidth is None:
        return {}
    peak, bandwidth = device.tflops * TERA, device.bandwidth * TERA
    per_sequence = plan.policy.shape.kv_bytes(plan.element) * plan.step.mean_length
    at_once = max(1, min(plan.sequences, int(memory.pool * GIB / per_sequence)))
    steps = max(made.longest, made.sampled * times / at_once)
    rows = made.sampled * times / steps
    read = steps * made.weight_bytes(rows) + made.cache_bytes * times
    decode = max(
        read / (bandwidth * REACHED["decode"]),
        made.decode.total * times / (peak * REACHED["prefill"]),
    )
    updates = plan.config.train.epochs_per_batch * plan.algorithm.updates_per_step
    moved = updates * OPTIMIZER_BYTES * sum(learner.trained for learner in plan.learners)
    seconds = {phase: count / (peak * REACHED["score"]) for phase, count in work.items()}
    seconds["rollout"] = decode + made.prefill.total * times / (peak * REACHED["prefill"])
    seconds["update"] = (work["update"] + again) / (peak * REACHED["update"])
    seconds["update"] += moved / (bandwidth * REACHED["optimizer"])
    return seconds
