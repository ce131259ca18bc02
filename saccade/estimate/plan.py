"""A config, its model without weights and a step of its data: all that an estimate counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from saccade.algorithms.algorithm import Algorithm
from saccade.backends.memory import MARGIN
from saccade.config import ADAPTED, Config, LoraConfig
from saccade.devices import CONTEXT_GIB, Device
from saccade.estimate.sizing import Skeleton, Step

Build = Callable[[str, LoraConfig], Skeleton]  # of a `model.train` and a `model.lora`


@dataclass(frozen=True, kw_only=True)
class Plan:
    config: Config
    algorithm: Algorithm
    device: Device
    step: Step
    policy: Skeleton
    whole: Skeleton  # without adapters, as reference and critic are
    element: int  # bytes of a weight

    @property
    def critic(self) -> Skeleton | None:
        return self.whole if self.algorithm.needs_critic else None

    @property
    def learners(self) -> list[Skeleton]:
        return [learner for learner in (self.policy, self.critic) if learner is not None]

    @property
    def adapted(self) -> bool:
        return self.config.model.train in ADAPTED

    @property
    def paged(self) -> bool:
        """How the engine keeps keys and values; else every sequence has a slot."""
        return self.device.is_gpu and self.element == 2

    @property
    def limit(self) -> float:
        """GiB that can be planned with."""
        context = CONTEXT_GIB if self.device.is_gpu else 0.0
        return self.device.memory * (1 - MARGIN) - context

    @property
    def sequences(self) -> int:
        """In the engine at a time, if its cache has room for them."""
        members = self.algorithm.samples_per_prompt + self.algorithm.estimator.greedy
        rollout, train = self.config.rollout, self.config.train
        return min(rollout.max_sequences, train.prompts_per_step * members)


def make_plan(
    config: Config, algorithm: Algorithm, device: Device, step: Step, build: Build
) -> Plan:
    train, lora = config.model.train, config.model.lora
    return Plan(
        config=config,
        algorithm=algorithm,
        device=device,
        step=step,
        policy=build(train, lora),
        # A copy, since the critic is no policy.
        whole=replace(build("full" if train in ADAPTED else train, lora)),
        element=element_of(config, device),
    )


def element_of(config: Config, device: Device) -> int:
    wide = {"auto": not device.is_gpu, "float32": True, "bfloat16": False}
    return 4 if wide[config.model.dtype] else 2
