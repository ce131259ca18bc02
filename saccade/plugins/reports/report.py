"""The report of a run folder: how good, how long, with what, and what it said.

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
from saccade.plugins.reports.curves import Rows, charts_of, phase_seconds
from saccade.plugins.reports.diagnosis import diagnose
from saccade.plugins.reports.episodes import stored_episodes
from saccade.plugins.reports.report_page import Cell, Estimate, Report, Table, write_report
from saccade.run.folder import CONFIG, MANIFEST
from saccade.run.loggers import read_metrics
from saccade.run.metrics import MEASURE, interval_of, validation_measures
from saccade.run.statistics import Interval, independent_difference

INTERVALS = "Brackets hold 95 % intervals over the items of a set."
BESIDE_ACCURACY = {  # metric -> label, whether it is a share
    "parse_rate": ("answer found", True),
    "think_rate": ("think block", True),
    "format": ("format", True),
    "truncated_frac": ("cut responses", True),
    "response_mean": ("response tokens", False),
}


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
