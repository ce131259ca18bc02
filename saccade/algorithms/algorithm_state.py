"""What an algorithm carries from one step to the next: coefficients that follow a measurement,
moments of rewards, and how each domain was answered.

A frozen record that a checkpoint stores as JSON; every step makes a new one. Knows nothing of runs
or files.

    >>> state = restore(algorithm, saved=None)
    >>> state.steered(algorithm).kl.coef
    0.04
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from typing import Any

from saccade.algorithms import domains
from saccade.algorithms.domains import Domains
from saccade.algorithms.filters import is_excluded
from saccade.algorithms.moments import Moments
from saccade.algorithms.resolved_algorithm import Algorithm
from saccade.errors import ConfigError
from saccade.types import Group, Metrics

LARGEST_ERROR = 0.2  # of a KL, relative to its target


@dataclass(frozen=True, kw_only=True)
class AlgorithmState:
    kl_coef: float
    entropy_coef: float
    moments: Mapping[str, Moments] = field(default_factory=dict)  # by term; "" is their sum
    domains: Domains = field(default_factory=dict)

    def steered(self, algorithm: Algorithm) -> Algorithm:
        """The algorithm with the coefficients of this moment."""
        kl = algorithm.kl.model_copy(update={"coef": self.kl_coef})
        return algorithm.model_copy(update={"kl": kl, "entropy_coef": self.entropy_coef})


def restore(algorithm: Algorithm, saved: Mapping[str, Any] | None) -> AlgorithmState:
    """The state that was saved, or that of the first step."""
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
        domains=domains.from_json(saved["domains"]),
    )


def to_json(state: AlgorithmState) -> dict[str, Any]:
    return {
        "kl_coef": state.kl_coef,
        "entropy_coef": state.entropy_coef,
        "moments": {name: asdict(one) for name, one in state.moments.items()},
        "domains": domains.to_json(state.domains),
    }


def observe(state: AlgorithmState, groups: Sequence[Group], algorithm: Algorithm) -> AlgorithmState:
    """After every group of a step was scored, those included that will not be trained on."""
    if not algorithm.estimator.domains:
        return state
    seen = [
        (domain_of(group), y)
        for group in sorted(groups, key=lambda group: group.uid)
        if (y := success_of(group, algorithm)) is not None
    ]
    return replace(state, domains=domains.observe(state.domains, seen))


def domain_of(group: Group) -> str:
    domain = group.sample.extra.get("domain")
    return "default" if domain in (None, "") else str(domain)


def outcomes_of(group: Group, algorithm: Algorithm) -> list[float]:
    """Raw, of the members that count."""
    return [
        t.outcome
        for t in group.trajectories
        if t.outcome is not None and not is_excluded(t.status, algorithm.exclude_status)
    ]


def success_of(group: Group, algorithm: Algorithm) -> float | None:
    """Mean raw outcome as a share of what is possible; None when no member counts."""
    outcomes = outcomes_of(group, algorithm)
    return domains.success(outcomes, algorithm.reward_range) if outcomes else None


def after_step(state: AlgorithmState, algorithm: Algorithm, metrics: Metrics) -> AlgorithmState:
    """Coefficients of the next step, from what this one measured."""
    found = {name: value for name, value in metrics.means().items() if isfinite(value)}
    if algorithm.kl.controller == "adaptive" and "policy/kl_controlled" in found:
        coef = next_kl_coef(
            state.kl_coef,
            measured=found["policy/kl_controlled"],
            sequences=int(metrics.sums["policy/live_sequences"][0]),
            target=algorithm.kl.target,
            horizon=algorithm.kl.horizon,
        )
        state = replace(state, kl_coef=coef)
    if algorithm.entropy_target and "policy/entropy" in found:
        low, high = algorithm.entropy_range
        coef = next_entropy_coef(
            state.entropy_coef,
            measured=found["policy/entropy"],
            target=algorithm.entropy_target,
            step=algorithm.entropy_step,
            low=low,
            high=high,
        )
        state = replace(state, entropy_coef=coef)
    return state


def next_kl_coef(coef: float, *, measured: float, sequences: int, target: float, horizon: float) -> float:
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


def next_entropy_coef(coef: float, *, measured: float, target: float, step: float, low: float, high: float) -> float:
    """One `step` up while the entropy is below the target, down while above, in [low, high]."""
    assert isfinite(measured), measured
    moved = coef + step * ((measured < target) - (measured > target))
    return min(max(moved, low), high)
