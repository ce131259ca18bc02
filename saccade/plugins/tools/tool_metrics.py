"""Metrics of tool use, from `tool_calls` in the info of episodes, whichever environment wrote it.

>>> tool_metrics([])
{}
"""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from saccade.run.metrics import RIGHT
from saccade.types import Trajectory


def tool_metrics(everyone: Sequence[Trajectory]) -> dict[str, float]:
    """Metrics of the calls of all episodes; accuracies only include episodes with an outcome."""
    using = [t for t in everyone if "tool_calls" in t.info]
    if not using:
        return {}
    calls: list[dict[str, Any]] = [call for t in using for call in t.info["tool_calls"]]
    reasons = Counter(call["reason"] for call in calls if not call["ok"])
    crops = [call for call in calls if call.get("area") is not None]
    metrics = {f"tool/invalid/{reason}": n / len(calls) for reason, n in sorted(reasons.items())}
    metrics["tool/calls_per_sample"] = len(calls) / len(using)
    if calls:
        metrics["tool/success_frac"] = fmean(call["ok"] for call in calls)
    if crops:
        metrics["tool/noop_rate"] = fmean(bool(call.get("noop")) for call in crops)
        metrics["tool/crop_area_mean"] = fmean(call["area"] for call in crops)
    return metrics | _outcomes_by_call(using)


def _outcomes_by_call(using: Sequence[Trajectory]) -> dict[str, float]:
    """Accuracy with and without calls, and the shares of the four cells right/wrong x call/no call."""
    judged = [(bool(t.info["tool_calls"]), t.outcome) for t in using if t.outcome is not None]
    metrics = {}
    for called, name in ((True, "call"), (False, "no_call")):
        if outcomes := [outcome for has, outcome in judged if has == called]:
            metrics["tool/acc_with_call" if called else "tool/acc_without_call"] = fmean(outcomes)
        if judged:
            correct = sum(outcome >= RIGHT for outcome in outcomes)
            metrics[f"tool/right_{name}"] = correct / len(judged)
            metrics[f"tool/wrong_{name}"] = (len(outcomes) - correct) / len(judged)
    return metrics
