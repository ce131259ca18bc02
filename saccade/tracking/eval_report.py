"""What an evaluation found, for the terminal and as report.html: accuracy of each set, then by
limit of turns, by turns that were used and by category where there are such tables.

    print("\n".join(table_lines("vstar", results["vstar"])))
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from saccade.tracking.folder import TRAJECTORIES
from saccade.tracking.report import BESIDE_ACCURACY, episodes_of, write_report
from saccade.tracking.sections import Cell, Estimate, Table
from saccade.tracking.trajectories import read_trajectories, stored_steps

RESULTS = "results.json"
TITLES = {
    "by_limit": ("Accuracy by limit of turns", "limit"),
    "by_turns": ("Accuracy by turns that were used", "turns used"),
    "by_category": ("Accuracy by category", "category"),
}
LABELS = {"overturn_frac": "cut off", "turns_mean": "turns", "all_rotations": "all rotations"}
COUNTS = ("items", "episodes", "turns_mean")  # numbers that are no shares
INTERVAL = ("ci_low", "ci_high")


def table_lines(name: str, found: Mapping[str, Any]) -> list[str]:
    """The tables of one set as lines of text."""
    lines = []
    for key, (title, first) in TITLES.items():
        rows: Mapping[str, Mapping[str, float]] = found.get(key) or {}
        columns = _columns(rows)
        if rows:
            cells = [[label, *(_text(row, c) for c in columns)] for label, row in rows.items()]
            cells.insert(0, [first, *(LABELS.get(c, c) for c in columns)])
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            lines.append(f"{name}: {title.lower()}")
            lines += ["  " + "  ".join(map(str.rjust, row, widths)) for row in cells]
    return lines


def _columns(rows: Mapping[str, Mapping[str, float]]) -> list[str]:
    names = dict.fromkeys(name for row in rows.values() for name in row)
    return [name for name in names if name not in INTERVAL]


def _text(row: Mapping[str, float], column: str) -> str:
    if column not in row:
        return ""
    if column in COUNTS:
        return f"{row[column]:g}" if column != "turns_mean" else f"{row[column]:.2f}"
    ends = [f"{row[end]:.3f}" for end in INTERVAL if column == "accuracy" and end in row]
    return f"{row[column]:.3f}" + (f" [{', '.join(ends)}]" if ends else "")


def write_eval_report(folder: Path) -> Path:
    """From what an evaluation left in its folder."""
    results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    stored = stored_steps(folder)
    rollouts = [r for kind in stored for r in read_trajectories(folder, kind, stored[kind][-1])]
    return write_report(
        folder / "report.html",
        title=folder.resolve().name,
        subtitle="saccade eval",
        tables=[_summary(results), *(t for n, found in results.items() for t in _tables(n, found))],
        rollouts=rollouts[:16],
        pictures=folder / TRAJECTORIES,
        links={"Episodes turn by turn": episodes_of(folder)},
    )


def _summary(results: Mapping[str, Mapping[str, Any]]) -> Table:
    beside = {
        n: about for n, about in BESIDE_ACCURACY.items() if any(n in m for m in results.values())
    }
    rows = [
        (
            name,
            _cell(found, "accuracy"),
            *(_cell(found, n, percent) for n, (_, percent) in beside.items()),
            _cell(found, "items", percent=False),
        )
        for name, found in results.items()
    ]
    return Table(
        title="Accuracy",
        columns=("set", "accuracy", *(label for label, _ in beside.values()), "items"),
        rows=tuple(rows),
        note="Brackets hold 95 % intervals over the items of a set.",
    )


def _tables(name: str, found: Mapping[str, Any]) -> Iterator[Table]:
    for key, (title, first) in TITLES.items():
        rows: Mapping[str, Mapping[str, float]] = found.get(key) or {}
        columns = _columns(rows)
        if rows:
            yield Table(
                title=f"{title}: {name}",
                columns=(first, *(LABELS.get(c, c) for c in columns)),
                rows=tuple(
                    (label, *(_cell(row, column, column not in COUNTS) for column in columns))
                    for label, row in rows.items()
                ),
            )


def _cell(row: Mapping[str, Any], name: str, percent: bool = True) -> Cell:
    if name not in row:
        return None
    low, high = (row.get(end) if name == "accuracy" else None for end in INTERVAL)
    return Estimate(value=row[name], low=low, high=high, percent=percent)
