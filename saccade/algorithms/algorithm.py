"""`Algorithm`: a preset row after every override, as plain data.

Functions are looked up by name, so an algorithm crosses a process and is stored with a checkpoint.
Knows nothing of how it was made; `build.resolve` makes it. Imports no torch.

    >>> bound(algorithm.loss.function, algorithm.loss_options)(new, inputs)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from saccade.algorithms.advantages import ADVANTAGES
from saccade.algorithms.aggregation import AGGREGATIONS
from saccade.algorithms.corrections import CORRECTIONS
from saccade.algorithms.kl import KINDS
from saccade.algorithms.policy_losses import LOSSES
from saccade.algorithms.table import Entry, find

AXES: Mapping[str, Mapping[str, Entry]] = {
    "advantage": ADVANTAGES,
    "policy_loss": LOSSES,
    "aggregation": AGGREGATIONS,
}
OldMode = Literal["detach", "recompute", "rollout"]
Options = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class KL:
    coef: float
    kind: str
    place: Literal["loss", "reward"]
    options: Options
    ratio_correct: bool
    controller: Literal["fixed", "adaptive"]
    target: float
    horizon: float
    update: Literal["none", "copy", "ema"]
    update_every: int
    ema: float


@dataclass(frozen=True, kw_only=True)
class Filter:
    dynamic: bool
    low: float
    high: float
    max_rounds: int
    on_exhausted: Literal["train_partial", "skip", "stop"]
    keep_surplus: bool
    function: str | None  # file.py:name


@dataclass(frozen=True, kw_only=True)
class Overlong:
    buffer: int  # 0: no penalty
    factor: float
    max_tokens: int


@dataclass(frozen=True, kw_only=True)
class Correct:
    """A correction of the gap between engine and trainer."""

    name: str
    options: Options

    @property
    def entry(self) -> Entry:
        return find("correct", CORRECTIONS, self.name)


@dataclass(frozen=True, kw_only=True)
class Entropy:
    coef: float
    target: float  # 0: coef stays
    step: float
    range: tuple[float, float]
    top: float  # share of tokens that the policy loss keeps; 0: all
    scope: Literal["step", "sequence"]


@dataclass(frozen=True, kw_only=True)
class Fire:
    temperature: float  # 0: an ordinary first token
    top_k: int
    first_token: Literal["is", "mask"]
    cap: float


@dataclass(frozen=True, kw_only=True)
class Critic:
    lr: float
    clip: float
    warmup_steps: int
    bootstrap_truncated: bool
    path: str | None


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    preset: str
    about: str
    paper: str
    samples_per_prompt: int
    updates_per_step: int
    sequences: int  # of a step
    advantage: str
    advantage_options: Options
    whiten: bool
    whiten_std: bool
    adv_clip: float  # 0: none
    reward_clip: tuple[float, float] | None
    reward_normalise: Literal["off", "std", "mean_std"]
    reward_range: tuple[float, float]
    policy_loss: str
    loss_options: Options
    aggregation: str
    aggregation_options: Options
    denominator: Literal["original", "kept"]
    old: OldMode
    corrections: tuple[Correct, ...]
    self_normalise: bool
    drop_constant: bool
    exclude_status: tuple[str, ...]
    excluded_in_baseline: bool
    entropy: Entropy
    kl: KL
    filter: Filter
    overlong: Overlong
    fire: Fire
    critic: Critic
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
        return find("kl.kind", KINDS, self.kl.kind)

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
