"""Metrics that follow from scored groups alone, under the names of docs/runs.md.

Rewards, groups and advantages count live members (whose status is not excluded); lengths, turns and end reasons count
all members, because a step whose answers were all excluded must show why. A greedy baseline (`trained` false) counts
nowhere, unless a group holds nothing else. Knows nothing of losses or trainers.

    >>> group_metrics([])
    {}
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np
import psutil

from saccade.algorithms.filters import is_constant
from saccade.registry import Table
from saccade.types import ALWAYS_EXCLUDED, STATUS_OF_END, Group, Trajectory

RIGHT, WRONG = 0.99, 0.01  # least outcome that is right, most that is wrong, as in dynamic sampling
UNFINISHED = ("truncated", "overturn", "void")
# The main metrics of a validation set: accuracy, or scores of any scale.
MEASURE = re.compile(r"val/(.+?)/(accuracy|score(?:/.+)?)")
# Metrics of plugins, over all trajectories of a step or of a set.
METRICS: Table[Callable[[Sequence[Trajectory]], dict[str, float]]] = Table("metrics", {})
QUARTERS = (0, 25, 50, 75, 100)


def group_metrics(
    groups: Sequence[Group],
    exclude_status: Collection[str] = (),
    *,
    excluded_in_baseline: bool = False,
    compares: bool = True,
    scores: Collection[str] = (),
) -> dict[str, float]:
    """All metrics of one step or validation set; `exclude_status` and `excluded_in_baseline` as in the algorithm.
    `compares`: whether the algorithm learns from differences within a group. `scores`: data sources whose outcome is a
    score, not an accuracy.
    """
    excluded = ALWAYS_EXCLUDED | set(exclude_status)
    members = [_members(group) for group in without_scores(groups, scores)]
    everyone = [t for group in members for t in group]
    if not everyone:
        return {}
    live = compared = [_scored(group, excluded) for group in members]
    if excluded_in_baseline:  # excluded members still count in the baseline
        compared = [_scored(group, ALWAYS_EXCLUDED) if _scored(group, excluded) else [] for group in members]
    return (
        _reward_metrics(everyone, live, [group.sample.data_source for group in groups])
        | _group_metrics(live, compared if compares else [])
        | _length_metrics(everyone)
        | _turn_metrics(everyone)
        | _more_metrics(everyone)
        | _advantage_metrics(everyone, excluded)
    )


def signal_metrics(
    trained: Sequence[Group], sampled: Sequence[Group], exclude_status: Collection[str] = ()
) -> dict[str, float]:
    """How many groups have a learning signal, with rewards as shaped, and how many rollouts one takes."""
    excluded = ALWAYS_EXCLUDED | set(exclude_status)
    live = [
        members
        for group in trained
        if (members := [t for t in _members(group) if t.status not in excluded])
        and not _is_dead([float(t.reward or 0.0) for t in members])
    ]
    metrics = {"group/live_frac": len(live) / max(1, len(sampled))}
    if live:
        metrics["group/rollouts_per_live"] = sum(len(g.trajectories) for g in sampled) / len(live)
        outcomes = [[t.outcome for t in members if t.outcome is not None] for members in live]
        metrics["group/side_signal_frac"] = _share(bool(v) and _is_dead(v) for v in outcomes)
    return metrics


def without_scores(groups: Sequence[Group], scores: Collection[str]) -> Sequence[Group]:
    """The groups, without the outcomes of data sources where these are scores and no accuracy."""
    if not scores:
        return groups
    return [
        replace(group, trajectories=tuple(replace(t, outcome=None) for t in group.trajectories))
        if group.sample.data_source in scores
        else group
        for group in groups
    ]


def episode_metrics(everyone: Sequence[Trajectory]) -> dict[str, float]:
    """Turn and tool metrics of a validation set; empty if all episodes have one turn and no tools."""
    if not any(t.turns > 1 or "tool_calls" in t.info for t in everyone):
        return {}
    found = _turn_metrics(list(everyone)) | _more_metrics(everyone)
    return {name: value for name, value in found.items() if name.startswith(("turns/", "tool/"))}


def _more_metrics(everyone: Sequence[Trajectory]) -> dict[str, float]:
    return {name: value for metrics in METRICS.values() for name, value in metrics(everyone).items()}


def _members(group: Group) -> list[Trajectory]:
    return [t for t in group.trajectories if t.trained] or list(group.trajectories)


def _scored(group: list[Trajectory], excluded: Collection[str]) -> list[Trajectory]:
    return [t for t in group if t.status not in excluded and t.reward is not None]


def _reward_metrics(everyone: list[Trajectory], live: list[list[Trajectory]], sources: list[str]) -> dict[str, float]:
    scored = [t for group in live for t in group]
    metrics = _score_metrics(scored)
    if scored:
        metrics |= _spread("reward", np.array([t.reward for t in scored], float))
    if len(counts := Counter(sources)) > 1:
        metrics |= {f"data/source_frac/{source}": n / len(sources) for source, n in sorted(counts.items())}
    metrics["reward/abstain_rate"] = _share(t.status == "abstain" for t in everyone)
    metrics["reward/error_rate"] = _share(t.status == "error" for t in everyone)
    for source in sorted(counts):
        of_source = [t for group, s in zip(live, sources, strict=True) if s == source for t in group]
        means = _score_metrics(of_source)
        if of_source:
            means["reward/mean"] = fmean(float(t.reward or 0.0) for t in of_source)
        for name in ("mean", "accuracy", "format"):
            if f"reward/{name}" in means:
                metrics[f"reward/by_source/{source}/{name}"] = means[f"reward/{name}"]
    return metrics


def _score_metrics(scored: list[Trajectory]) -> dict[str, float]:
    """Means of every part, of the raw outcome (accuracy) and of the format term, whatever its full
    name.
    """
    parts: dict[str, list[float]] = {}
    for trajectory in scored:
        for name, value in trajectory.parts.items():
            parts.setdefault(name, []).append(value)
    for name in [name for name in parts if name.startswith("format:")]:
        parts.setdefault("format", []).extend(parts[name])
    metrics = {f"reward/{name}": fmean(values) for name, values in parts.items()}
    if outcomes := [t.outcome for t in scored if t.outcome is not None]:
        metrics["reward/accuracy"] = fmean(outcomes)
    return metrics


def _group_metrics(live: list[list[Trajectory]], compared: list[list[Trajectory]]) -> dict[str, float]:
    # Plain floats: an array of eight costs more to make than to loop over.
    rewards = [[float(t.reward or 0.0) for t in group] for group in live]
    outcomes = [[t.outcome for t in group if t.outcome is not None] for group in live]
    spreads = [_std(values) for values in rewards if len(values) > 1]
    metrics = {}
    if compared:
        metrics["group/dead_frac"] = _share(_is_dead([float(t.reward or 0.0) for t in group]) for group in compared)
    if any(outcomes):
        metrics["group/all_right_frac"] = _share(bool(v) and min(v) >= RIGHT for v in outcomes)
        metrics["group/all_wrong_frac"] = _share(bool(v) and max(v) <= WRONG for v in outcomes)
        quarters = Counter(sum(value >= RIGHT for value in v) * 4 // len(v) * 25 for v in outcomes if v)
        metrics |= {f"group/solved_{q}": quarters[q] / quarters.total() for q in QUARTERS}
    return metrics | ({"group/std_mean": fmean(spreads)} if spreads else {})


def _is_dead(rewards: list[float]) -> bool:
    """Whether the group says nothing about which answer is better."""
    return len(rewards) < 2 or is_constant(rewards)


def _std(values: list[float]) -> float:
    mean = fmean(values)  # statistics.stdev takes 45 times as long
    return (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5


def _length_metrics(everyone: list[Trajectory]) -> dict[str, float]:
    responses = np.array([t.response_length for t in everyone], float)
    p50, p95 = np.percentile(responses, [50, 95])
    vision = [sum(span.length for span in t.media) for t in everyone]
    return {
        **_spread("length/response", responses, "_"),
        "length/response_p50": float(p50),
        "length/response_p95": float(p95),
        "length/prompt_mean": fmean(t.prompt_length for t in everyone),
        "length/vision_tokens_mean": fmean(vision),
    }


def _turn_metrics(everyone: list[Trajectory]) -> dict[str, float]:
    count = len(everyone)
    turns = [t.turns for t in everyone]
    reasons = Counter(t.end_reason for t in everyone)
    # By end reason, as a reward that failed later may have turned the status into an error.
    ends = Counter(t.status if t.status in UNFINISHED else STATUS_OF_END.get(t.end_reason) for t in everyone)
    several = max(turns) > 1
    return {
        "turns/mean": sum(turns) / count,
        "turns/max": float(max(turns)),
        **{f"turns/hist_{k}": n / count for k, n in sorted(Counter(turns).items()) if several},
        "turns/tokens_per_turn": sum(t.response_length for t in everyone) / max(1, sum(turns)),
        **{f"turns/end/{reason}": times / count for reason, times in sorted(reasons.items())},
        "turns/overturn_frac": ends["overturn"] / count,
        "turns/void_frac": ends["void"] / count,
        "length/truncated_frac": ends["truncated"] / count,
        "turns/images_per_sample": sum(len(t.media) for t in everyone) / count,
    }


def _advantage_metrics(everyone: list[Trajectory], excluded: Collection[str]) -> dict[str, float]:
    """Over tokens, as the loss sees them."""
    columns = [t.advantages for t in everyone if t.advantages is not None and t.status not in excluded]
    tokens = np.concatenate(columns) if columns else np.empty(0)
    return _spread("adv", tokens) if tokens.size else {}


def _spread(prefix: str, values: np.ndarray, joint: str = "/") -> dict[str, float]:
    mean = values.mean(dtype=np.float64)
    centred = values - values.dtype.type(mean)
    std = (np.dot(centred, centred) / max(len(values) - 1, 1)) ** 0.5
    numbers = {"mean": mean, "std": std, "min": values.min(), "max": values.max()}
    return {f"{prefix}{joint}{name}": float(value) for name, value in numbers.items()}


def _share(flags: Iterable[bool]) -> float:
    return fmean(map(bool, flags))


def validation_measures(names: Iterable[str]) -> list[tuple[str, str]]:
    """Sorted (set, accuracy or score) of the main metrics of validation sets among these names."""
    return sorted({(match[1], match[2]) for match in map(MEASURE.fullmatch, names) if match})


def interval_of(leaf: str) -> tuple[str, str]:
    """Names of the metrics that hold the 95 % interval of `leaf`."""
    prefix = "" if leaf == "accuracy" else f"{leaf}_"
    return f"{prefix}ci_low", f"{prefix}ci_high"


def host_memory(start_gb: float | None = None) -> dict[str, float]:
    """Resident memory of this process in GiB; with an earlier reading also its growth."""
    now = psutil.Process().memory_info().rss / 2**30
    growth = {} if start_gb is None else {"mem/rss_growth_gb": now - start_gb}
    return {"mem/host_rss_gb": now} | growth
