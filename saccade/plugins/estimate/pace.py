"""Seconds of a plan by phase: counted work over what a device can do at best, times how much of
that is reached.
"""

from __future__ import annotations

from dataclasses import dataclass

from saccade.plugins.estimate.batch_plan import ModelSize, Plan
from saccade.plugins.estimate.flops import Generation
from saccade.plugins.estimate.memory_items import GIB, Memory, layers_that_keep
from saccade.plugins.estimate.work import TERA, Meter, passes
from saccade.plugins.gpu.decode_state import FEW_ROWS

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
    step, train = plan.step, plan.config.train
    policy, *critic = meters = [_meter(plan, learner, memory.free) for learner in plan.learners]
    made = policy.generation(step.groups, element=plan.element, four_bit=plan.config.model.train == "qlora")
    epochs = train.epochs_per_batch
    work = passes(policy, next(iter(critic), None), step.batches, step.batches, plan.algorithm, epochs=epochs)
    work = {phase: count * step.repeats for phase, count in work.items()}
    again = work.pop("recomputed")
    work = {"rollout": step.times * made.prefill.total() + step.repeats * made.decode.total()} | work
    # Backward is two thirds of what a layer takes that recomputes nothing.
    layers = sum(_layers(meter) * (1 + meter.repeats(batch) / 3) for meter in meters for batch in step.batches)
    return Pace(
        tflop={phase: count / TERA for phase, count in work.items()},
        recomputed=again / TERA,
        seconds=_seconds(plan, memory, made, work, again, epochs * step.repeats * layers),
    )


def _meter(plan: Plan, learner: ModelSize, free: float) -> Meter:
    left, layers = free - 4 * learner.trained / GIB, learner.shape.text.layers
    return Meter(
        shape=learner.shape,
        training=learner.training,
        head=learner.head,
        repeats=lambda batch: 1 - layers_that_keep(plan, learner, batch, left).text / layers,
    )


def _layers(meter: Meter) -> int:
    """Layers that are trained."""
    towers = meter.shape.senses.items()
    return meter.shape.text.layers + sum(tower.stack.layers for name, tower in towers if meter.training[name].passed)


def _seconds(
    plan: Plan, memory: Memory, made: Generation, work: dict[str, float], again: float, layers: float
) -> dict[str, float]:
    device, times, repeats = plan.device, plan.step.times, plan.step.repeats
    if device.tflops is None or device.bandwidth is None:
        return {}
    peak, bandwidth = device.tflops * TERA, device.bandwidth * TERA
    shape, train = plan.policy.shape, plan.config.train
    least = LAYER.get(plan.config.model.train, LAYER["full"])
    per_sequence = shape.kv_bytes(plan.element) * plan.step.mean_length
    at_once = max(1, min(plan.sequences, int(memory.pool * GIB / per_sequence)))
    steps = max(made.longest, made.sampled * repeats / at_once)
    rows = made.sampled * repeats / steps
    read = steps * made.weight_bytes(rows) + made.cache_bytes * repeats
    decode = steps * shape.text.layers * least["few" if rows <= FEW_ROWS else "many"] + max(
        read / (bandwidth * REACHED["reading"]), made.decode.total() * repeats / (peak * REACHED["decode"])
    )
    updates = train.epochs_per_batch * plan.algorithm.updates_per_step
    moved = updates * OPTIMIZER_BYTES * sum(learner.trained for learner in plan.learners)
    seconds = {phase: count / (peak * REACHED["score"]) for phase, count in work.items()}
    seconds["rollout"] = decode + made.prefill.total() * times / (peak * REACHED["prefill"])
    trained = (work["update"] + again) / (peak * REACHED["update"])
    seconds["update"] = max(trained + moved / (bandwidth * REACHED["optimizer"]), layers * least["update"])
    return seconds
