"""The sections of a report as HTML: tiles, tables with intervals, curves of metrics. Whatever comes
from outside is escaped. Reads no file.

    tabulated(Table(title="Sets", columns=("set",), rows=(("count",),)))
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saccade.tracking import charts
from saccade.tracking.charts import Point, Series
from saccade.tracking.markup import escape

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number in a table, with its 95 % interval where there is one."""

    value: float
    low: float | None = None
    high: float | None = None
    percent: bool = True
    change: bool = False  # a difference: shown with its sign
    tone: bool = True  # a difference whose rise is good, in colour


Cell = str | Estimate | None  # None is an empty cell


@dataclass(frozen=True, kw_only=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


# Which metrics share a chart, and their labels, in the order of the colours.
CHARTS: Mapping[str, Mapping[str, str]] = {
    "Accuracy of training rollouts": {"reward/accuracy": "accuracy"},
    "Reward": {"reward/mean": "mean"},
    "Reward parts": {},  # whatever the terms of a run are called
    "Groups without signal": {
        "group/dead_frac": "dead",
        "group/all_right_frac": "all right",
        "group/all_wrong_frac": "all wrong",
    },
    "SFT loss": {"sft/loss": "loss"},
    "Preference loss": {"dpo/loss": "loss"},
    "Pairs in the right order": {"dpo/accuracy": "accuracy"},
    "Rewards of preferences": {"dpo/reward_chosen": "chosen", "dpo/reward_rejected": "rejected"},
    "Reward model: loss": {"rm/loss": "loss"},
    "Reward model: judged right": {"rm/accuracy": "accuracy"},
    "Reward model: scores": {"rm/chosen_mean": "chosen", "rm/rejected_mean": "rejected"},
    "Response tokens": {"length/response_mean": "mean", "length/response_p95": "95th percentile"},
    "Cut responses": {"length/truncated_frac": "truncated"},
    "Gradient norm": {"policy/grad_norm": "gradient norm"},
    "Learning rate": {"policy/lr": "learning rate"},
    "Entropy": {"policy/entropy": "entropy"},
    "KL to the reference": {"policy/kl_ref": "KL"},
    "Clipped ratios": {"policy/clip_frac_low": "low", "policy/clip_frac_high": "high"},
    "Engine against trainer (log-prob gap)": {
        "mismatch/logp_gap_mean": "mean",
        "mismatch/logp_gap_max": "largest",
    },
    "Turns": {"turns/mean": "mean", "turns/max": "most"},
    "Seconds per step": {"time/step": "step", "time/rollout": "rollout", "time/update": "update"},
    "Memory (GiB)": {"mem/host_rss_gb": "host", "mem/gpu_peak_gb": "GPU peak"},
}
PERCENT = {
    *("Accuracy of training rollouts", "Groups without signal", "Reward model: judged right"),
    *("Cut responses", "Clipped ratios"),
}
DULL = {"Cut responses": 0.0, "Turns": 1.0}  # left out where it never leaves this value
NOT_PARTS = {"mean", "std", "min", "max", "accuracy", "abstain_rate", "error_rate", "clip_frac"}


# How good a set is: its name, and accuracy or a score of whatever scale.
MEASURE = re.compile(r"val/(.+?)/(accuracy|score(?:/.+)?)")


def section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def tiles(facts: Mapping[str, str]) -> str:
    drawn = "".join(
        f'<div class="card tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in facts.items()
    )
    return f'<div class="tiles">{drawn}</div>' if drawn else ""


def remarks(notes: Sequence[str]) -> str:
    lines = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return f'<div class="card notes">{lines}</div>' if lines else ""


def folded(name: str, text: str) -> str:
    summary = f"<summary>{escape(name)}</summary>"
    return f'<details class="card">{summary}<pre>{escape(text)}</pre></details>'


def tabulated(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in table.rows)
    note = f'<p class="dim small">{escape(table.note)}</p>' if table.note else ""
    lines = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return section(table.title, f'<div class="card"><div class="scroll">{lines}</div>{note}</div>')


def _cell(cell: Cell) -> str:
    if cell is None:
        return "<td></td>"
    if isinstance(cell, str):
        return f"<td>{escape(cell)}</td>"
    known = cell.low is not None and cell.high is not None
    ends = [_signed(edge, cell) for edge in (cell.low, cell.high)] if known else []
    ends = [end.removesuffix(f"{charts.NO_BREAK}%").removesuffix(" points") for end in ends]
    interval = f'<span class="ci">[{", ".join(ends)}]</span>' if ends else ""
    bar = (
        charts.interval_bar(cell.value, cell.low, cell.high)
        if known and cell.percent and not cell.change
        else ""
    )
    tone = _tone(cell) if cell.change and cell.tone else ""
    return f"<td><b{tone}>{_signed(cell.value, cell)}</b>{interval}{bar}</td>"


def _signed(value: float | None, cell: Estimate) -> str:
    assert value is not None
    if not cell.change:
        return charts.number(value, cell.percent)
    # The difference of two shares is no share of anything.
    return f"{100 * value:+.1f} points" if cell.percent else f"{value:+.3g}"


def _tone(cell: Estimate) -> str:
    """Coloured only when the interval, where known, leaves out zero."""
    low = cell.value if cell.low is None else cell.low
    high = cell.value if cell.high is None else cell.high
    return ' class="up"' if low > 0 else ' class="down"' if high < 0 else ""


def curve_sections(rows: Rows) -> Iterator[str]:
    drawn = [
        _chart(f"Validation {kind}", series, percent=kind == "accuracy")
        for kind in ("accuracy", "score")
        if (series := list(_validation_series(rows, kind)))
    ]
    shown = {**CHARTS, "Reward parts": _reward_parts(rows)}
    drawn += [
        _chart(title, _series(rows, metrics, DULL.get(title)), percent=title in PERCENT)
        for title, metrics in shown.items()
    ]
    if any(drawn):
        yield section("Curves by step", f'<div class="curves">{"".join(drawn)}</div>')
    if bar := charts.share_bar(_phase_seconds(rows)):
        yield section("Where the time went", f'<div class="card">{bar}</div>')


def _chart(title: str, series: Sequence[Series], *, percent: bool) -> str:
    series = [one for one in series if one.points]
    drawing = charts.line_chart(title, series, percent=percent)
    if not drawing:
        return ""
    names = charts.legend([one.name for one in series]) if len(series) > 1 else ""
    return f'<div class="card"><h3>{escape(title)}</h3>{drawing}{names}</div>'


def _points(rows: Rows, metric: str) -> list[Point]:
    return [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]


def _series(rows: Rows, metrics: Mapping[str, str], dull: float | None) -> list[Series]:
    series = [Series(name=label, points=_points(rows, name)) for name, label in metrics.items()]
    return [] if all(y == dull for one in series for _, y in one.points) else series


def _validation_series(rows: Rows, kind: str) -> Iterator[Series]:
    for name, leaf in validation_measures(rows):
        low, high = (f"val/{name}/{end}" for end in interval_of(leaf))
        band = [
            (row["step"], row[low], row[high])
            for row in rows
            if row.get(low) is not None and row.get(high) is not None
        ]
        if leaf.startswith(kind):
            label = name + leaf.removeprefix(kind)
            yield Series(name=label, points=_points(rows, f"val/{name}/{leaf}"), band=band)


def _reward_parts(rows: Rows) -> dict[str, str]:
    """The reward terms of this run, whatever they are called."""
    names = [name for row in rows for name in row if re.fullmatch(r"reward/[^/]+", name)]
    parts = {name: name.removeprefix("reward/") for name in names}
    return {name: label for name, label in parts.items() if label not in NOT_PARTS}


def _phase_seconds(rows: Rows) -> dict[str, float]:
    totals: dict[str, float] = {}
    for name, value in (item for row in rows for item in row.items()):
        if re.fullmatch(r"time/[^/]+", name) and isinstance(value, float | int):
            phase = name.removeprefix("time/")
            totals[phase] = totals.get(phase, 0.0) + value
    whole = totals.pop("step", 0.0)
    rest = whole - sum(totals.values())
    return totals | ({"other": rest} if totals and rest > 0.005 * whole else {})


def validation_measures(rows: Rows) -> list[tuple[str, str]]:
    """(set, accuracy or score), in order."""
    found = {MEASURE.fullmatch(name) for row in rows for name in row}
    return sorted({(match[1], match[2]) for match in found if match})


def interval_of(leaf: str) -> tuple[str, str]:
    """Metrics of its 95 % interval."""
    prefix = "" if leaf == "accuracy" else f"{leaf}_"
    return f"{prefix}ci_low", f"{prefix}ci_high"
