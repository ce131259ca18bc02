"""How sure we are of a score: intervals, pass@k and the like, on plain numbers.

Knows nothing of models or data. Items are rows (questions), samples are columns (answers to one
question); a list of lists may be ragged, because a sample whose reward failed has no score.

    >>> wilson(8, 10)
    Interval(low=0.49016247153664183, high=0.9433178485456247)
"""

from collections.abc import Sequence
from math import comb
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

Values = Sequence[float] | Sequence[Sequence[float]] | Sequence[np.ndarray] | np.ndarray

INDICES_AT_ONCE = 1 << 20  # bounds the memory of a bootstrap to some 20 MB
RESAMPLES, CONFIDENCE = 10_000, 0.95
Z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)


class Interval(NamedTuple):
    low: float
    high: float


def wilson(successes: float, n: int) -> Interval:
    """Score interval of a proportion (Wilson 1927); with no trials it is 0..1."""
    if n == 0:
        return Interval(0.0, 1.0)
    share = successes / n
    centre = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * (share * (1 - share) / n + Z * Z / (4 * n * n)) ** 0.5
    # At 0 and n the exact limits are 0 and 1; rounding would miss them by an ulp.
    return Interval(0.0 if successes == 0 else centre - half, 1.0 if successes == n else centre + half)


def bootstrap_mean(values_per_item: Values, seed: int = 0) -> Interval:
    """Percentile interval of the mean over items, items drawn with replacement.

    The samples of one item are correlated, so items are resampled, never samples.
    """
    means = item_means(values_per_item)
    rng = np.random.default_rng(seed)
    chunk = max(1, INDICES_AT_ONCE // len(means))
    sizes = [min(chunk, RESAMPLES - start) for start in range(0, RESAMPLES, chunk)]
    resampled = [means[rng.integers(len(means), size=(size, len(means)))].mean(axis=1) for size in sizes]
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(np.concatenate(resampled), [tail, 100 - tail])
    return Interval(float(low), float(high))


def mean_interval(values_per_item: Values) -> Interval:
    """Wilson if every item is wholly right or wholly wrong, else a bootstrap over items."""
    means = item_means(values_per_item)
    if np.isin(means, (0.0, 1.0)).all():
        return wilson(float(means.sum()), len(means))
    if np.ptp(means) == 0 and are_shares(means):
        return around_a_constant(means, least=0.0)
    return bootstrap_mean(means)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of the n samples, drawn without replacement, hold one of the c right ones:
    1 - C(n-c, k) / C(n, k), which is unbiased.
    """
    return 1.0 - comb(n - c, k) / comb(n, k)


def item_means(values_per_item: Values) -> np.ndarray:
    """One float64 mean per item, of scores that may be ragged."""
    means = np.array([np.mean(row) for row in values_per_item], dtype=np.float64)
    if not (len(means) and np.isfinite(means).all()):
        raise ValueError("needs at least one item, and finite values for each")
    return means


def around_a_constant(values: np.ndarray, least: float) -> Interval:
    """Interval of equal values within least..1, for which a bootstrap has width 0. The share of items that may differ,
    by as much as the range allows, is the upper end of Wilson's interval for 0 of n.
    """
    value, differing = float(values[0]), wilson(0, len(values)).high
    return Interval(value - differing * (value - least), value + differing * (1.0 - value))


def are_shares(values: np.ndarray) -> bool:
    return bool(values.min() >= 0.0 and values.max() <= 1.0)
