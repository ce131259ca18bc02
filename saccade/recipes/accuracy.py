"""What scored groups say: accuracy with its interval, avg@k and pass@k, also under limits of turns,
by turns that were used, and by category.

Works on outcomes; knows nothing of models, engines or files.

    >>> accuracy([np.array([1.0, 0.0]), np.array([1.0, 1.0])])["avg@2"]
    0.75
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from saccade import statistics
from saccade.data.suites import ROTATION_OF
from saccade.types import ALWAYS_EXCLUDED, Group, Trajectory

MOST_CATEGORIES = 40
Table = dict[str, dict[str, float]]  # limit, number of turns or category -> numbers


def accuracy(outcomes: Sequence[np.ndarray]) -> dict[str, float]:
    """Of the items that were judged at all; nothing is claimed when there are none."""
    metrics = {"items": float(len(outcomes))}
    if outcomes:
        low, high = statistics.mean_interval(outcomes)
        mean = float(np.mean([values.mean() for values in outcomes]))
        metrics |= {"accuracy": mean, "ci_low": low, "ci_high": high}
        metrics |= _at_k(outcomes)
    return metrics


def _at_k(outcomes: Sequence[np.ndarray]) -> dict[str, float]:
    """avg@k, and the unbiased pass@k where every outcome is right or wrong; an item that lost a
    sample to an error is left out of both, so that the name keeps its meaning.
    """
    k = max(len(values) for values in outcomes)
    whole = [values for values in outcomes if len(values) == k]
    if k < 2:
        return {}
    metrics = {f"avg@{k}": float(np.mean([values.mean() for values in whole]))}
    if all(set(values.tolist()) <= {0.0, 1.0} for values in whole):
        passes = [statistics.pass_at_k(k, int(values.sum()), k) for values in whole]
        metrics[f"pass@{k}"] = float(np.mean(passes))
    return metrics


def group_accuracy(groups: Sequence[Group]) -> dict[str, float]:
    """Where rows ask the same in several orders of the options, those of one question are drawn
    together for the interval, and `all_rotations` is the share of questions that were answered
    rightly in every order.
    """
    outcomes = [_outcomes(group) for group in groups]
    metrics = accuracy([values for values in outcomes if len(values)])
    questions: dict[str, list[np.ndarray]] = {}
    for group, values in zip(groups, outcomes, strict=True):
        if ROTATION_OF in group.sample.extra and len(values):
            questions.setdefault(group.sample.extra[ROTATION_OF], []).append(values)
    if questions:
        together = [np.concatenate(orders) for orders in questions.values()]
        metrics["ci_low"], metrics["ci_high"] = statistics.mean_interval(together)
        least = [min(map(len, orders)) for orders in questions.values()]
        right = [
            np.min([values[:n] for values in orders], axis=0).mean()
            for n, orders in zip(least, questions.values(), strict=True)
        ]
        metrics["all_rotations"] = float(np.mean(right))
    return metrics


def _outcomes(group: Group) -> np.ndarray:
    live = [t for t in group.trajectories if t.status not in ALWAYS_EXCLUDED]
    return np.array([t.outcome for t in live if t.outcome is not None], dtype=np.float64)


def by_category(groups: Sequence[Group]) -> Table:
    """Of sets whose rows say what they are about; a column with many values is no category."""
    named = [(str(group.sample.extra.get("category") or ""), group) for group in groups]
    categories = sorted({name for name, _ in named if name})
    return {
        category: group_accuracy([group for name, group in named if name == category])
        for category in (categories if len(categories) <= MOST_CATEGORIES else ())
    }


def by_limit(groups_under: Mapping[int, Sequence[Group]]) -> Table:
    """Accuracy under each limit of turns, and the share of episodes that it cut off."""
    table: Table = {}
    for limit, groups in sorted(groups_under.items()):
        members = [t for group in groups for t in group.trajectories]
        cut = float(np.mean([t.end_reason == "max_turns" for t in members]))
        turns = float(np.mean([t.turns for t in members]))
        table[str(limit)] = group_accuracy(groups) | {"overturn_frac": cut, "turns_mean": turns}
    return table


def by_turns(groups: Sequence[Group]) -> Table:
    """Of the episodes that used so many turns: how many there are, and how many were right."""
    judged = [
        (t.turns, t.outcome)
        for group in groups
        for t in group.trajectories
        if t.outcome is not None and t.status not in ALWAYS_EXCLUDED
    ]
    table: Table = {}
    for turns in sorted({turns for turns, _ in judged}):
        values = [outcome for used, outcome in judged if used == turns]
        table[str(turns)] = {"episodes": float(len(values)), "accuracy": float(np.mean(values))}
    return table


class Cuts:
    """Episodes as smaller limits of turns would have ended them, scored like any other.

    cuts = Cuts(limits.marks, lambda: RewardStream(scorer, family))
    groups = collect(..., on_mark=cuts.submit)
    """

    def __init__(self, limits: Sequence[int], stream: Callable[[], Any]) -> None:
        self._streams = {limit: stream() for limit in limits}
        self._cut: dict[int, dict[tuple[str, int], Trajectory]] = {n: {} for n in limits}

    def submit(self, sample: Any, trajectory: Trajectory) -> None:
        self._cut[trajectory.turns][trajectory.key] = trajectory
        self._streams[trajectory.turns].submit(sample, trajectory)

    def attach(self, groups: Sequence[Group]) -> dict[int, list[Group]]:
        """`groups` as they are under each limit: cut where it would have struck."""
        return {limit: [self._under(limit, group) for group in groups] for limit in self._streams}

    def _under(self, limit: int, group: Group) -> Group:
        cut = self._cut[limit]
        struck = tuple(cut[t.key] for t in group.trajectories if t.key in cut)
        (scored,) = self._streams[limit].attach([replace(group, trajectories=struck)])
        found = {t.key: t for t in scored.trajectories}
        members = tuple(found.get(t.key, t) for t in group.trajectories)
        return replace(group, trajectories=members)
