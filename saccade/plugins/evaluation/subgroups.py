"""`saccade subgroups FOLDER --by sex --by age:25,50,65`: accuracy by groups of the rows of an evaluation, with the gap
of each group to the best one; for answers that are lists of labels, measures of each label; and means of means, for
sets that a few large parts would dominate.

    >>> label_counts([({"edema"}, {"edema", "effusion"})])["effusion"]
    (0, 0, 1, 0)
    >>> group_of(70, (25.0, 50.0, 65.0))
    '65 and over'
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from saccade.errors import ConfigError
from saccade.plugins.evaluation.compare import evaluated
from saccade.plugins.reports.comparison import independent_difference
from saccade.plugins.reports.report_page import Cell, Estimate, Table
from saccade.plugins.verifiers.text_match import labels_in
from saccade.run.statistics import Interval, mean_interval

log = logging.getLogger(__name__)

Row = Mapping[str, Any]
Item = tuple[Sequence[Row], float]  # the answers to a question, and their mean score
UNKNOWN = "unknown"  # rows without a value; never taken for the best group
Counts = tuple[int, int, int, int]  # found and gold, found only, gold only, neither
MEASURES = ("precision", "recall", "specificity", "F1", "accuracy", "balanced")
WHOLE = "all"
FEW = 10  # items below which the mean of a group says little


def subgroup_tables(
    folder: Path, columns: Sequence[str], labels: bool = False, within: Sequence[str] = ()
) -> list[Table]:
    """A table for each set and column; with `labels` also one by label; with `within` also the mean of means over the
    parts that these columns name, the outermost first. A set without a column has no table for it.
    """
    sets: dict[str, list[Item]] = {}
    for (name, _), item in evaluated(folder).items():
        sets.setdefault(name, []).append(item)
    lacking = {by: _lacking(sets, by.partition(":")[0], "--by") for by in columns}
    inside = {column: _lacking(sets, column, "--within") for column in within}
    tables: list[Table] = []
    for name, own in sets.items():
        for by in columns:
            if name not in lacking[by]:
                tables.append(_group_table(name, by, own, labels, explained=bool(tables)))
        if within and not any(name in names for names in inside.values()):
            tables.append(_mean_of_means(name, own, within, labels))
        if labels:
            tables.append(_label_table(name, own))
    return tables


def _column(items: Sequence[Item], column: str) -> list[Any]:
    """The value of each item: from its row, or from the columns that came with its data (`extra`)."""
    return [rows[0].get(column, (rows[0].get("extra") or {}).get(column)) for rows, _ in items]


def _lacking(sets: Mapping[str, Sequence[Item]], column: str, flag: str) -> set[str]:
    """The sets in which no row has the column, with a warning; raises if that is all of them."""
    found = [name for name, items in sets.items() if all(value in (None, "") for value in _column(items, column))]
    lacks = f"{flag} {column}: no row of {', '.join(found)} has it"
    if len(found) == len(sets):
        known = sorted({name for items in sets.values() for rows, _ in items for name in rows[0].get("extra") or {}})
        raise ConfigError(f"{lacks}; rows have {', '.join(known) or 'no columns'}")
    if found:
        log.warning(lacks)
    return {*found}


# -- groups -----------------------------------------------------------------------------------------


def _group_table(name: str, by: str, items: Sequence[Item], labels: bool, *, explained: bool) -> Table:
    """`explained`: a table above says what a gap is."""
    column, _, written = by.partition(":")
    try:
        edges = tuple(sorted(float(edge) for edge in written.split(","))) if written else ()
    except ValueError:
        raise ConfigError(f"--by {by}: edges are numbers between commas, such as --by age:25,50,65") from None
    groups: dict[str, list[Item]] = {}
    values = _column(items, column)
    for value, item in zip(values, items, strict=True):
        groups.setdefault(group_of(value, edges), []).append(item)
    if groups.keys() == {UNKNOWN}:
        raise ConfigError(f"--by {by}: no row of {name} has a number there, but {values[0]!r}; try --by {column}")
    order = [group_of(edge, edges) for edge in (float("-inf"), *edges)] if edges else sorted(groups)
    ordered = {group: groups[group] for group in [*dict.fromkeys([*order, UNKNOWN])] if group in groups}
    rows = tuple(_cells(ordered, labels))
    means = [_mean(own) for group, own in groups.items() if group != UNKNOWN]
    note = f"Largest gap {max(means) - min(means):.3f}, standard deviation over groups {np.std(means):.3f}."
    if not explained:
        by_chance = "of few groups, one that leaves out 0 is hardly chance"
        note = f"The gap is that to the best group, with its interval; {by_chance}. {note}"
    note = note if len(means) > 1 else ""
    if small := sum(len(own) < FEW for own in groups.values()):
        note += f" {small} of {len(groups)} groups have less than {FEW} items: what they show may be chance."
    heads = (column, "items", "accuracy", "gap", *(["F1"] if labels else []))
    return Table(title=f"{name} by {column}", columns=heads, rows=rows, note=note)


def group_of(value: Any, edges: Sequence[float] = ()) -> str:
    """The group of a value: its text; with edges, the name of its interval, which includes the lower end."""
    if not edges:
        return UNKNOWN if value in (None, "") else str(value)
    try:
        number = float(value)
    except (TypeError, ValueError):
        return UNKNOWN
    if number != number:
        return UNKNOWN
    names = [f"under {edges[0]:g}", *(f"{low:g} to {high:g}" for low, high in pairwise(edges))]
    return [*names, f"{edges[-1]:g} and over"][sum(number >= edge for edge in edges)]


def _mean(items: Sequence[Item]) -> float:
    return float(np.mean([score for _, score in items]))


def _cells(groups: Mapping[str, Sequence[Item]], labels: bool) -> Iterator[tuple[Cell, ...]]:
    means = {name: _mean(items) for name, items in groups.items()}
    best = max((name for name in means if name != UNKNOWN), key=lambda name: means[name])
    ends = {name: mean_interval([score for _, score in items]) for name, items in groups.items()}
    for name, items in groups.items():
        gap, low, high = independent_difference(means[best], ends[best], means[name], ends[name])
        shown = None if name == best else Estimate(value=gap, low=low, high=high, change=True)
        accuracy = Estimate(value=means[name], low=ends[name].low, high=ends[name].high)
        found = [Estimate(value=_label_mean(items))] if labels else []
        yield name, Estimate(value=len(items), percent=False), accuracy, shown, *found


# -- means of means ---------------------------------------------------------------------------------


def _mean_of_means(name: str, items: Sequence[Item], within: Sequence[str], labels: bool) -> Table:
    """Each part has the same weight within its parent, whatever its size."""
    columns = [_column(items, column) for column in within]
    paths = [tuple(group_of(value) for value in values) for values in zip(*columns, strict=True)]
    rows: list[tuple[Cell, ...]] = []

    def part(path: tuple[str, ...]) -> tuple[float, Interval, float]:
        own = [item for item, its in zip(items, paths, strict=True) if its[: len(path)] == path]
        inner = sorted({its[len(path)] for its in paths if its[: len(path)] == path}) if len(path) < len(within) else []
        if inner:
            place = len(rows)
            found = [part((*path, one)) for one in inner]
            mean, f1 = (float(np.mean([one[n] for one in found])) for n in (0, 2))
            # Interval of a mean of independent parts: root of the summed squares of theirs, divided by their number.
            down, up = (
                float(np.sqrt(np.sum([(one[0] - one[1][end]) ** 2 for one in found]))) / len(found) for end in (0, 1)
            )
            ends = Interval(mean - down, mean + up)
        else:
            place, mean, ends = len(rows), _mean(own), mean_interval([score for _, score in own])
            f1 = _label_mean(own) if labels else 0.0
        cells: list[Cell] = [" > ".join(path) or WHOLE, Estimate(value=len(own), percent=False)]
        cells += [Estimate(value=mean, low=ends.low, high=ends.high), *([Estimate(value=f1)] if labels else [])]
        rows.insert(place, tuple(cells))
        return mean, ends, f1

    part(())
    heads = (" > ".join(within), "items", "accuracy", *(["F1"] if labels else []))
    note = f"Each number is the mean of those one step further in; over all rows it is {_mean(items):.3f}."
    return Table(title=f"{name}, means of means", columns=heads, rows=tuple(rows), note=note)


# -- labels -----------------------------------------------------------------------------------------


def label_counts(pairs: Iterable[tuple[set[str], set[str]]]) -> dict[str, Counts]:
    """Label -> counts over pairs of sets of labels (of an answer, of its gold)."""
    pairs = list(pairs)
    named = sorted({label for found, gold in pairs for label in found | gold})
    kinds = ((True, True), (True, False), (False, True), (False, False))
    return {
        label: tuple(sum((label in found, label in gold) == kind for found, gold in pairs) for kind in kinds)  # type: ignore[misc]
        for label in named
    }


def label_measures(counts: Counts) -> list[float]:
    """Values in the order of MEASURES. A share of no cases is 0, as is usual, such as the precision of a label that no
    answer names; but the specificity of a label that every gold has is NaN.
    """
    both, found, missed, neither = counts

    def share(part: float, rest: float) -> float:
        return part / (part + rest) if part + rest else 0.0

    recall, specificity = share(both, missed), share(neither, found) if neither + found else float("nan")
    f1, accuracy = share(both, (found + missed) / 2), share(both + neither, found + missed)
    return [share(both, found), recall, specificity, f1, accuracy, (recall + specificity) / 2]


def _pairs(items: Sequence[Item]) -> Iterator[tuple[set[str], set[str]]]:
    for row in (row for rows, _ in items for row in rows):
        given = row.get("gold") or ""
        gold = labels_in(", ".join(given) if isinstance(given, list) else str(given))
        yield labels_in(row.get("extracted") or ""), gold


def _label_mean(items: Sequence[Item]) -> float:
    """Macro F1: the mean over all labels."""
    found = [label_measures(counts)[MEASURES.index("F1")] for counts in label_counts(_pairs(items)).values()]
    return float(np.mean(found)) if found else 0.0


def _label_table(name: str, items: Sequence[Item]) -> Table:
    counts = label_counts(_pairs(items))
    if not counts:
        raise ConfigError(f"--labels: no row of {name} has labels; golds are lists such as edema, effusion")
    measures = {label: label_measures(own) for label, own in counts.items()}
    voted = any(len(rows) > 1 for rows, _ in items)
    heads = (*MEASURES, "AUROC") if voted else MEASURES  # with one answer it is the balanced accuracy
    if voted:
        measures = {label: [*own, _ranked(items, label)] for label, own in measures.items()}
    golds = {label: Estimate(value=both + missed, percent=False) for label, (both, _, missed, _) in counts.items()}
    every = np.array([*measures.values()])
    measures["mean of labels"] = [
        float(np.mean(own[~np.isnan(own)])) if (own == own).any() else own[0] for own in every.T
    ]
    cells = tuple(
        (label, golds.get(label), *(None if np.isnan(one) else Estimate(value=one) for one in own))
        for label, own in measures.items()
    )
    note = "AUROC ranks questions by the share of their answers that name the label." if voted else ""
    return Table(title=f"{name} by label", columns=("label", "golds", *heads), rows=cells, note=note)


def auroc(named: Sequence[float], others: Sequence[float]) -> float:
    """Probability that one of `named` is higher than one of `others`, ties counting half; NaN if either is empty."""
    if not (named and others):
        return float("nan")
    a, b = np.array(named)[:, None], np.array(others)
    return float(np.mean((a > b) + 0.5 * (a == b)))


def _ranked(items: Sequence[Item], label: str) -> float:
    shares: dict[bool, list[float]] = {True: [], False: []}
    for item in items:
        pairs = [*_pairs([item])]
        shares[label in pairs[0][1]].append(float(np.mean([label in found for found, _ in pairs])))
    return auroc(shares[True], shares[False])
