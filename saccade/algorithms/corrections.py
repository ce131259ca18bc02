"""Weights and masks for tokens to which engine and trainer assign different probabilities.

delta = old - rollout is the log-prob gap between trainer and engine, ideally 0. A correction is
`f(mismatch, *, options) -> Correction`, computed once: before training on the step, or in the loss if
that uses its own log-probs as the old ones. Only `opsm` uses the current log-probs, at each update. A
token without a rollout log-prob is unscored: its weight is 1, and statistics of its sequence leave it
out. Knows nothing of losses, and changes no advantage. Axes: T tokens, S sequences.

    >>> mismatch = measure(old, rollout, live=live, sequence=sequence, sequences=2)
    >>> apply([CORRECTIONS["tis.token"]], mismatch).weights   # [T]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any, TypeAlias

from saccade.algorithms.aggregation import fill_outside
from saccade.algorithms.table import Entry, NotNegative, add, table_of
from saccade.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_EXPONENT = 20.0
CORRECTIONS = table_of("corrections")


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    delta: Tensor  # [T] 0 where unscored
    scored: Tensor  # [T] bool
    live: Tensor  # [T] bool
    sequence: Tensor  # [T] index of the sequence of each token
    sequences: int  # how many
    ages: Tensor | None = None  # [T] steps since each token was sampled; None: all 0

    @property
    def ratio(self) -> Tensor:
        return exp(self.delta)

    def total(self, values: Tensor) -> Tensor:
        """[T] -> [T]: sum over the scored tokens of a sequence, at each of its tokens."""
        zeros = values.new_zeros(self.sequences)
        return zeros.index_add(0, self.sequence, values.where(self.scored, 0.0))[self.sequence]

    def mean(self, values: Tensor) -> Tensor:
        return self.total(values) / self.total(values.new_ones(len(values))).clamp(min=1)

    def largest(self, values: Tensor) -> Tensor:
        """[T] -> [T]: the largest of each sequence, for values >= 0."""
        inside = values.where(self.scored, 0.0)
        zeros = values.new_zeros(self.sequences)
        return zeros.scatter_reduce(0, self.sequence, inside, "amax")[self.sequence]


@dataclass(frozen=True, kw_only=True)
class Correction:
    """None: all weights are 1, or all tokens are kept."""

    weights: Tensor | None = None  # [T]
    keep: Tensor | None = None  # [T] bool


Statistic: TypeAlias = "Callable[[Mismatch, Tensor], Tensor]"  # [T] -> [T]


def measure(old: Tensor, rollout: Tensor, *, live: Tensor, **where: Any) -> Mismatch:
    """`rollout`: NaN where the engine gave no log-prob. `where`: the other fields of a Mismatch."""
    scored = live & (rollout.abs() < float("inf"))
    return Mismatch(delta=fill_outside(old - rollout, scored), scored=scored, live=live, **where)


def apply(chosen: Sequence[Entry], mismatch: Mismatch) -> Correction:
    """Combine corrections: a token is kept if every one of them keeps it. At most one may give weights."""
    found: list[Correction] = [entry(mismatch) for entry in chosen]
    weights = [one.weights for one in found if one.weights is not None]
    if len(weights) > 1:
        raise ConfigError("algorithm.correct: two corrections weigh tokens for the same gap; keep one of them")
    masks = [one.keep for one in found if one.keep is not None]
    return Correction(weights=weights[0] if weights else None, keep=reduce(and_, masks) if masks else None)


# -- weights ---------------------------------------------------------------------------------------


def token(mismatch: Mismatch, values: Tensor) -> Tensor:
    return values


def _truncated(statistic: Statistic) -> Callable[..., Correction]:
    """Importance sampling with a cap (TIS)."""

    def weigh(mismatch: Mismatch, *, low: NotNegative = 0.0, high: NotNegative = 2.0) -> Correction:
        ratio = exp(statistic(mismatch, mismatch.delta)).clamp_(low, high)
        return Correction(weights=fill_outside(ratio, mismatch.scored, 1.0))

    return weigh


for _name, _text, _statistic in (
    ("tis.token", "delta", token),
    ("tis.sequence", "sum of delta", Mismatch.total),
    ("tis.geometric", "mean of delta", Mismatch.mean),
):
    _formula = f"w = clip(exp({_text}), low, high)"
    add(CORRECTIONS, _formula, name=_name, weighs=True, by_sequence=_name != "tis.token")(_truncated(_statistic))


@add(CORRECTIONS, "w = exp(delta), 0 outside of [low, high]", weighs=True, masks=True)
def icepop(mismatch: Mismatch, *, low: NotNegative = 0.5, high: NotNegative = 5.0) -> Correction:
    """Weights inside the band; tokens outside it are dropped."""
    keep = band(token, mismatch, low, high)
    return Correction(weights=mismatch.ratio.where(keep, 0.0), keep=keep)


@add(CORRECTIONS, "tokens that were sampled at most high steps ago")
def recent(mismatch: Mismatch, *, high: NotNegative = 1.0) -> Correction:
    """Drops tokens of rollouts that ran too far ahead."""
    return Correction(keep=None if mismatch.ages is None else mismatch.ages <= high)


def band(statistic: Statistic, mismatch: Mismatch, low: float, high: float) -> Tensor:
    ratio = exp(statistic(mismatch, mismatch.delta))
    return ((ratio >= low) & (ratio <= high)) | unjudged(statistic, mismatch)


def unjudged(statistic: Statistic, mismatch: Mismatch) -> Tensor:
    """[T] bool: where the statistic covers no scored token."""
    return statistic(mismatch, mismatch.scored.to(mismatch.delta.dtype)) == 0


def exp(values: Tensor) -> Tensor:
    return values.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT).exp_()


# -- functions of weights --------------------------------------------------------------------------


def self_normalise(weights: Tensor, live: Tensor) -> Tensor:
    """Weights with mean 1 over the live tokens; all zeros stay zeros."""
    total = weights.where(live, 0.0).sum()
    return weights * (live.sum() / total.where(total > 0, 1.0))


def effective_sample_size(weights: Tensor) -> float:
    """As a share of the number of tokens: 1 if all weights are equal."""
    squares = len(weights) * weights.double().square().sum()
    return float(weights.double().sum().square() / squares) if squares > 0 else 0.0
