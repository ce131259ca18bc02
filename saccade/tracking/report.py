"""report.html: what a run did, on one page that needs no network and runs no script.

Curves from metric rows, tables with intervals, rollouts with their pictures. Text of models and
data is escaped, and the page forbids scripts besides. Refuses to score anything: it shows numbers
that others made.

    from_run(Path("runs/quickstart"))
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any

import yaml

from saccade.errors import ConfigError
from saccade.statistics import Interval, independent_difference
from saccade.tracking import charts
from saccade.tracking.cards import rollout_cards
from saccade.tracking.charts import Point, Series
from saccade.tracking.episodes import write_episodes
from saccade.tracking.folder import CONFIG, MANIFEST, TRAJECTORIES
from saccade.tracking.loggers import read_metrics
from saccade.tracking.trajectories import read_trajectories, stored_steps

Rows = Sequence[Mapping[str, Any]]

TEMPLATE = Path(__file__).with_name("report.html")


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


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Which metrics share a chart; labels are in the order of the colours."""

    title: str
    metrics: Mapping[str, str]  # metric -> label
    percent: bool = False
    dull: float | None = None  # a chart that never leaves this value is left out


CHARTS: tuple[Chart, ...] = (
    Chart(
        title="Accuracy of training rollouts", metrics={"reward/accuracy": "accuracy"}, percent=True
    ),
    Chart(title="Reward", metrics={"reward/mean": "mean"}),
    Chart(
        title="Groups without signal",
        metrics={
            "group/dead_frac": "dead",
            "group/all_right_frac": "all right",
            "group/all_wrong_frac": "all wrong",
        },
        percent=True,
    ),
    Chart(title="SFT loss", metrics={"sft/loss": "loss"}),
    Chart(title="Preference loss", metrics={"dpo/loss": "loss"}),
    Chart(title="Pairs in the right order", metrics={"dpo/accuracy": "accuracy"}),
    Chart(
        title="Rewards of preferences",
        metrics={"dpo/reward_chosen": "chosen", "dpo/reward_rejected": "rejected"},
    ),
    Chart(title="Reward model: loss", metrics={"rm/loss": "loss"}),
    Chart(title="Reward model: judged right", metrics={"rm/accuracy": "accuracy"}, percent=True),
    Chart(
        title="Reward model: scores",
        metrics={"rm/chosen_mean": "chosen", "rm/rejected_mean": "rejected"},
    ),
    Chart(
        title="Response tokens",
        metrics={"length/response_mean": "mean", "length/response_p95": "95th percentile"},
    ),
    Chart(
        title="Cut responses",
        metrics={"length/truncated_frac": "truncated"},
        percent=True,
        dull=0.0,
    ),
    Chart(title="Gradient norm", metrics={"policy/grad_norm": "gradient norm"}),
    Chart(title="Learning rate", metrics={"policy/lr": "learning rate"}),
    Chart(title="Entropy", metrics={"policy/entropy": "entropy"}),
    Chart(title="KL to the reference", metrics={"policy/kl_ref": "KL"}),
    Chart(
        title="Clipped ratios",
        metrics={"policy/clip_frac_low": "low", "policy/clip_frac_high": "high"},
        percent=True,
    ),
    Chart(
        title="Engine against trainer (log-prob gap)",
        metrics={"mismatch/logp_gap_mean": "mean", "mismatch/logp_gap_max": "largest"},
    ),
    Chart(title="Turns", metrics={"turns/mean": "mean", "turns/max": "most"}, dull=1.0),
    Chart(
        title="Seconds per step",
        metrics={"time/step": "step", "time/rollout": "rollout", "time/update": "update"},
    ),
    Chart(title="Memory (GiB)", metrics={"mem/host_rss_gb": "host", "mem/gpu_peak_gb": "GPU peak"}),
)
NOT_PARTS = {"mean", "std", "min", "max", "accuracy", "abstain_rate", "error_rate", "clip_frac"}
BESIDE_ACCURACY = {
    "parse_rate": ("answer found", True),
    "think_rate": ("think block", True),
    "format": ("format", True),
    "truncated_frac": ("cut responses", True),
    "response_mean": ("response tokens", False),
}


def write_report(
    path: Path,
    *,
    title: str,
    subtitle: str = "",
    facts: Mapping[str, str] | None = None,
    curves: Mapping[str, Sequence[Point]] | Rows = (),
    tables: Sequence[Table] = (),
    rollouts: Iterable[Mapping[str, Any]] = (),
    pictures: Path | None = None,
    notes: Sequence[str] = (),
    appendix: Mapping[str, str] | None = None,
    links: Mapping[str, Path | None] | None = None,
) -> Path:
    """Write the page and return its path.

    `curves`: points by name, or rows of metrics. `rollouts`: records of `trajectories`, those of
    one sample in a row share a card. `pictures`: the folder that the files of these records are
    relative to. `facts`: tiles at the top. `appendix`: long texts, folded away. `links`: other
    pages beside this one.
    """
    body = [
        f"<header><h1>{escape(title)}</h1><p class='dim'>{escape(subtitle)}</p></header>",
        *(
            f'<p><a href="{page.name}">{escape(n)}</a></p>'
            for n, page in (links or {}).items()
            if page
        ),
        _tiles(facts or {}),
        _notes(notes),
        *(_table(table) for table in tables),
        *_curve_sections(curves),
        _section("Sample rollouts", rollout_cards(rollouts, pictures)),
        *(_folded(name, text) for name, text in (appendix or {}).items()),
    ]
    page = Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(title), body="\n".join(part for part in body if part)
    )
    path = Path(path)
    path.write_text(page, encoding="utf-8")
    return path


def from_run(folder: Path) -> Path:
    """The report of any run folder, from what it holds."""
    folder = Path(folder)
    if not (folder / CONFIG).exists():
        raise ConfigError(
            f"{folder} is no run folder: it has no {CONFIG}; name one such as runs/run"
        )
    rows = read_metrics(folder)
    config = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    began = manifest["starts"][0]["time"] if manifest.get("starts") else ""
    return write_report(
        folder / "report.html",
        title=folder.resolve().name,
        subtitle=f"saccade {manifest.get('command', '')} · {began.replace('T', ' ')[:16]} UTC",
        facts=run_facts(rows, config),
        curves=rows,
        tables=before_after(rows),
        rollouts=sample_rollouts(folder),
        pictures=folder / TRAJECTORIES,
        links={"Episodes turn by turn": episodes_of(folder)},
        appendix={
            "Configuration": (folder / CONFIG).read_text(encoding="utf-8"),
            "Manifest": json.dumps(manifest, indent=2, ensure_ascii=False),
        },
    )


# -- what a run has to say -------------------------------------------------------------------------


def run_facts(rows: Rows, config: Mapping[str, Any]) -> dict[str, str]:
    """Tiles: how good, how long, with what."""
    facts = {}
    for name in validation_sets(rows):
        first, last = _first_and_last(rows, f"val/{name}/accuracy")
        change = f"{100 * first:.1f} → " if first != last else ""
        facts[f"accuracy on {name}"] = f"{change}{charts.number(last, True)}"
    steps = [row["step"] for row in rows]
    seconds = sum(row.get("time/step") or 0.0 for row in rows)
    facts["steps"] = str(max(steps, default=0))
    if seconds:
        facts["training time"] = duration(seconds)
    facts["model"] = str(config["model"]["path"] or "—").rstrip("/").rsplit("/", 1)[-1]
    if any("reward/mean" in row for row in rows):
        facts["algorithm"] = str(config["algorithm"]["preset"])
    return facts


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def validation_sets(rows: Rows) -> list[str]:
    names = {name for row in rows for name in row if re.fullmatch(r"val/.+/accuracy", name)}
    return sorted(name.removeprefix("val/").removesuffix("/accuracy") for name in names)


def before_after(rows: Rows) -> list[Table]:
    """Each validation set the first and the last time it was measured; no table without any."""
    lines: list[tuple[Cell, ...]] = []
    steps = set()
    for name in validation_sets(rows):
        measured = [row for row in rows if row.get(f"val/{name}/accuracy") is not None]
        if measured:
            steps.add((measured[0]["step"], measured[-1]["step"]))
            lines += _compared(name, measured[0], measured[-1])
    if not lines:
        return []
    first, last = steps.pop() if len(steps) == 1 else ("first", "last")
    columns: tuple[str, ...] = ("set", "measure", f"step {last}")
    if first != last:
        columns = (*columns[:2], f"before (step {first})", f"after (step {last})", "change")
    shown = tuple(line[: len(columns)] for line in lines)
    note = "Brackets hold 95 % intervals over the items of a set."
    return [Table(title="Validation", columns=columns, rows=shown, note=note)]


def _compared(
    name: str, first: Mapping[str, Any], last: Mapping[str, Any]
) -> Iterator[tuple[Cell, ...]]:
    prefix = f"val/{name}/"
    low, high = f"{prefix}ci_low", f"{prefix}ci_high"
    before, after = (
        Estimate(value=row[f"{prefix}accuracy"], low=row.get(low), high=row.get(high))
        for row in (first, last)
    )
    yield name, "accuracy", before, after, _change(before, after)
    for metric, (label, percent) in BESIDE_ACCURACY.items():
        a, b = first.get(prefix + metric), last.get(prefix + metric)
        if a is not None and b is not None:
            pair = (Estimate(value=value, percent=percent) for value in (a, b))
            change = Estimate(value=b - a, percent=percent, change=True, tone=False)
            yield None, label, *pair, change


def _change(before: Estimate, after: Estimate) -> Estimate:
    if before.low is None or before.high is None or after.low is None or after.high is None:
        return Estimate(value=after.value - before.value, change=True)
    intervals = Interval(before.low, before.high), Interval(after.low, after.high)
    change = independent_difference(before.value, intervals[0], after.value, intervals[1])
    return Estimate(value=change.mean, low=change.low, high=change.high, change=True)


def sample_rollouts(folder: Path, samples: int = 8, members: int = 4) -> list[dict[str, Any]]:
    """Records to show, in stored order so that nothing is picked by its score.

    Of the first validation set the first and the last answer to the same questions, then groups of
    the last training step that was stored.
    """
    chosen: list[dict[str, Any]] = []
    stored = stored_steps(folder)
    sets = [kind for kind in stored if kind != "train"]
    if sets:
        steps = sorted({stored[sets[0]][0], stored[sets[0]][-1]})
        by_step = [{r["id"]: r for r in read_trajectories(folder, sets[0], step)} for step in steps]
        shared = [key for key in by_step[-1] if all(key in records for records in by_step)]
        chosen += [records[key] for key in shared[:samples] for records in by_step]
    if "train" in stored:
        records = read_trajectories(folder, "train", stored["train"][-1])
        groups = [list(group) for _, group in groupby(records, key=lambda record: record["group"])]
        chosen += [record for group in groups[: max(1, samples // 2)] for record in group[:members]]
    return chosen


def episodes_of(folder: Path) -> Path | None:
    """The page of the stored episodes, those of each set and of training at their last step."""
    stored = stored_steps(folder)
    records = (r for kind in stored for r in read_trajectories(folder, kind, stored[kind][-1]))
    return write_episodes(folder / "episodes.html", records, folder / TRAJECTORIES)


def _first_and_last(rows: Rows, name: str) -> tuple[float, float]:
    values = [row[name] for row in rows if row.get(name) is not None] or [math.nan]
    return values[0], values[-1]


# -- sections --------------------------------------------------------------------------------------


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def _tiles(facts: Mapping[str, str]) -> str:
    tiles = "".join(
        f'<div class="card tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in facts.items()
    )
    return f'<div class="tiles">{tiles}</div>' if tiles else ""


def _notes(notes: Sequence[str]) -> str:
    lines = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return f'<div class="card notes">{lines}</div>' if lines else ""


def _folded(name: str, text: str) -> str:
    summary = f"<summary>{escape(name)}</summary>"
    return f'<details class="card">{summary}<pre>{escape(text)}</pre></details>'


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in table.rows)
    note = f'<p class="dim small">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<section><h2>{escape(table.title)}</h2><div class="card"><div class="scroll">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{note}</div></section>"
    )


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


def _curve_sections(curves: Mapping[str, Sequence[Point]] | Rows) -> Iterator[str]:
    if isinstance(curves, Mapping):
        drawn = [
            _chart(name, [Series(name=name, points=points)]) for name, points in curves.items()
        ]
    else:
        validation = [_validation_series(curves, name) for name in validation_sets(curves)]
        drawn = [_chart("Validation accuracy", validation, percent=True)]
        drawn += [
            _chart(chart.title, _series(curves, chart), percent=chart.percent)
            for chart in (*CHARTS[:2], _parts_chart(curves), *CHARTS[2:])
        ]
    drawn = [chart for chart in drawn if chart]
    if drawn:
        yield _section("Curves by step", f'<div class="curves">{"".join(drawn)}</div>')
    if not isinstance(curves, Mapping) and (bar := charts.share_bar(_phase_seconds(curves))):
        yield _section("Where the time went", f'<div class="card">{bar}</div>')


def _chart(title: str, series: Sequence[Series], percent: bool = False) -> str:
    series = [one for one in series if one.points]
    drawing = charts.line_chart(title, series, percent=percent)
    if not drawing:
        return ""
    names = charts.legend([one.name for one in series]) if len(series) > 1 else ""
    return f'<div class="card"><h3>{escape(title)}</h3>{drawing}{names}</div>'


def _points(rows: Rows, metric: str) -> list[Point]:
    return [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]


def _series(rows: Rows, chart: Chart) -> list[Series]:
    series = [
        Series(name=label, points=_points(rows, name)) for name, label in chart.metrics.items()
    ]
    return [] if all(y == chart.dull for one in series for _, y in one.points) else series


def _validation_series(rows: Rows, name: str) -> Series:
    accuracy, low, high = (f"val/{name}/{leaf}" for leaf in ("accuracy", "ci_low", "ci_high"))
    band = [
        (row["step"], row[low], row[high])
        for row in rows
        if row.get(low) is not None and row.get(high) is not None
    ]
    return Series(name=name, points=_points(rows, accuracy), band=band)


def _parts_chart(rows: Rows) -> Chart:
    """The reward terms of this run, whatever they are called."""
    names = dict.fromkeys(
        name for row in rows for name in row if re.fullmatch(r"reward/[^/]+", name)
    )
    parts = {name: name.removeprefix("reward/") for name in names}
    return Chart(
        title="Reward parts",
        metrics={name: label for name, label in parts.items() if label not in NOT_PARTS},
    )


def _phase_seconds(rows: Rows) -> dict[str, float]:
    totals: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if re.fullmatch(r"time/[^/]+", name) and isinstance(value, float | int):
                totals[name.removeprefix("time/")] = (
                    totals.get(name.removeprefix("time/"), 0.0) + value
                )
    whole = totals.pop("step", 0.0)
    rest = whole - sum(totals.values())
    return totals | ({"other": rest} if totals and rest > 0.005 * whole else {})
