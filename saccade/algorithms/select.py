"""Apply an algorithm to groups: which members train, with which reward, in which update.

Rewards are normalised by running moments, then clipped, once per training step and never in
evaluation; the raw outcome is unchanged, for filters and accuracy. Records in, records out;
`annotate` then writes the resulting columns into the forests.

    groups, metrics = mark_members(groups, algorithm)
    parts = split_updates(groups, algorithm.updates_per_step, seed=7)
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from saccade.algorithms.algorithm_state import AlgorithmState, Moments, merge, outcomes_of
from saccade.algorithms.filters import discard_reason, is_constant, is_excluded
from saccade.algorithms.resolved_algorithm import Algorithm
from saccade.algorithms.table import find
from saccade.errors import ConfigError
from saccade.forest.batch import Batch
from saccade.types import Group, Metrics, Trajectory, cache_sampled

REWARD = ""  # key of the moments of the combined reward; a component's key is its name
Updates = list[list[Batch]]  # one list of forests per optimizer step


def keep_informative(groups: Sequence[Group], algorithm: Algorithm) -> tuple[list[Group], Counter[str]]:
    """Dynamic sampling: groups whose raw outcomes make them worth training on, and counts of why others are not."""
    low, high = algorithm.filter.low, algorithm.filter.high
    reasons = [discard_reason(outcomes_of(group, algorithm), low, high) for group in groups]
    kept = [group for group, reason in zip(groups, reasons, strict=True) if reason is None]
    return kept, Counter(reason for reason in reasons if reason is not None)


def apply_user_filter(groups: Sequence[Group], algorithm: Algorithm) -> tuple[list[Group], Counter[str]]:
    """The groups that the user's filter returns, in their original order, and how many it dropped."""
    assert algorithm.filter.function is not None
    function = find("filter.function", {}, algorithm.filter.function).function
    given = {id(group) for group in groups}
    wanted = {id(group): group for group in function(list(groups))}
    if unknown := sorted(wanted[one].uid for one in wanted.keys() - given):
        raise ConfigError(
            f"algorithm.filter.function={algorithm.filter.function} returned groups that it was "
            f"not given ({unknown[:3]}); return some of its argument, unchanged"
        )
    kept = [group for group in groups if id(group) in wanted]
    return kept, Counter({"own": len(groups) - len(kept)})


def shape_rewards(
    groups: Sequence[Group],
    algorithm: Algorithm,
    state: AlgorithmState,
    component_weights: Callable[[str], Mapping[str, float]] | None = None,
) -> tuple[list[Group], AlgorithmState, Metrics]:
    """Returns the groups with normalised and clipped rewards. If the estimator compares reward terms, each
    term has its own moments and `clip_frac` counts terms. Only members that are not excluded update the
    moments; every reward is rescaled, also the one of the greedy baseline.
    """
    clip, kind, metrics = algorithm.reward_clip, algorithm.reward_normalise, Metrics()
    if kind == "off" and clip is None:
        metrics.add("reward/clip_frac", 0.0)
        return list(groups), state, metrics
    parts: list[str] = []
    if algorithm.estimator.components:
        assert component_weights is not None, "the terms of the reward have weights"
        sources = sorted({group.sample.data_source for group in groups})
        parts = sorted({name for source in sources for name in component_weights(source)})
    members = [t for group in groups for t in group.trajectories if not is_excluded(t.status, algorithm.exclude_status)]
    # A data source whose reward lacks a component does not affect that component's moments.
    seen = {REWARD: [t.reward for t in members if t.reward is not None]}
    seen |= {name: [t.parts[name] for t in members if t.reward is not None and name in t.parts] for name in parts}
    moments = {**state.moments}
    if kind != "off":
        moments |= {name: merge(moments.get(name, Moments()), values) for name, values in seen.items()}
    low, high = clip or (-np.inf, np.inf)

    def scaled(name: str, value: float) -> float:
        return moments.get(name, Moments()).scaled(value, kind)

    def limited(name: str, value: float) -> float:
        return min(max(scaled(name, value), low), high)

    def shaped(t: Trajectory) -> Trajectory:
        own = {name: limited(name, t.parts[name]) for name in parts if name in t.parts}
        return replace(t, reward=None if t.reward is None else limited(REWARD, t.reward), parts={**t.parts, **own})

    beyond = [limited(name, value) != scaled(name, value) for name in parts or (REWARD,) for value in seen[name]]
    metrics.add("reward/clip_frac", sum(beyond) / max(1, len(beyond)))
    return [group.each(shaped) for group in groups], replace(state, moments=moments), metrics


def mark_members(groups: Sequence[Group], algorithm: Algorithm) -> tuple[list[Group], Metrics]:
    """The groups with `trained` set for each member. If `drops_early`, no member of a constant group does."""
    chosen, constant, metrics = [], Counter[str](), Metrics()
    for group in groups:
        live = [t.trained and not is_excluded(t.status, algorithm.exclude_status) for t in group.trajectories]
        alive = [t for t, lives in zip(group.trajectories, live, strict=True) if lives]
        if algorithm.drops_early and len(alive) > 1 and _is_constant(alive, algorithm):
            constant["low" if _reward(alive[0]) < 0.5 else "high"] += 1
            live = [False] * len(live)
        if live != [t.trained for t in group.trajectories]:
            members = (replace(t, trained=a) for t, a in zip(group.trajectories, live, strict=True))
            group = replace(group, trajectories=tuple(members))
        chosen.append(group)
    for side in ("low", "high") if algorithm.drops_early else ():
        metrics.add(f"group/constant_{side}", constant[side])
    return chosen, metrics


def _is_constant(members: Sequence[Trajectory], algorithm: Algorithm) -> bool:
    """Whether the reward, or each of its terms, is the same for all members."""
    if not algorithm.estimator.components:
        return is_constant([_reward(t) for t in members])
    terms = [[sum(t.turn_rewards), *(t.parts[name] for name in members[0].parts)] for t in members]
    return all(is_constant(values) for values in zip(*terms, strict=True))


def _reward(trajectory: Trajectory) -> float:
    assert trajectory.reward is not None, f"{trajectory.key}: no reward, but not excluded either"
    return trajectory.reward


def split_updates(groups: Sequence[Group], updates: int, *, seed: int) -> list[list[Group]]:
    """Distribute whole groups over the optimizer steps, in a seeded order; groups without a member that
    trains are left out.
    """
    cache_sampled([t for group in groups for t in group.trajectories])
    useful = [g for g in groups if any(t.trained and t.response_length for t in g.trajectories)]
    order = np.random.default_rng(seed).permutation(len(useful)) if updates > 1 else np.arange(len(useful))
    parts = np.array_split(order, min(updates, max(1, len(useful))))
    return [[useful[i] for i in sorted(part)] for part in parts if len(part)]


def write_supervision(batches: Sequence[Batch]) -> list[Batch]:
    """Add advantages of 1 and equal scales: supervised training is the policy gradient of an advantage of
    1, and every trained token counts the same.
    """
    each = 1 / sum(batch.target_count for batch in batches)
    ones = [np.ones(batch.target_count, np.float32) for batch in batches]
    return [replace(b, advantages=one, scales=one * np.float32(each)) for b, one in zip(batches, ones, strict=True)]
