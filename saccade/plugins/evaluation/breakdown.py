"""Accuracy of parts of a set: by limit of turns, by turns used, by category and by source; and pass@k and maj@k by the
number of answers.

breakdown = Breakdown(limits, lambda: RewardStream(scorer, family))
groups = collect(..., on_limit=breakdown.submit)
breakdown.tables(groups, scores)["by_limit"]
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from saccade.plugins.reports.comparison import maj_at_k
from saccade.recipes.accuracy import NO_SCORES, Scores, Table, group_accuracy
from saccade.rollout.episode import Limits
from saccade.run.statistics import pass_at_k
from saccade.types import ALWAYS_EXCLUDED, Group, Trajectory

MOST_CATEGORIES = 40


class Breakdown:
    """Scores each episode also as smaller limits of turns would have cut it."""

    def __init__(self, limits: Limits, stream: Callable[[], Any]) -> None:
        self._limits = limits
        self._streams = {limit: stream() for limit in sorted(limits.smaller_turns)}
        self._cut: dict[int, dict[tuple[str, int], Trajectory]] = {n: {} for n in limits.smaller_turns}

    def submit(self, sample: Any, trajectory: Trajectory) -> None:
        """Take an episode that was cut at the limit `trajectory.turns`."""
        self._cut[trajectory.turns][trajectory.key] = trajectory
        self._streams[trajectory.turns].submit(sample, trajectory)

    def tables(self, groups: Sequence[Group], scores: Scores) -> dict[str, Table]:
        tables = tables_of(groups, scores, several_turns=self._limits.max_turns > 1)
        if self._limits.smaller_turns:
            under = {limit: [self._under(limit, group) for group in groups] for limit in self._streams}
            tables["by_limit"] = by_limit({**under, self._limits.max_turns: groups}, scores)
        return tables

    def _under(self, limit: int, group: Group) -> Group:
        """The group under that limit: episodes that exceed it are replaced by their cut versions."""
        cut = self._cut[limit]
        struck = tuple(cut[t.key] for t in group.trajectories if t.key in cut)
        (scored,) = self._streams[limit].attach([replace(group, trajectories=struck)])
        found = {t.key: t for t in scored.trajectories}
        members = tuple(found.get(t.key, t) for t in group.trajectories)
        return replace(group, trajectories=members)


def tables_of(groups: Sequence[Group], scores: Scores, *, several_turns: bool) -> dict[str, Table]:
    """The tables that have rows, by name, without `by_limit`."""
    found = {"by_category": by_category, "by_source": by_source, "by_k": by_k}
    makers = found | ({"by_turns": by_turns} if several_turns else {})
    return {name: table for name, make in makers.items() if (table := make(groups, scores))}


def by_category(groups: Sequence[Group], scores: Scores = NO_SCORES) -> Table:
    """By the column `category` of the rows; empty without one, or with more than MOST_CATEGORIES values."""
    return _by(lambda group: str(group.sample.extra.get("category") or ""), groups, scores)


def by_source(groups: Sequence[Group], scores: Scores = NO_SCORES) -> Table:
    """By the data_source of the rows; empty if all have the same."""
    several = len({group.sample.data_source for group in groups}) > 1
    return _by(lambda group: group.sample.data_source, groups, scores) if several else {}


def _by(name: Callable[[Group], str], groups: Sequence[Group], scores: Scores) -> Table:
    kinds = sorted(set(filter(None, map(name, groups))))
    return {
        kind: group_accuracy([group for group in groups if name(group) == kind], scores)
        for kind in (kinds if len(kinds) <= MOST_CATEGORIES else ())
    }


def by_k(groups: Sequence[Group], scores: Scores = NO_SCORES) -> Table:
    """For each k up to the number of answers to a question: pass@k (unbiased, for outcomes of 0 and 1 only), and maj@k
    of the first k answers. Items that lost an answer to an error are left out.
    """
    own = [group for group in groups if group.sample.data_source not in scores]
    live = [[t for t in g.trajectories if t.status not in ALWAYS_EXCLUDED and t.outcome is not None] for g in own]
    n = max(map(len, live), default=0)
    whole = [members for members in live if len(members) == n]
    outcomes = [[float(t.outcome or 0.0) for t in members] for members in whole]
    answers = [[t.extracted and t.extracted.strip().casefold() for t in members] for members in whole]
    binary = all(value in (0.0, 1.0) for values in outcomes for value in values)
    table: Table = {}
    for k in range(1, n + 1) if n > 1 else ():
        majority = maj_at_k([said[:k] for said in answers], [values[:k] for values in outcomes])
        passed = {"pass@k": float(np.mean([pass_at_k(n, int(sum(v)), k) for v in outcomes]))} if binary else {}
        table[str(k)] = passed | {"maj@k": majority}
    return table


def by_limit(groups_under: Mapping[int, Sequence[Group]], scores: Scores = NO_SCORES) -> Table:
    """Accuracy under each limit of turns, and the share of episodes that it cut off."""
    table: Table = {}
    for limit, groups in sorted(groups_under.items()):
        members = [t for group in groups for t in group.trajectories]
        cut = float(np.mean([t.end_reason == "max_turns" for t in members]))
        turns = float(np.mean([t.turns for t in members]))
        table[str(limit)] = group_accuracy(groups, scores) | {"overturn_frac": cut, "turns_mean": turns}
    return table


def by_turns(groups: Sequence[Group], scores: Scores = NO_SCORES) -> Table:
    """By the number of turns used: how many episodes, and their accuracy."""
    judged = [
        (t.turns, t.outcome)
        for group in groups
        for t in group.trajectories
        if t.outcome is not None and t.status not in ALWAYS_EXCLUDED
        if group.sample.data_source not in scores
    ]
    table: Table = {}
    for turns in sorted({turns for turns, _ in judged}):
        values = [outcome for used, outcome in judged if used == turns]
        table[str(turns)] = {"episodes": float(len(values)), "accuracy": float(np.mean(values))}
    return table
