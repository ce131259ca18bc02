"""Accuracy of scored groups: with its interval, avg@k, pass@k, and over all orders of the options.

An outcome that is no share of right answers, such as the score of a reward model, is reported as `score` and never
averaged with others. Works on outcomes; knows nothing of engines or files.

    >>> accuracy([np.array([1.0, 0.0]), np.array([1.0, 1.0])])["avg@2"]
    0.75
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from saccade.data.dataset import ROTATION_OF
from saccade.rewards.scorer import Scorer
from saccade.run import statistics
from saccade.run.metrics import interval_of
from saccade.types import ALWAYS_EXCLUDED, Group

SLACK = 1e-6  # rounding error of a weighted sum that should be within 0..1
Table = dict[str, dict[str, float]]  # limit, number of turns, category or source -> numbers
Item = tuple[str, Any]  # a data source, and the outcomes of one question
Scores = Mapping[str, str]  # data source whose outcome is a score -> the term that gives it
NO_SCORES: Scores = {}


def items_of(groups: Sequence[Group]) -> list[Item]:
    live = [[t for t in group.trajectories if t.status not in ALWAYS_EXCLUDED] for group in groups]
    outcomes = [np.array([t.outcome for t in members if t.outcome is not None], float) for members in live]
    return [(group.sample.data_source, values) for group, values in zip(groups, outcomes, strict=True)]


def score_terms(scorer: Scorer | None, items: Sequence[Item], score_sources: Collection[str] = ()) -> dict[str, str]:
    """Data sources whose outcome is a score, with the term that gives it: a reward model, or any term with a value
    outside 0..1, now or earlier (`score_sources`).
    """
    beyond = {source: False for source, _ in items}
    for source, values in items:
        beyond[source] |= any(not -SLACK <= value <= 1 + SLACK for value in values)
    found = {}
    for source in beyond:
        term = None
        if scorer is not None:
            recipe = scorer.recipe(source)
            term = recipe.terms[recipe.outcome]
        if beyond[source] or source in score_sources or (term is not None and term.uses_model):
            found[source] = str(term and (term.verifier, sorted(term.args.items())))
    return found


def accuracy(outcomes: Sequence[np.ndarray]) -> dict[str, float]:
    """Accuracy over the items that have outcomes; only their number, 0, if there are none."""
    metrics = {"items": float(len(outcomes))}
    if outcomes:
        low, high = statistics.mean_interval(outcomes)
        metrics |= {"accuracy": _mean(outcomes), "ci_low": low, "ci_high": high} | _at_k(outcomes)
    return metrics


def _mean(outcomes: Sequence[np.ndarray]) -> float:
    """The mean over items; each counts once, however many outcomes it has."""
    return float(np.mean([np.mean(values) for values in outcomes]))


def measured(items: Iterable[Item], scores: Scores) -> dict[str, float]:
    """Accuracy, and separately the scores: one mean if one term gives them all, else one for each source. Items without
    an outcome do not count.
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
        metrics |= {"score": _mean(everyone), "score_ci_low": low, "score_ci_high": high}
    else:
        metrics |= {f"score/{source}": _mean(of_source) for source, of_source in rated.items()}
    return metrics | ({"score_items": float(len(everyone))} if rated else {})


def with_interval(metrics: Mapping[str, float], name: str) -> str:
    """A metric as text, with its interval if it has one."""
    ends = [f"{metrics[end]:.3f}" for end in interval_of(name) if end in metrics]
    return f"{name} {metrics[name]:.3f}" + (f" [{', '.join(ends)}]" if ends else "")


def measures(metrics: Mapping[str, float]) -> list[str]:
    """Accuracy, avg@k, pass@k and scores as texts."""
    shown = [name for name in metrics if name in ("accuracy", "score") or "score/" in name or "@" in name]
    return [with_interval(metrics, name) for name in shown]


def _at_k(outcomes: Sequence[np.ndarray]) -> dict[str, float]:
    """avg@k, and the unbiased pass@k if every outcome is 0 or 1. Items with fewer than k outcomes, because a sample
    failed, are left out of both.
    """
    k = max(len(values) for values in outcomes)
    whole = [values for values in outcomes if len(values) == k]
    if k < 2:
        return {}
    metrics = {f"avg@{k}": _mean(whole)}
    if all(set(values.tolist()) <= {0.0, 1.0} for values in whole):
        metrics[f"pass@{k}"] = float(np.mean([statistics.pass_at_k(k, int(values.sum()), k) for values in whole]))
    return metrics


def group_accuracy(groups: Sequence[Group], scores: Scores = NO_SCORES) -> dict[str, float]:
    """Accuracy of groups. If rows repeat a question with its options in several orders, the interval treats these rows
    as one item, and `all_rotations` is the share of questions that were answered correctly in every order.
    """
    items = items_of(groups)
    metrics = measured(items, scores)
    questions: dict[str, list[np.ndarray]] = {}
    for group, (source, values) in zip(groups, items, strict=True):
        if ROTATION_OF in group.sample.extra and len(values) and source not in scores:
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
