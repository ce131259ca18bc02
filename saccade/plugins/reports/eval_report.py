"""What an evaluation found, for the terminal and as report.html: accuracy or score of each set,
then by limit of turns, by turns that were used, by category and by source where there are such
tables.

    print("\n".join(table_lines("vstar", results["vstar"])))
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from saccade.plugins.reports.episodes import stored_episodes
from saccade.plugins.reports.report import BESIDE_ACCURACY, INTERVALS, estimate
from saccade.plugins.reports.report_page import Cell, Estimate, Report, Table, write_report
from saccade.run.folder import RESULTS

TITLES = {
    "by_limit": ("by limit of turns", "limit"),
    "by_turns": ("by turns that were used", "turns used"),
    "by_category": ("by category", "category"),
    "by_source": ("by source", "source"),
}
LABELS = {"overturn_frac": "cut off", "turns_mean": "turns", "all_rotations": "all rotations"}
COUNTS = ("items", "episodes", "turns_mean")  # numbers that are no shares


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
