"""Metrics that test sets report besides accuracy.

>>> suite_metrics(SUITES["wemath"], groups, {})
{'strict': 0.31, 'loose': 0.47}
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from saccade.plugins.suites.suites import Suite
from saccade.recipes.accuracy import Table, items_of
from saccade.run.metrics import RIGHT
from saccade.types import Group


def suite_metrics(suite: Suite, groups: Sequence[Group], tables: Mapping[str, Table]) -> dict[str, float]:
    """The mean accuracy over categories, if the suite lists them, and We-Math's scores, if it is We-Math."""
    sections = [row["accuracy"] for row in tables.get("by_category", {}).values() if "accuracy" in row]
    found = {"section_mean": float(np.mean(sections))} if suite.categories and sections else {}
    return found | (four_dimensional(groups) if suite.metric.startswith("strict") else {})


def four_dimensional(groups: Sequence[Group]) -> dict[str, float]:
    """We-Math's scores. A problem of several steps scores 1 if it is right, except by rote (strict: any step is wrong;
    loose: all steps are wrong); 0.5 if all its steps are right and it is wrong; else 0. Problems that lack a step do
    not count.
    """
    problems: dict[Any, dict[str, bool]] = {}
    for group, (_, values) in zip(groups, items_of(groups), strict=True):
        if len(values):
            about = group.sample.extra
            problems.setdefault(about.get("problem_id"), {})[str(about.get("key"))] = float(values.mean()) >= RIGHT
    strict, loose = [], []
    for parts in problems.values():
        for count in (2, 3):
            steps = [parts.get(f"{count}steps_{n}") for n in range(1, count + 1)]
            whole = parts.get(f"{count}steps_multi")
            if whole is None or None in steps:
                continue
            half = 0.5 * (all(steps) and not whole)
            strict.append(half + (whole and all(steps)))
            loose.append(half + (whole and any(steps)))
    return {"strict": float(np.mean(strict)), "loose": float(np.mean(loose))} if strict else {}
