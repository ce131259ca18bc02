"""Coefficients that follow a measurement from step to step.

Each is a function of the last value and what the step measured; the caller keeps the value, also
in its checkpoint, and uses it from the next step on.

    >>> next_kl_coef(0.1, measured=0.2, sequences=100, target=0.1, horizon=10000)
    0.1002
"""

from __future__ import annotations

from math import isfinite

from saccade.errors import ConfigError

LARGEST_ERROR = 0.2


def next_kl_coef(
    coef: float, *, measured: float, sequences: int, target: float, horizon: float
) -> float:
    """Up while the KL of live `sequences` is above the target, else down (arXiv 1909.08593)."""
    if sequences == 0:
        return coef
    assert isfinite(measured), measured
    if LARGEST_ERROR * sequences >= horizon:
        raise ConfigError(
            f"algorithm.kl.horizon={horizon:g} is so short that a step of {sequences} sequences "
            f"could make the coefficient 0 or less; write {10 * sequences} or more"
        )
    error = min(max(measured / target - 1, -LARGEST_ERROR), LARGEST_ERROR)
    return coef * (1 + error * sequences / horizon)


def next_entropy_coef(
    coef: float, *, measured: float, target: float, step: float, low: float, high: float
) -> float:
    """One `step` up while the entropy is below the target, down while above, in [low, high]."""
    assert isfinite(measured), measured
    moved = coef + step * ((measured < target) - (measured > target))
    return min(max(moved, low), high)
