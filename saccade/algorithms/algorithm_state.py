"""State that an algorithm carries from step to step: coefficients that a controller adapts, moments of
rewards, and how often and how well each domain was answered.

A frozen record that a checkpoint stores as JSON; every step makes a new one. Knows nothing of runs
or files.

    >>> state = restore(algorithm, saved=None)
    >>> state.apply_to(algorithm).kl.coef
    0.04
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from typing import Any, Literal

import numpy as np

from saccade.algorithms.filters import CONSTANT_TOLERANCE, is_excluded
from saccade.algorithms.resolved_algorithm import Algorithm
from saccade.types import Group, Metrics

LARGEST_ERROR = 0.2  # bound of the KL's error relative to its target


@dataclass(frozen=True, kw_only=True)
class Moments:
    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared distances from the mean

    @property
    def divisor(self) -> float:
        """The unbiased standard deviation; 1 while all values are equal."""
        if self.count < 2:
            return 1.0
        std = (self.squares / (self.count - 1)) ** 0.5
        return std if std > CONSTANT_TOLERANCE * max(1.0, abs(self.mean)) else 1.0

    def scaled(self, value: float, kind: Literal["off", "std", "mean_std"]) -> float:
        """R / std ("std"), (R - mean) / std ("mean_std"), or R unchanged ("off")."""
        return value if kind == "off" else (value - (self.mean if kind == "mean_std" else 0.0)) / self.divisor


@dataclass(frozen=True, kw_only=True)
class AlgorithmState:
    kl_coef: float
    entropy_coef: float
    moments: Mapping[str, Moments] = field(default_factory=dict)  # by reward term; "" is the combined reward
    domains: Mapping[str, Any] = field(default_factory=dict)  # the estimator's statistics of domains, JSON data

    def apply_to(self, algorithm: Algorithm) -> Algorithm:
        """The algorithm with the current coefficients."""
        kl = algorithm.kl.model_copy(update={"coef": self.kl_coef})
        return algorithm.model_copy(update={"kl": kl, "entropy_coef": self.entropy_coef})


def restore(algorithm: Algorithm, saved: Mapping[str, Any] | None) -> AlgorithmState:
    """The saved state, or the initial one. Coefficients without a controller come from the config."""
    steered, (low, high) = algorithm.entropy_target > 0, algorithm.entropy_range
    bonus = min(max(algorithm.entropy_coef, low), high) if steered else algorithm.entropy_coef
    start = AlgorithmState(kl_coef=algorithm.kl.coef, entropy_coef=bonus)
    if saved is None:
        return start
    adaptive = algorithm.needs_reference and algorithm.kl.controller == "adaptive"
    return AlgorithmState(
        kl_coef=saved["kl_coef"] if adaptive else start.kl_coef,
        entropy_coef=saved["entropy_coef"] if steered else start.entropy_coef,
        moments={name: Moments(**one) for name, one in saved["moments"].items()},
        domains=saved["domains"],
    )


def to_json(state: AlgorithmState) -> dict[str, Any]:
    return asdict(state)


def observe(state: AlgorithmState, groups: Sequence[Group], algorithm: Algorithm) -> AlgorithmState:
    """Update the statistics of domains with all scored groups of a step, also those that will not be trained on."""
    if algorithm.estimator.observe is None:
        return state
    return replace(state, domains=algorithm.estimator.bound("observe")(state.domains, groups, algorithm))


def outcomes_of(group: Group, algorithm: Algorithm) -> list[float]:
    """Raw outcomes of the members that are not excluded."""
    members = [t for t in group.trajectories if not is_excluded(t.status, algorithm.exclude_status)]
    return [t.outcome for t in members if t.outcome is not None]


def after_step(state: AlgorithmState, algorithm: Algorithm, metrics: Metrics) -> AlgorithmState:
    """The state with the coefficients of the next step, from the metrics of this one."""
    found = {name: value for name, value in metrics.means().items() if isfinite(value)}
    if algorithm.kl.controller == "adaptive" and "policy/kl_controlled" in found:
        # Up while the KL is above the target, else down (arXiv 1909.08593).
        sequences, kl = int(metrics.sums["policy/live_sequences"][0]), algorithm.kl
        error = min(max(found["policy/kl_controlled"] / kl.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        state = replace(state, kl_coef=state.kl_coef * (1 + error * sequences / kl.horizon))
    if algorithm.entropy_target and "policy/entropy" in found:
        # One step up while the entropy is below the target, down while above, inside the range.
        entropy, target, (low, high) = found["policy/entropy"], algorithm.entropy_target, algorithm.entropy_range
        moved = state.entropy_coef + algorithm.entropy_step * ((entropy < target) - (entropy > target))
        state = replace(state, entropy_coef=min(max(moved, low), high))
    return state


# -- moments of rewards ----------------------------------------------------------------------------


def merge(moments: Moments, values: Sequence[float] | np.ndarray) -> Moments:
    """The moments of all earlier values and `values` together (Chan et al. 1979)."""
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
