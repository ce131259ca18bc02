"""Two runs compared: differences with their intervals, and the score of the commonest answer.

>>> independent_difference(0.6, wilson(48, 80), 0.8, wilson(56, 70)).low
0.05243147240236498
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from saccade.run.statistics import Interval, Values, are_shares, around_a_constant, bootstrap_mean, item_means


class Difference(NamedTuple):
    mean: float
    low: float
    high: float


def paired_difference(before: Values, after: Values) -> Difference:
    """Mean of after - before over the same items, with its bootstrap interval."""
    first, second = item_means(before), item_means(after)
    if len(first) != len(second):
        raise ValueError(f"paired items: {len(first)} before and {len(second)} after")
    change = second - first
    constant = np.ptp(change) == 0 and are_shares(first) and are_shares(second)
    interval = around_a_constant(change, least=-1.0) if constant else bootstrap_mean(change)
    return Difference(float(change.mean()), *interval)


def independent_difference(
    before: float, before_interval: Interval, after: float, after_interval: Interval
) -> Difference:
    """after - before of two measurements, from their intervals alone (Newcombe 1998, method 10).

    For the same items the interval is wider than necessary: use `paired_difference` where their scores are known.
    """
    change = after - before
    down = (after - after_interval.low) ** 2 + (before_interval.high - before) ** 2
    up = (after_interval.high - after) ** 2 + (before - before_interval.low) ** 2
    return Difference(change, change - down**0.5, change + up**0.5)


def maj_at_k(
    answers_per_item: Sequence[Sequence[Hashable | None]], scores_per_item: Sequence[Sequence[float]]
) -> float:
    """Mean score of the most common answer; None does not vote. The scores of tied answers are averaged."""
    found = []
    for answers, scores in zip(answers_per_item, scores_per_item, strict=True):
        votes = Counter(answer for answer in answers if answer is not None)
        most = max(votes.values(), default=0)
        winning = [score for answer, score in zip(answers, scores, strict=True) if votes.get(answer) == most]
        found.append(float(np.mean(winning)) if winning else 0.0)
    return float(np.mean(found))
