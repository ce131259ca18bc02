"""`Algorithm`: a preset row after every override, as plain data.

Functions are looked up by name, so an algorithm crosses a process and is stored with a checkpoint.
Knows nothing of how it was made; `build.resolve` makes it. Imports no torch.

    >>> algorithm.loss.function(new, inputs, algorithm.loss_options)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from saccade.algorithms.advantages import ADVANTAGES, AdvantageOptions
from saccade.algorithms.aggregation import AGGREGATIONS
from saccade.algorithms.kl import KINDS, Clamp
from saccade.algorithms.policy_losses import LOSSES, LossOptions
from saccade.algorithms.table import Entry, find

AXES: Mapping[str, Mapping[str, Entry]] = {
    "advantage": ADVANTAGES,
    "policy_loss": LOSSES,
    "aggregation": AGGREGATIONS,
}
OldMode = Literal["detach", "recompute", "rollout"]


@dataclass(frozen=True, kw_only=True)
class KL:
    coef: float
    kind: str
    place: Literal["loss", "reward"]
    clamp: Clamp


@dataclass(frozen=True, kw_only=True)
class Filter:
    dynamic: bool
    low: float
    high: float
    max_rounds: int
    on_exhausted: Literal["train_partial", "skip", "stop"]
    function: str | None  # file.py:name


@dataclass(frozen=True, kw_only=True)
class Overlong:
    buffer: int  # 0: no penalty
    factor: float
    max_tokens: int


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    preset: str
    about: str
    paper: str
    samples_per_prompt: int
    advantage: str
    advantage_options: AdvantageOptions
    adv_clip: float | None
    policy_loss: str
    loss_options: LossOptions
    aggregation: str
    fixed_length: int
    entropy_coef: float
    old: OldMode
    drop_constant: bool
    exclude_status: tuple[str, ...]
    excluded_in_baseline: bool
    kl: KL
    filter: Filter
    overlong: Overlong
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
        return KINDS[self.kl.kind]

    @property
    def needs_reference(self) -> bool:
        return self.kl.coef > 0

    @property
    def kl_in_loss(self) -> bool:
        return self.needs_reference and self.kl.place == "loss"

    @property
    def kl_in_reward(self) -> bool:
        return self.needs_reference and self.kl.place == "reward"
