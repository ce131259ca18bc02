"""What scored groups say: accuracy with its interval, avg@k and pass@k, also under limits of turns,
by turns that were used, by category and by source.

An outcome that is no share of right answers, such as the score of a reward model, is reported as
`score` and never averaged with others. Works on outcomes; knows nothing of engines or files.

    >>> accuracy([np.array([1.0, 0.0]), np.array([1.0, 1.0])])["avg@2"]
    0.75
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from saccade.data.suites import ROTATION_OF
from saccade.rewards.scorer import Scorer
from saccade.run import statistics
from saccade.run.metrics import interval_of
from saccade.types import ALWAYS_EXCLUDED, Group, Trajectory

MOST_CATEGORIES = 40
SLACK = 1e-6  # of sums that should be 1
Table = dict[str, dict[str, float]]  # limit, number of turns, category or source -> numbers
Scores = Mapping[str, str]  # data source whose outcome is a score -> what gives that score
NO_SCORES: Scores = {}


def score_terms(
    scorer: Scorer | None, outcomes: Mapping[str, Sequence[float]], known: Collection[str] = ()
) -> dict[str, str]:
    """Sources whose outcome is no accuracy: it comes from a reward model, a value lies beyond 0..1,
    or that is `known` from values before these.
    """
    found = {}
    for source, values in outcomes.items():
        term = None
        if scorer is not None:
            recipe = scorer.recipe(source)
            term = recipe.terms[recipe.outcome]
        beyond = any(not -SLACK <= value <= 1 + SLACK for value in values)
        if beyond or source in known or (term is not None and term.learned):
            found[source] = str(term and (term.verifier, sorted(term.args.items())))
    return found


def outcomes_by_source(groups: Sequence[Group]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for group in groups:
        found.setdefault(group.sample.data_source, []).extend(_outcomes(group).tolist())
    return found


def accuracy(outcomes: Sequence[np.ndarray]) -> dict[str, float]:
    """Of the items that were judged at all; nothing is claimed when there are none."""
    metrics = {"items": float(len(outcomes))}
    if outcomes:
        low, high = statistics.mean_interval(outcomes)
        mean = float(np.mean([values.mean() for values in outcomes]))
        metrics |= {"accuracy": mean, "ci_low": low, "ci_high": high}
        metrics |= _at_k(outcomes)
    return metrics


def measured(items: Sequence[tuple[str, np.ndarray]], scores: Scores) -> dict[str, float]:
    """Accuracy, and apart from it the scores: one mean where one term gives them all, else one for
    each source. `items`: source and outcomes of each; those without any do not count.
    """
    items = [(source, values) for source, values in items if len(values)]
    metrics = accuracy([values for source, values in items if source not in scores])
    metrics["items"] = float(len(items))
    rated: dict[str, list[np.ndarray]] = {}
    for source, values in items:
        if source in scores:
            rated.setdefault(source, []).append(values)
    everyone = [values for of_source in rated.values() for values in of_source]
    if len({scores[source] for source in rated}) == 1:
        low, high = statistics.mean_interval(everyone)
        mean = float(np.mean([values.mean() for values in everyone]))
        metrics |= {"score": mean, "score_ci_low": low, "score_ci_high": high}
    else:
        for source, of_source in rated.items():
            mean = float(np.mean([values.mean() for values in of_source]))
            metrics[f"score/{source}"] = mean
    return metrics | ({"score_items": float(len(everyone))} if rated else {})


def with_interval(metrics: Mapping[str, float], name: str) -> str:
    """One of them as text, with its interval where it has one."""
    ends = [f"{metrics[end]:.3f}" for end in interval_of(name) if end in metrics]
    return f"{name} {metrics[name]:.3f}" + (f" [{', '.join(ends)}]" if ends else "")


def measures(metrics: Mapping[str, float]) -> list[str]:
    """Accuracy, avg@k, pass@k and scores as texts."""
    named = ("accuracy", "score")
    shown = [name for name in metrics if name in named or "score/" in name or "@" in name]
    return [with_interval(metrics, name) for name in shown]


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


def group_accuracy(groups: Sequence[Group], scores: Scores = NO_SCORES) -> dict[str, float]:
    """Where rows ask the same in several orders of the options, those of one question are drawn
    together for the interval, and `all_rotations` is the share of questions that were answered
    rightly in every order.
    """
    outcomes = [_outcomes(group) for group in groups]
    sources = [group.sample.data_source for group in groups]
    metrics = measured(list(zip(sources, outcomes, strict=True)), scores)
    questions: dict[str, list[np.ndarray]] = {}
    for group, values in zip(groups, outcomes, strict=True):
        right_or_wrong = group.sample.data_source not in scores
        if ROTATION_OF in group.sample.extra and len(values) and right_or_wrong:
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


def by_category(groups: Sequence[Group], scores: Scores = NO_SCORES) -> Table:
    """Of sets whose rows say what they are about; a column with many values is no category."""
    return _by([str(group.sample.extra.get("category") or "") for group in groups], groups, scores)


def by_source(groups: Sequence[Group], scores: Scores = NO_SCORES) -> Table:
    """Of sets whose rows come from several."""
    sources = [group.sample.data_source for group in groups]
    return _by(sources, groups, scores) if len(set(sources)) > 1 else {}


def _by(names: Sequence[str], groups: Sequence[Group], scores: Scores) -> Table:
    kinds = sorted({name for name in names if name})
    pairs = list(zip(names, groups, strict=True))
    return {
        kind: group_accuracy([group for name, group in pairs if name == kind], scores)
        for kind in (kinds if len(kinds) <= MOST_CATEGORIES else ())
    }


def by_limit(groups_under: Mapping[int, Sequence[Group]], scores: Scores = NO_SCORES) -> Table:
    """Accuracy under each limit of turns, and the share of episodes that it cut off."""
    table: Table = {}
    for limit, groups in sorted(groups_under.items()):
        members = [t for group in groups for t in group.trajectories]
        cut = float(np.mean([t.end_reason == "max_turns" for t in members]))
        turns = float(np.mean([t.turns for t in members]))
        about = {"overturn_frac": cut, "turns_mean": turns}
        table[str(limit)] = group_accuracy(groups, scores) | about
    return table


def by_turns(groups: Sequence[Group], scores: Scores = NO_SCORES) -> Table:
    """Of the episodes that used so many turns: how many there are, and how many were right."""
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
