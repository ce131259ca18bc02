"""`saccade subgroups FOLDER --by sex`: an evaluation by groups of its rows, with the gap of each to the best one; and,
where answers are lists of labels, precision, recall and F1 of each label.

    >>> label_counts([({"edema"}, {"edema", "effusion"})])["effusion"]
    (0, 0, 1)
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from saccade.errors import ConfigError
from saccade.plugins.evaluation.compare import evaluated
from saccade.plugins.reports.comparison import independent_difference
from saccade.plugins.reports.report_page import Cell, Estimate, Table
from saccade.plugins.verifiers.text_match import labels_in
from saccade.run.statistics import mean_interval

Row = Mapping[str, Any]
UNKNOWN = "unknown"  # of rows that do not say; they are no group to compare with
Counts = tuple[int, int, int]  # found and gold, found only, gold only


def subgroup_tables(folder: Path, columns: Sequence[str], labels: bool = False) -> list[Table]:
    """For each set and column of its rows a table; with `labels` another one by label."""
    items = evaluated(folder)
    tables = []
    for name in dict.fromkeys(set for set, _ in items):
        own = [(rows, score) for (set, _), (rows, score) in items.items() if set == name]
        for column in columns:
            groups: dict[str, list[float]] = {}
            for rows, score in own:
                value = (rows[0].get("extra") or {}).get(column)
                groups.setdefault(UNKNOWN if value in (None, "") else str(value), []).append(score)
            if groups.keys() == {UNKNOWN}:
                known = sorted({column for rows, _ in own for column in rows[0].get("extra") or {}})
                raise ConfigError(
                    f"--by {column}: no row of {name} has it; rows have {', '.join(known) or 'no columns'}"
                )
            cells = tuple(_cells(dict(sorted(groups.items()))))
            note = "The gap is that to the best group, with its interval; one that leaves out 0 is no chance."
            tables.append(
                Table(title=f"{name} by {column}", columns=(column, "items", "accuracy", "gap"), rows=cells, note=note)
            )
        if labels:
            tables.append(_label_table(name, [row for rows, _ in own for row in rows]))
    return tables


def _cells(groups: Mapping[str, Sequence[float]]) -> Iterator[tuple[Cell, ...]]:
    means = {name: float(np.mean(scores)) for name, scores in groups.items()}
    best = max((name for name in means if name != UNKNOWN), key=lambda name: means[name])
    ends = {name: mean_interval(scores) for name, scores in groups.items()}
    for name, scores in groups.items():
        gap, low, high = independent_difference(means[best], ends[best], means[name], ends[name])
        shown = None if name == best else Estimate(value=gap, low=low, high=high, change=True)
        accuracy = Estimate(value=means[name], low=ends[name].low, high=ends[name].high)
        yield name, Estimate(value=len(scores), percent=False), accuracy, shown


# -- labels -----------------------------------------------------------------------------------------


def label_counts(pairs: Iterable[tuple[set[str], set[str]]]) -> dict[str, Counts]:
    """Of each label, over answers and golds as sets."""
    pairs = list(pairs)
    named = sorted({label for found, gold in pairs for label in found | gold})
    return {
        label: (
            sum(label in found and label in gold for found, gold in pairs),
            sum(label in found - gold for found, gold in pairs),
            sum(label in gold - found for found, gold in pairs),
        )
        for label in named
    }


def _label_table(name: str, rows: Sequence[Row]) -> Table:
    def gold(row: Row) -> set[str]:
        given = row.get("gold") or ""
        return labels_in(", ".join(given) if isinstance(given, list) else str(given))

    counts = label_counts((labels_in(row.get("extracted") or ""), gold(row)) for row in rows)
    if not counts:
        raise ConfigError(f"--labels: no row of {name} has labels; golds are lists such as edema, effusion")
    shares = {
        label: [both / n if n else 0.0 for n in (both + found, both + missed, both + (found + missed) / 2)]
        for label, (both, found, missed) in counts.items()
    }
    golds = {label: Estimate(value=both + missed, percent=False) for label, (both, _, missed) in counts.items()}
    shares["mean of labels"] = np.mean([*shares.values()], axis=0).tolist()
    cells = tuple((label, golds.get(label), *(Estimate(value=one) for one in own)) for label, own in shares.items())
    return Table(title=f"{name} by label", columns=("label", "golds", "precision", "recall", "F1"), rows=cells)
