"""The report of an evaluation: its model, results and tables; the tables also as lines for the terminal.

write_eval_report(Path("runs/run-eval"))
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from saccade.plugins.reports import report
from saccade.plugins.reports.report_page import Cell, Estimate, Report, Table
from saccade.run.folder import MANIFEST, RESULTS

PUBLISHED = {  # further metrics of some sets, and checks for what inflates a score
    "section_mean": ("mean of sections", True),
    "strict": ("strict", True),
    "loose": ("loose", True),
    "sight_gain": ("sight gain", True),
    "accuracy_unseen": ("accuracy, not trained on", True),
    "leaked_pictures": ("leaked pictures", False),
    "leaked_questions": ("leaked questions", False),
}
TITLES = {
    "by_limit": ("by limit of turns", "limit"),
    "by_turns": ("by turns that were used", "turns used"),
    "by_category": ("by category", "category"),
    "by_source": ("by source", "source"),
    "by_k": ("by number of answers", "k"),
}
LABELS = {"overturn_frac": "cut off", "turns_mean": "turns", "all_rotations": "all rotations"}
COUNTS = ("items", "episodes", "turns_mean")  # numbers that are no shares
BESIDE_COLUMNS = ("ci_low", "ci_high", "score_items")  # metrics without a column of their own


def table_lines(name: str, found: Mapping[str, Any]) -> list[str]:
    """The tables of one set as lines of text; of `by_k` only the powers of two and the last k."""
    ks = found.get("by_k") or {}
    shown = {k: row for k, row in ks.items() if int(k).bit_count() == 1 or k == [*ks][-1]}
    found = {**found, "by_k": shown}
    return [line for table in _tables(name, found) for line in text_table(table)]


def text_table(table: Table) -> list[str]:
    cells = [table.columns, *([_text(cell) for cell in row] for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [table.title, *("  " + "  ".join(map(str.rjust, row, widths)) for row in cells)]


def _text(cell: Cell) -> str:
    if not isinstance(cell, Estimate):
        return cell or ""
    if not cell.percent and cell.low is None:
        return f"{cell.value:.3f}".rstrip("0").rstrip(".")
    interval = "" if cell.low is None else f" [{cell.low:.3f}, {cell.high:.3f}]"
    return f"{cell.value:{'+' if cell.change else ''}.3f}{interval}"


def write_eval_report(folder: Path) -> Path:
    """Write report.html from the files of an evaluation and return its path."""
    return report.write_with_episodes(folder, eval_report(folder))


def eval_report(folder: Path) -> Report:
    """The report of an evaluation, without its episodes."""
    said: list[str] = []
    results, manifest = read_results(folder, said.append), read_facts(folder, said.append)
    return Report(
        title=folder.resolve().name,
        subtitle=report.subtitle_of(manifest, "eval"),
        facts=what_answered(manifest),
        left_out=said,
        notes=unfinished(results, manifest),
        texts=report.texts_of(folder, manifest),
        tables=[_summary(results), *(t for n, found in results.items() for t in _tables(n, found))],
    )


def read_facts(folder: Path, say: Callable[[str], object]) -> dict[str, Any]:
    """The manifest of an evaluation; empty for those of earlier versions, which have none."""
    return report.read_file(folder / MANIFEST, json.loads, say) if (folder / MANIFEST).exists() else {}


def unfinished(results: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[str]:
    """A line about the sets that are not done, if there are some."""
    missing = ", ".join(one["name"] for one in manifest.get("sets", ()) if one["name"] not in results)
    return [f"not finished: there are no results of {missing} yet."] * bool(missing)


def what_answered(manifest: Mapping[str, Any]) -> dict[str, str]:
    """The model of an evaluation, its prompt and its sampling, as tiles."""
    found = manifest.get("answers")
    return {str(name): str(value) for name, value in found.items() if value} if isinstance(found, Mapping) else {}


def read_results(folder: Path, say: Callable[[str], object]) -> dict[str, Any]:
    """The results of each set."""
    return report.read_file(folder / RESULTS, lambda text: report.named_sections(json.loads(text)), say)


def _summary(results: Mapping[str, Mapping[str, Any]]) -> Table:
    there = {name for found in results.values() for name in found}
    shares = [n for n in sorted(there) if n == "accuracy" or "@" in n or n == "all_rotations"]
    scores = [n for n in sorted(there) if n == "score" or n.startswith("score/")]
    columns = {n: (LABELS.get(n, n), True) for n in shares} | {n: (n, False) for n in scores}
    columns |= {n: about for n, about in (PUBLISHED | report.BESIDE_ACCURACY).items() if n in there}
    columns["items"] = ("items", False)
    return report.with_note(_table(_kind(results), "set", results, columns))


def _tables(name: str, found: Mapping[str, Any]) -> Iterator[Table]:
    for key, (title, first) in TITLES.items():
        rows: Mapping[str, Mapping[str, float]] = found.get(key) or {}
        names = dict.fromkeys(n for row in rows.values() for n in row if not n.endswith(BESIDE_COLUMNS))
        columns = {n: (LABELS.get(n, n), n not in COUNTS and not n.startswith("score")) for n in names}
        if rows:
            yield _table(f"{name}: {_kind(rows).lower()} {title}", first, rows, columns)


def _table(title: str, first: str, rows: Mapping[str, Any], columns: Mapping[str, tuple[str, bool]]) -> Table:
    """Rows by their name; columns by metric: the label, and whether it is a share."""
    shares = {n: share for n, (_, share) in columns.items()}
    cells = ((name, *(report.estimate(row, n, share) for n, share in shares.items())) for name, row in rows.items())
    return Table(title=title, columns=(first, *(label for label, _ in columns.values())), rows=tuple(cells))


def _kind(rows: Mapping[str, Mapping[str, Any]]) -> str:
    return "Accuracy" if any("accuracy" in row for row in rows.values()) else "Score"
