"""Running mean and spread of the rewards of all training steps, to normalise them.

A step is merged as a whole and before its rewards are normalised, so their order does not matter.
Knows nothing of members or statuses: pass the rewards that count.

    >>> moments = merge(Moments(), [1.0, 0.0, 0.5, 2.0])
    >>> normalise([1.0, 0.0], moments, "std")
    array([1.17108009, 0.        ])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from saccade.algorithms.filters import CONSTANT_TOLERANCE


@dataclass(frozen=True, kw_only=True)
class Moments:
    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared distances from the mean

    @property
    def divisor(self) -> float:
        """The unbiased standard deviation; 1 where nothing has differed yet."""
        if self.count < 2:
            return 1.0
        std = (self.squares / (self.count - 1)) ** 0.5
        return std if std > CONSTANT_TOLERANCE * max(1.0, abs(self.mean)) else 1.0


def merge(moments: Moments, values: Sequence[float] | np.ndarray) -> Moments:
    """The moments of what was seen before and `values` together (Chan et al. 1979)."""
    new = np.asarray(values, np.float64)
    assert np.isfinite(new).all(), "a reward that is not finite is status 'error'"
    if not new.size:
        return moments
    count, shift = moments.count + new.size, float(new.mean()) - moments.mean
    between = shift**2 * moments.count * new.size / count
    return Moments(
        count=count,
        mean=moments.mean + shift * new.size / count,
        squares=moments.squares + float(np.square(new - new.mean()).sum()) + between,
    )


def normalise(values: Sequence[float] | np.ndarray, moments: Moments, kind: Literal["std", "mean_std"]) -> np.ndarray:
    """R / std, or (R - mean) / std."""
    shift = {"std": 0.0, "mean_std": moments.mean}[kind]
    return (np.asarray(values, np.float64) - shift) / moments.divisor
