"""FLOPs and bytes of the phases of a step, from its records.

`flops/PHASE` are 1e12 operations that the phase needed, `bytes/rollout` 1e9 bytes that decoding had
to read; MFU and the share of the bandwidth are these against the peak of the device.

    values |= rl_work(policy, critic, groups, updates, config, algorithm, step)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from saccade.algorithms.resolved_algorithm import Algorithm
from saccade.config import ADAPTED, Config
from saccade.engines.embedded.decode_state import members_of
from saccade.plugins.estimate import flops
from saccade.plugins.estimate.flops import FROZEN, Training, Work
from saccade.plugins.estimate.shapes import Shape, shape_of
from saccade.system.devices import Device
from saccade.trainer.local import LocalBackend
from saccade.types import Batch, Group

TERA, GIGA = 1e12, 1e9
SPEEDS = {  # amount, seconds
    "perf/rollout_tokens_per_s": ("count/rollout_tokens", "time/rollout"),
    "perf/update_tokens_per_s": ("count/update_tokens", "time/update"),
    "perf/samples_per_s": ("count/samples", "time/step"),
    "perf/tokens_per_s_per_gpu": ("count/update_tokens", "time/step"),  # a process has one
}


@dataclass(frozen=True, kw_only=True)
class Meter:
    """What has to be known of a model to count its work."""

    shape: Shape
    training: Training
    repeats: float  # share of the layers that compute their activations again
    head: bool  # logits are read, not values

    def forward(self, batches: Sequence[Batch], *, media: bool = True) -> Work:
        every = media and not self.training.towers_frozen
        work = Work()
        for batch in batches:
            work += flops.forward(self.shape, batch, head=self.head, media=every, training=self.training)
        if media and self.training.towers_frozen:
            once = {span.media.key: span for batch in batches for span in batch.media}
            work += flops.encode(self.shape, once.values())
        return work

    def train_step(self, batches: Sequence[Batch], *, media: bool = True) -> tuple[float, float]:
        """Useful FLOPs, and those that are only repeated."""
        work = self.forward(batches, media=media)
        again = self.repeats * flops.recomputed(self.shape, work, self.training)
        return work.total + flops.backward(work, self.training), again


def meter(backend: LocalBackend) -> Meter:
    """Of the micro-batches since the last one."""
    model: Any = backend.model
    assert backend.optimizer is not None, "a backend that trains"
    trained = {name: p.numel() for name, p in backend.optimizer.parameters.items()}
    return Meter(
        shape=shape_of(model, backend.family.tower_of),
        training=flops.training_of(model, trained, backend.family.tower_of),
        repeats=backend.recompute.repeated(),
        head=not hasattr(model, "score"),
    )


def rl_work(
    trained: LocalBackend,
    judging: LocalBackend | None,
    groups: Sequence[Group],
    updates: Sequence[Sequence[Batch]],
    config: Config,
    algorithm: Algorithm,
    step: int,
) -> dict[str, float]:
    """The work of all phases of a step of reinforcement learning, with the policy `trained` and
    the critic `judging`. `groups` are those that were sampled, `updates` have their scales.
    """
    policy = meter(trained)
    critic = meter(judging) if judging is not None else None
    made = flops.generation(
        policy.shape,
        groups,
        element=trained.dtype.itemsize,
        together=members_of(policy.shape.queries_per_key),
        four_bit=config.model.train == "qlora",
        training=policy.training,
    )
    work = {"rollout": made.prefill.total + made.decode.total, "update": 0.0, "recomputed": 0.0}
    every = [batch for part in updates for batch in part]
    known = False  # features of frozen towers
    if algorithm.old == "recompute":
        work["logp_old"] = policy.forward(every).total
        known = policy.training.towers_frozen
    if algorithm.needs_reference:
        reference, shared = replace(policy, training=FROZEN), config.model.train in ADAPTED
        work["logp_ref"] = reference.forward(every, media=not (known and shared)).total
        known |= policy.training.towers_frozen and shared
    if critic is not None:
        work["values"] = critic.forward(every).total
    live = [
        batch
        for part in updates
        if any(batch.scales is not None and batch.scales.any() for batch in part)
        for batch in part
    ]
    for learner in (critic, None if algorithm.is_warming(step) else policy):
        for epoch in range(config.train.epochs_per_batch if learner else 0):
            assert learner is not None
            looked = epoch > 0 or known or learner is critic  # for the values
            seen = learner.training.towers_frozen and looked
            useful, again = learner.train_step(live, media=not seen)
            work["update"] += useful
            work["recomputed"] += again
    counted = {f"flops/{phase}": count / TERA for phase, count in work.items()}
    read = made.read_bytes(config.rollout.max_sequences)
    return counted | {"bytes/rollout": read / GIGA}


def offline_work(backend: LocalBackend, batches: Sequence[Batch]) -> dict[str, float]:
    policy = meter(backend)
    useful, again = policy.train_step(batches)
    return {"flops/update": useful / TERA, "flops/recomputed": again / TERA}


def shares(work: Mapping[str, float], times: Mapping[str, Any], device: Device) -> dict[str, float]:
    """`perf/mfu_PHASE` and `perf/bandwidth_rollout`: what was needed, over what the device could
    have done in that time. None of a device whose peaks are not known.
    """
    found = {}
    for name, amount in work.items():
        kind, _, phase = name.partition("/")
        seconds = times.get(f"time/{phase}")
        if kind == "flops" and seconds and device.tflops is not None:
            found[f"perf/mfu_{phase}"] = amount / (seconds * device.tflops)
        if kind == "bytes" and seconds and device.bandwidth is not None:
            found[f"perf/bandwidth_{phase}"] = amount * GIGA / (seconds * device.bandwidth * TERA)
    return found


def rates(metrics: Mapping[str, float], times: Mapping[str, Any], device: Device) -> dict[str, float]:
    """`perf/…`: what the step counted (`count/…`) for each second of its phases, and its shares."""
    speeds = {
        name: metrics[count] / times[seconds]
        for name, (count, seconds) in SPEEDS.items()
        if count in metrics and times.get(seconds)
    }
    return speeds | shares(metrics, times, device)
