"""Which step of a run was best, as its validations say.

missed = remember(progress, {"val/geo/accuracy": 0.4}, 20, wanted=None)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from saccade.tracking.metrics import MEASURE


def remember(
    progress: dict[str, Any], metrics: Mapping[str, float], step: int, wanted: str | None
) -> str:
    """Writes the best step, its score and by which metric into `progress`. Returns what to say
    where the wanted metric was not measured; that of a set which is measured elsewhere is not
    missed.
    """
    before = progress.get("best_metric")
    name = wanted or default_best(metrics, before)
    if name is None or name not in metrics:
        there = [k for k in metrics if wanted and wanted.startswith(k.rpartition("/")[0] + "/")]
        if not there:
            return ""
        return (
            f"save.best_metric: {wanted} was not measured, so no checkpoint counts as the best; "
            f"there are {', '.join(there)}"
        )
    if name != (before or name):  # best by another measure says nothing about this one
        progress |= {"best_score": None, "best_step": None}
    progress["best_metric"] = name
    score, best = metrics[name], progress["best_score"]
    if step > 0 and (best is None or score > best):
        progress |= {"best_score": score, "best_step": step}
    return ""


def default_best(metrics: Mapping[str, float], before: str | None) -> str | None:
    """Accuracy of the first set, or its score where nothing is right or wrong; None where only
    other sets than that were measured.
    """
    of_set = f"{before.rpartition('/')[0]}/" if before else ""
    if not any(key.startswith(of_set) for key in metrics):
        return None
    measures = [key for key in metrics if MEASURE.fullmatch(key)]
    accuracies = [key for key in measures if key.endswith("/accuracy")]
    return next(iter(accuracies or measures), None)
