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

from saccade.tracking.folder import TRAJECTORIES
from saccade.tracking.report import BESIDE_ACCURACY, episodes_of, write_report
from saccade.tracking.sections import Cell, Estimate, Table, interval_of
from saccade.tracking.trajectories import read_trajectories, stored_steps

RESULTS = "results.json"
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
    for key, (title, first) in TITLES.items():
        rows: Mapping[str, Mapping[str, float]] = found.get(key) or {}
        columns = _columns(rows)
        if rows:
            cells = [[label, *(_text(row, c) for c in columns)] for label, row in rows.items()]
            cells.insert(0, [first, *(LABELS.get(c, c) for c in columns)])
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            lines.append(f"{name}: {_kind(rows).lower()} {title}")
            lines += ["  " + "  ".join(map(str.rjust, row, widths)) for row in cells]
    return lines


def _columns(rows: Mapping[str, Mapping[str, float]]) -> list[str]:
    names = dict.fromkeys(name for row in rows.values() for name in row)
    return [n for n in names if not n.endswith(("ci_low", "ci_high")) and n != "score_items"]


def _kind(rows: Mapping[str, Mapping[str, Any]]) -> str:
    return "Accuracy" if any("accuracy" in row for row in rows.values()) else "Score"


def _text(row: Mapping[str, float], column: str) -> str:
    if column not in row:
        return ""
    if column in COUNTS:
        return f"{row[column]:g}" if column != "turns_mean" else f"{row[column]:.2f}"
    ends = [f"{row[end]:.3f}" for end in interval_of(column) if end in row]
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
    measures = sorted({n for found in results.values() for n in found if _is_measure(n)})
    rows = [
        (
            name,
            *(_cell(found, measure, measure == "accuracy") for measure in measures),
            *(_cell(found, n, percent) for n, (_, percent) in beside.items()),
            _cell(found, "items", percent=False),
        )
        for name, found in results.items()
    ]
    return Table(
        title=_kind(results),
        columns=("set", *measures, *(label for label, _ in beside.values()), "items"),
        rows=tuple(rows),
        note="Brackets hold 95 % intervals over the items of a set.",
    )


def _is_measure(name: str) -> bool:
    return name in ("accuracy", "score") or name.startswith("score/")


def _tables(name: str, found: Mapping[str, Any]) -> Iterator[Table]:
    for key, (title, first) in TITLES.items():
        rows: Mapping[str, Mapping[str, float]] = found.get(key) or {}
        columns = _columns(rows)
        if rows:
            yield Table(
                title=f"{_kind(rows)} {title}: {name}",
                columns=(first, *(LABELS.get(c, c) for c in columns)),
                rows=tuple(
                    (label, *(_cell(row, column, _is_share(column)) for column in columns))
                    for label, row in rows.items()
                ),
            )


def _is_share(column: str) -> bool:
    return column not in COUNTS and not column.startswith("score")


def _cell(row: Mapping[str, Any], name: str, percent: bool = True) -> Cell:
    if name not in row:
        return None
    low, high = (row.get(end) if _is_measure(name) else None for end in interval_of(name))
    return Estimate(value=row[name], low=low, high=high, percent=percent)
