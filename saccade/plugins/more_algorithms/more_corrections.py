"""Corrections beside the usual ones: rejection by a statistic of the gap, and one at each update.

>>> apply([(CORRECTIONS["reject.seq_max.k3"], {"high": 0.1})], mismatch).keep   # [T] bool
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from saccade.algorithms.corrections import LARGEST_EXPONENT, Correction, Mismatch, Statistic, band, token, unjudged
from saccade.algorithms.table import Entry, add

if TYPE_CHECKING:
    from torch import Tensor

ROWS: dict[str, Entry] = {}


@add(ROWS, "sequences with low <= exp(mean of delta) <= high")
def seq_mask(mismatch: Mismatch, *, low: float = 0.99, high: float = 1.01) -> Correction:
    return Correction(keep=band(Mismatch.mean, mismatch, low, high))


@add(ROWS, "w = exp(delta), sequences with low <= exp(mean of delta) <= high", weighs=True)
def seq_mask_tis(mismatch: Mismatch, *, low: float = 0.99, high: float = 1.01) -> Correction:
    return Correction(weights=mismatch.ratio, keep=band(Mismatch.mean, mismatch, low, high))


def _reject_ratio(statistic: Statistic) -> Callable[..., Correction]:
    def reject(mismatch: Mismatch, *, low: float, high: float) -> Correction:
        return Correction(keep=band(statistic, mismatch, low, high))

    return reject


def _reject_distance(statistic: Statistic, distance: Callable[[Tensor], Tensor]) -> Callable[..., Correction]:
    def reject(mismatch: Mismatch, *, high: float) -> Correction:
        near = statistic(mismatch, distance(mismatch.delta)) <= high
        return Correction(keep=near | unjudged(statistic, mismatch))

    return reject


@add(ROWS, "no sequence with A < 0 and mean of rollout - new > threshold", each_update=True)
def opsm(
    new: Tensor,  # [T]
    rollout: Tensor,  # [T] NaN where unscored
    advantages: Tensor,  # [T]
    sequence_mean: Callable[[Tensor], Tensor],  # [T] -> [T] over the live tokens of a sequence
    *,
    threshold: float,
) -> Tensor:
    """[T] bool: bad sequences that the policy has left behind are dropped."""
    scored = rollout.isfinite()
    gap = rollout.where(scored, 0.0) - new.detach().where(scored, 0.0)
    drifted = sequence_mean(gap) > threshold * sequence_mean(scored.to(new.dtype))
    return ~drifted | (sequence_mean(advantages) >= 0)


def _k3(delta: Tensor) -> Tensor:
    gap = delta.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
    return gap.expm1() - gap


STATISTICS: dict[str, Statistic] = {
    "token": token,
    "seq_sum": Mismatch.total,
    "seq_mean": Mismatch.mean,
    "seq_max": Mismatch.largest,
}
DISTANCES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "k2": (lambda delta: delta.square() / 2, "delta^2 / 2"),
    "k3": (_k3, "exp(delta) - 1 - delta"),
}
for _level, _statistic in STATISTICS.items():
    if _level != "seq_max":  # one extreme says nothing about a band
        add(ROWS, f"low <= exp(delta by {_level}) <= high", name=f"reject.{_level}.k1")(_reject_ratio(_statistic))
    for _kind, (_distance, _text) in DISTANCES.items():
        _reject = _reject_distance(_statistic, _distance)
        add(ROWS, f"{_text} by {_level} <= high", name=f"reject.{_level}.{_kind}")(_reject)
