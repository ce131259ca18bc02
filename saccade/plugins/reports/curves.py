"""Rows of metrics as charts: which metrics share one, and few enough points to draw.

>>> [chart.title for chart in charts_of([{"step": 1, "sft/loss": 2.0}])]
['SFT loss']
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from saccade.plugins.reports.report_page import Chart, Curve, Point
from saccade.run.metrics import interval_of, validation_measures

Rows = Sequence[Mapping[str, Any]]

BINS = 150  # of one curve, each with its lowest and its highest point
SMOOTH_FROM = 30  # points from which a running mean is drawn over the curve
# Title -> metrics and their labels. A title with % is drawn in per cent.
CHARTS: Mapping[str, Mapping[str, str]] = {
    "Accuracy of training rollouts, %": {"reward/accuracy": "accuracy"},
    "Reward": {"reward/mean": "mean"},
    "Reward parts": {},  # whatever the terms of a run are called
    "Groups without signal, %": {
        "group/dead_frac": "dead",
        "group/all_right_frac": "all right",
        "group/all_wrong_frac": "all wrong",
    },
    "SFT loss": {"sft/loss": "loss"},
    "Preference loss": {"dpo/loss": "loss"},
    "Pairs in the right order": {"dpo/accuracy": "accuracy"},
    "Rewards of preferences": {"dpo/reward_chosen": "chosen", "dpo/reward_rejected": "rejected"},
    "Reward model: loss": {"rm/loss": "loss"},
    "Reward model: judged right, %": {"rm/accuracy": "accuracy"},
    "Reward model: scores": {"rm/chosen_mean": "chosen", "rm/rejected_mean": "rejected"},
    "Response tokens": {"length/response_mean": "mean", "length/response_p95": "95th percentile"},
    "Cut responses, %": {"length/truncated_frac": "truncated"},
    "Gradient norm": {"policy/grad_norm": "gradient norm"},
    "Learning rate": {"policy/lr": "learning rate"},
    "Entropy": {"policy/entropy": "entropy"},
    "KL to the reference": {"policy/kl_ref": "KL"},
    "Clipped ratios, %": {"policy/clip_frac_low": "low", "policy/clip_frac_high": "high"},
    "Engine against trainer (log-prob gap)": {"mismatch/logp_gap_mean": "mean", "mismatch/logp_gap_max": "largest"},
    "Turns": {"turns/mean": "mean", "turns/max": "most"},
    "Seconds per step": {"time/step": "step", "time/rollout": "rollout", "time/update": "update"},
    "Memory (GiB)": {"mem/host_rss_gb": "host", "mem/gpu_peak_gb": "GPU peak"},
}
DULL = {"Cut responses, %": 0.0, "Turns": 1.0}  # folded away where it never leaves this value
NOT_PARTS = {"mean", "std", "min", "max", "accuracy", "abstain_rate", "error_rate", "clip_frac"}


def charts_of(rows: Rows) -> list[Chart]:
    """Validation first, then the charts above, then each other metric in a chart of its own."""
    points = _points(rows)
    charts, drawn = [], {"step", "time"}
    for kind in ("accuracy", "score"):
        curves = []
        for name, leaf in validation_measures(points):
            metric, *ends = (f"val/{name}/{one}" for one in (leaf, *interval_of(leaf)))
            if leaf.startswith(kind):
                low, high = (dict(points.get(end, ())) for end in ends)
                band = [(x, low[x], high[x]) for x in low if x in high]
                label = name + leaf.removeprefix(kind)
                curves.append(Curve(name=label, points=points[metric], band=band))
                drawn |= {metric, *ends}
        charts.append(Chart(title=f"Validation {kind}", curves=curves, percent=kind == "accuracy"))
    terms = [name for name in points if re.fullmatch(r"reward/[^/]+", name)]
    parts = {name: name.removeprefix("reward/") for name in terms}
    parts = {name: label for name, label in parts.items() if label not in NOT_PARTS}
    for title, metrics in {**CHARTS, "Reward parts": parts}.items():
        found = {name: label for name, label in metrics.items() if name in points}
        if any(y != DULL.get(title) for name in found for _, y in points[name]):
            curves = [_curve(label, points[name]) for name, label in found.items()]
            charts.append(Chart(title=title.removesuffix(", %"), curves=curves, percent="%" in title))
            drawn |= found.keys()
    rest = sorted(points.keys() - drawn)
    charts += [Chart(title=n, curves=[_curve(n, points[n])], more=True) for n in rest]
    return [chart for chart in charts if chart.curves]


def phase_seconds(rows: Rows) -> dict[str, float]:
    """Seconds of each phase over the run, largest first, and of what is in none."""
    points = _points(rows)
    named = [name for name in points if re.fullmatch(r"time/[^/]+", name)]
    totals = {name.removeprefix("time/"): sum(y for _, y in points[name]) for name in named}
    whole = totals.pop("step", 0.0)
    rest = whole - sum(totals.values())
    totals |= {"other": rest} if totals and rest > 0.005 * whole else {}
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _points(rows: Rows) -> dict[str, list[Point]]:
    """Metric -> its finite values by step."""
    points: dict[str, dict[float, float]] = {}
    for row in rows:
        for name, value in row.items():
            if isinstance(value, float | int) and math.isfinite(value):
                points.setdefault(name, {})[row["step"]] = value
    return {name: sorted(values.items()) for name, values in points.items()}


def _curve(name: str, points: Sequence[Point]) -> Curve:
    """Few enough points to draw; the first, the last and every peak stay where they are."""
    size = math.ceil(len(points) / BINS)
    places = range(0, len(points), size)
    thin = points
    if size > 2:
        kept = {points[0], points[-1]}
        for start in places:
            chunk = points[start : start + size]
            kept |= {min(chunk, key=lambda point: point[1]), max(chunk, key=lambda point: point[1])}
        thin = sorted(kept)
    mean = []
    if len(points) >= SMOOTH_FROM:
        reach = max(2, len(points) // 20)
        sums = [0.0]
        for _, y in points:
            sums.append(sums[-1] + y)
        for place in (*places, len(points) - 1):
            low, high = max(0, place - reach), min(len(points), place + reach + 1)
            mean.append((points[place][0], (sums[high] - sums[low]) / (high - low)))
    return Curve(name=name, points=thin, mean=mean)
