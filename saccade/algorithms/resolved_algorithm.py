"""`Algorithm`: the `algorithm` section of a config, complete, with what a run adds to it.

Functions are looked up by name, so an algorithm crosses a process and is stored with a checkpoint.
Knows nothing of how it was made; `build.from_config` makes it. Imports no torch.

    >>> bound(algorithm.loss.function, algorithm.loss_options)(new, inputs)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from saccade.algorithms.advantages import ADVANTAGES
from saccade.algorithms.aggregation import AGGREGATIONS
from saccade.algorithms.corrections import CORRECTIONS
from saccade.algorithms.policy_losses import KINDS, LOSSES
from saccade.algorithms.table import Entry, find
from saccade.config.schema import AlgorithmConfig

AXES: Mapping[str, Mapping[str, Entry]] = {"advantage": ADVANTAGES, "policy_loss": LOSSES, "aggregation": AGGREGATIONS}
OldMode = Literal["detach", "recompute", "rollout"]
Options = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Correct:
    """A correction of the gap between engine and trainer."""

    name: str
    options: Options

    @property
    def entry(self) -> Entry:
        return find("correct", CORRECTIONS, self.name)


class Algorithm(AlgorithmConfig):
    """Every option has the value that is used; `old` is one of OldMode."""

    about: str
    paper: str
    samples_per_prompt: int
    updates_per_step: int
    sequences: int  # of a step
    max_tokens: int  # most sampled tokens of an episode
    reward_clip: tuple[float, float] | None
    reward_normalise: Literal["off", "std", "mean_std"]
    advantage_options: Options
    loss_options: Options
    aggregation_options: Options
    kl_options: Options
    corrections: tuple[Correct, ...]
    warnings: tuple[str, ...] = ()

    @property
    def estimator(self) -> Entry:
        return find("advantage", ADVANTAGES, self.advantage)

    @property
    def loss(self) -> Entry:
        return find("policy_loss", LOSSES, self.policy_loss)

    @property
    def aggregate(self) -> Entry:
        return find("aggregation", AGGREGATIONS, self.aggregation)

    @property
    def divergence(self) -> Entry:
        return find("kl.kind", KINDS, self.kl.kind or "")

    @property
    def axes(self) -> dict[str, tuple[str, Entry, Options]]:
        """What was chosen on each of AXES: its name, its entry, its options."""
        return {
            "advantage": (self.advantage, self.estimator, self.advantage_options),
            "policy_loss": (self.policy_loss, self.loss, self.loss_options),
            "aggregation": (self.aggregation, self.aggregate, self.aggregation_options),
        }

    @property
    def needs_reference(self) -> bool:
        return self.kl.coef > 0

    @property
    def needs_critic(self) -> bool:
        return self.estimator.critic

    def is_warming(self, step: int) -> bool:
        """Whether only the critic learns in this step."""
        return self.needs_critic and step <= self.critic.warmup_steps

    @property
    def kl_in_loss(self) -> bool:
        return self.needs_reference and self.kl.place == "loss"

    @property
    def kl_in_reward(self) -> bool:
        return self.needs_reference and self.kl.place == "reward"

    @property
    def drops_early(self) -> bool:
        """Whether rewards alone say that a group is constant, so that it need not be computed."""
        known = not (self.kl_in_reward or (self.exclude_status and self.excluded_in_baseline))
        return self.drop_constant and self.estimator.group and known

    @property
    def reference_moves(self) -> bool:
        return self.needs_reference and self.kl.update != "none"

    @property
    def at_once(self) -> tuple[Correct, ...]:
        """Corrections that are computed before training on the step."""
        return tuple(c for c in self.corrections if not c.entry.each_update)

    @property
    def each_update(self) -> tuple[Correct, ...]:
        return tuple(c for c in self.corrections if c.entry.each_update)
