"""Which tokens of an optimizer step the covariance losses treat apart (arXiv 2505.22617).

The covariance of a token is (A - mean A)(log-prob - mean log-prob), over the whole optimizer step.
Where a choice is needed, the smallest `noise` wins: a hash of who the token is, so that neither
batching nor order changes it. Knows nothing of losses. Axis: T, the live tokens of the step.

    >>> most_covariant(SelectionInputs(new=new, old=old, advantages=a, noise=hashes)).sum()
    tensor(1)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from saccade.algorithms.filters import share
from saccade.algorithms.table import PositiveShare

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SelectionInputs:
    """Detached, float64 but for the noise."""

    new: Tensor  # [T] log-probs of a scoring pass before the optimizer step
    old: Tensor  # [T]
    advantages: Tensor  # [T]
    noise: Tensor  # [T] int64

    @property
    def covariance(self) -> Tensor:
        return _centred(self.advantages) * _centred(self.new)

    def first(self, ranked: Tensor, fraction: float) -> Tensor:
        """[T] bool: the leading share of `ranked`, indices of tokens."""
        chosen = ranked[: share(fraction, len(self.new))]
        return self.noise.new_zeros(len(self.noise)).index_fill(0, chosen, 1).bool()


def most_covariant(inputs: SelectionInputs, *, cov_fraction: PositiveShare = 2e-4) -> Tensor:
    shuffled = inputs.noise.argsort(stable=True)
    ranked = shuffled[inputs.covariance[shuffled].argsort(descending=True, stable=True)]
    return inputs.first(ranked, cov_fraction)


def some_covariant(
    inputs: SelectionInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cov_fraction: PositiveShare = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> Tensor:
    """A random share of the step, from those inside the band that the clip leaves a gradient."""
    covariance, excess = inputs.covariance, (inputs.new - inputs.old).clamp(-20, 20).expm1()
    too_high = (inputs.advantages > 0) & (excess > clip_high)
    too_low = (inputs.advantages < 0) & (excess < -clip_low)
    inside = (covariance > cov_low) & (covariance < cov_high) & ~too_high & ~too_low
    shuffled = inputs.noise.argsort(stable=True)
    return inputs.first(shuffled[inside[shuffled]], cov_fraction)


def _centred(values: Tensor) -> Tensor:
    # Sorted, so that the order of tokens changes no bit of the mean and hence no near tie.
    return values - values.sort().values.mean()
