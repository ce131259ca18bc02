"""The report of a run folder: how good, how long, with what, and what it said; and of an evaluation,
also as tables for the terminal.

from_run(Path("runs/quickstart"))
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from saccade.errors import ConfigError
from saccade.plugins.reports.comparison import independent_difference
from saccade.plugins.reports.curves import Rows, charts_of, phase_seconds
from saccade.plugins.reports.diagnosis import diagnose
from saccade.plugins.reports.episodes import stored_episodes
from saccade.plugins.reports.report_page import Cell, Estimate, Report, Table, write_report
from saccade.run.folder import CONFIG, MANIFEST, RESULTS
from saccade.run.loggers import read_metrics
from saccade.run.metrics import MEASURE, interval_of, validation_measures
from saccade.run.statistics import Interval

INTERVALS = "Brackets hold 95 % intervals over the items of a set."
BESIDE_ACCURACY = {  # metric -> label, whether it is a share
    "parse_rate": ("answer found", True),
    "think_rate": ("think block", True),
    "format": ("format", True),
    "truncated_frac": ("cut responses", True),
    "response_mean": ("response tokens", False),
}
TITLES = {
    "by_limit": ("by limit of turns", "limit"),
    "by_turns": ("by turns that were used", "turns used"),
    "by_category": ("by category", "category"),
    "by_source": ("by source", "source"),
}
LABELS = {"overturn_frac": "cut off", "turns_mean": "turns", "all_rotations": "all rotations"}
COUNTS = ("items", "episodes", "turns_mean")  # numbers that are no shares


def from_run(folder: Path) -> Path:
    """Write report.html of any run folder and return its path."""
    folder = Path(folder)
    if not (folder / CONFIG).exists():
        raise ConfigError(f"{folder} is no run folder: it has no {CONFIG}; name one such as runs/run")
    rows = read_metrics(folder)
    text = (folder / CONFIG).read_text(encoding="utf-8")
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    began = manifest["starts"][0]["time"] if manifest.get("starts") else ""
    report = Report(
        title=folder.resolve().name,
        subtitle=f"saccade {manifest.get('command', '')} · {began.replace('T', ' ')[:16]} UTC",
        facts=run_facts(rows, yaml.safe_load(text)),
        notes=list(diagnose(rows).values()),
        tables=before_after(rows),
        charts=charts_of(rows),
        phases=phase_seconds(rows),
        episodes=stored_episodes(folder),
        texts={"Configuration": text, "Manifest": json.dumps(manifest, indent=2, ensure_ascii=False)},
    )
    return write_report(folder / "report.html", report)


def run_facts(rows: Rows, config: Mapping[str, Any]) -> dict[str, str]:
    """Tiles: how good, how long, with what."""
    facts = {}
    names = dict.fromkeys(name for row in rows for name in row)
    for name, leaf in validation_measures(names):
        values = [_shown(row, f"val/{name}/{leaf}") for row in rows]
        values = [value for value in values if value]
        if values:
            facts[f"{leaf} on {name}"] = " → ".join(dict.fromkeys([values[0], values[-1]]))
    measures = [name for name in names if MEASURE.fullmatch(name)]
    measures.sort(key=lambda name: not name.endswith("/accuracy"))
    best = config.get("save", {}).get("best_metric") or next(iter(measures), "")
    tried = [row for row in rows if row["step"] > 0 and row.get(best) is not None]
    if tried:
        top = max(tried, key=lambda row: row[best])
        facts["best step"] = f"{top['step']} ({_shown(top, best)})"
    facts["steps"] = str(max((row["step"] for row in rows), default=0))
    if seconds := sum(row.get("time/step") or 0.0 for row in rows):
        facts["training time"] = duration(seconds)
    facts["model"] = str(config["model"]["path"] or "—").rstrip("/").rsplit("/", 1)[-1]
    if "reward/mean" in names:
        presets = config["algorithm"]["preset"]
        facts["algorithm"] = presets if isinstance(presets, str) else " + ".join(presets or ())
    return facts


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def before_after(rows: Rows) -> list[Table]:
    """Each validation set the first and the last time it was measured; no table without any."""
    lines: list[tuple[Cell, ...]] = []
    steps = set()
    measures = validation_measures({name for row in rows for name in row})
    for name, pairs in groupby(measures, key=lambda pair: pair[0]):
        leaves = [leaf for _, leaf in pairs]
        measured = [r for r in rows if any(r.get(f"val/{name}/{n}") is not None for n in leaves)]
        if measured:
            steps.add((measured[0]["step"], measured[-1]["step"]))
            lines += _compared(name, leaves, measured[0], measured[-1])
    if not lines:
        return []
    first, last = steps.pop() if len(steps) == 1 else ("first", "last")
    columns: tuple[str, ...] = ("set", "measure", f"step {last}")
    if first != last:
        columns = (*columns[:2], f"before (step {first})", f"after (step {last})", "change")
    shown = tuple(line[: len(columns)] for line in lines)
    return [Table(title="Validation", columns=columns, rows=shown, note=INTERVALS)]


def estimate(row: Mapping[str, Any], name: str, percent: bool, prefix: str = "") -> Estimate | None:
    """A metric as a cell, with its interval where the row has one."""
    if row.get(prefix + name) is None:
        return None
    low, high = (row.get(prefix + end) for end in interval_of(name))
    return Estimate(value=row[prefix + name], low=low, high=high, percent=percent)


def _compared(
    name: str, leaves: Sequence[str], first: Mapping[str, Any], last: Mapping[str, Any]
) -> Iterator[tuple[Cell, ...]]:
    shares = {leaf: (leaf, leaf == "accuracy") for leaf in leaves} | BESIDE_ACCURACY
    for metric, (label, percent) in shares.items():
        a, b = (estimate(row, metric, percent, f"val/{name}/") for row in (first, last))
        if metric in leaves:
            yield name, label, a, b, _change(a, b, tone=True)
        elif a and b:
            yield None, label, a, b, _change(a, b, tone=False)


def _change(before: Estimate | None, after: Estimate | None, tone: bool) -> Estimate | None:
    if before is None or after is None:
        return None
    change = Estimate(value=after.value - before.value, percent=after.percent, change=True, tone=tone)
    if before.low is None or before.high is None or after.low is None or after.high is None:
        return change
    a, b = Interval(before.low, before.high), Interval(after.low, after.high)
    _, low, high = independent_difference(before.value, a, after.value, b)
    return replace(change, low=low, high=high)


def _shown(row: Mapping[str, Any], metric: str) -> str:
    value = row.get(metric)
    if value is None:
        return ""
    return f"{100 * value:.1f}\u00a0%" if metric.endswith("/accuracy") else f"{value:.4g}"


# -- evaluations -----------------------------------------------------------------------------------


def table_lines(name: str, found: Mapping[str, Any]) -> list[str]:
    """The tables of one set as lines of text."""
    lines = []
    for table in _tables(name, found):
        cells = [table.columns, *([_text(cell) for cell in row] for row in table.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines.append(table.title)
        lines += ["  " + "  ".join(map(str.rjust, row, widths)) for row in cells]
    return lines


def _text(cell: Cell) -> str:
    if not isinstance(cell, Estimate):
        return cell or ""
    if not cell.percent and cell.low is None:
        return f"{cell.value:.3f}".rstrip("0").rstrip(".")
    interval = "" if cell.low is None else f" [{cell.low:.3f}, {cell.high:.3f}]"
    return f"{cell.value:.3f}{interval}"


def write_eval_report(folder: Path) -> Path:
    """From what an evaluation left in its folder."""
    results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    report = Report(
        title=folder.resolve().name,
        subtitle="saccade eval",
        tables=[_summary(results), *(t for n, found in results.items() for t in _tables(n, found))],
        episodes=stored_episodes(folder),
    )
    return write_report(folder / "report.html", report)


def _summary(results: Mapping[str, Mapping[str, Any]]) -> Table:
    there = {name for found in results.values() for name in found}
    shares = [n for n in sorted(there) if n == "accuracy" or "@" in n or n == "all_rotations"]
    scores = [n for n in sorted(there) if n == "score" or n.startswith("score/")]
    columns = {n: (LABELS.get(n, n), True) for n in shares} | {n: (n, False) for n in scores}
    columns |= {n: about for n, about in BESIDE_ACCURACY.items() if n in there}
    columns["items"] = ("items", False)
    return Table(
        title=_kind(results),
        columns=("set", *(label for label, _ in columns.values())),
        rows=tuple(
            (name, *(estimate(found, n, percent) for n, (_, percent) in columns.items()))
            for name, found in results.items()
        ),
        note=INTERVALS,
    )


def _tables(name: str, found: Mapping[str, Any]) -> Iterator[Table]:
    for key, (title, first) in TITLES.items():
        rows: Mapping[str, Mapping[str, float]] = found.get(key) or {}
        names = dict.fromkeys(name for row in rows.values() for name in row)
        ends = ("ci_low", "ci_high", "score_items")
        columns = {  # whether each is a share
            n: n not in COUNTS and not n.startswith("score") for n in names if not n.endswith(ends)
        }
        if rows:
            yield Table(
                title=f"{name}: {_kind(rows).lower()} {title}",
                columns=(first, *(LABELS.get(c, c) for c in columns)),
                rows=tuple(
                    (label, *(estimate(row, c, share) for c, share in columns.items())) for label, row in rows.items()
                ),
            )


def _kind(rows: Mapping[str, Mapping[str, Any]]) -> str:
    return "Accuracy" if any("accuracy" in row for row in rows.values()) else "Score"
