"""How much boxes overlap, in numbers between 0 and 1. Boxes are in one frame already.

>>> one, other = Found((0, 0, 10, 10)), Found((5, 0, 15, 10))
>>> round(overlap([other], [one], MODES["iou"]), 4)
0.3333
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from saccade.plugins.verifiers.boxes import Box, Found

THRESHOLDS = [0.5 + 0.05 * step for step in range(10)]  # of mean average precision

Compare = Callable[[Sequence[Found], Sequence[Found]], float]


def overlap(found: Sequence[Found], gold: Sequence[Found], compare: Compare) -> float:
    """1 where both are empty and 0 where one is."""
    return compare(found, gold) if found and gold else float(not found and not gold)


def pair(a: Box, b: Box) -> tuple[float, float]:
    """IoU and generalised IoU."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(0.0, width) * max(0.0, height)
    union = _area(a) + _area(b) - shared
    hull = (max(a[2], b[2]) - min(a[0], b[0])) * (max(a[3], b[3]) - min(a[1], b[1]))
    if not (_area(a) and _area(b)):
        return 0.0, -1.0
    return shared / union, shared / union - (hull - union) / hull


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def _table(found: Sequence[Found], gold: Sequence[Found]) -> np.ndarray:
    return np.array([[pair(f.box, g.box)[0] for g in gold] for f in found])


def matched(found: Sequence[Found], gold: Sequence[Found]) -> float:
    """The best one-to-one matching: sum of IoU over the larger number of boxes."""
    return _assignment(_table(found, gold)) / max(len(found), len(gold))


def _assignment(gains: np.ndarray) -> float:
    """The largest sum with one entry per row and column: shortest augmenting paths."""
    gains = gains if gains.shape[0] <= gains.shape[1] else gains.T
    rows, columns = gains.shape
    costs = np.zeros((rows + 1, columns + 1))
    costs[1:, 1:] = -gains
    over_rows, over_columns = np.zeros(rows + 1), np.zeros(columns + 1)
    owner = np.zeros(columns + 1, int)  # row of each column; 0: none
    for row in range(1, rows + 1):
        owner[0], column = row, 0
        least, came = np.full(columns + 1, np.inf), np.zeros(columns + 1, int)
        done = np.zeros(columns + 1, bool)
        while owner[column]:
            done[column], here = True, owner[column]
            reduced = costs[here] - over_rows[here] - over_columns
            better = ~done & (reduced < least)
            least[better], came[better] = reduced[better], column
            best = int(np.argmin(np.where(done, np.inf, least)))
            step = least[best]
            over_rows[owner[done]] += step
            over_columns[done] -= step
            least[~done] -= step
            column = best
        while column:
            owner[column], column = owner[came[column]], int(came[column])
    taken = [(owner[column] - 1, column - 1) for column in range(1, columns + 1) if owner[column]]
    return float(sum(gains[row, column] for row, column in taken))


def mean_precision(found: Sequence[Found], gold: Sequence[Found]) -> float:
    """Average precision over thresholds 0.5, 0.55 … 0.95, the mean over the labels of the gold.
    Boxes rank by score, else as they were written; without labels all are of one kind.
    """
    labelled = all(item.label for item in gold)
    kinds = sorted({_kind(item, labelled) for item in gold})
    return float(
        np.mean(
            [
                _precision(
                    [f for f in found if _kind(f, labelled) == kind],
                    [g for g in gold if _kind(g, labelled) == kind],
                    threshold,
                )
                for kind in kinds
                for threshold in THRESHOLDS
            ]
        )
    )


def _kind(item: Found, labelled: bool) -> str:
    return (item.label or "").strip().casefold() if labelled else ""


def _precision(found: Sequence[Found], gold: Sequence[Found], threshold: float) -> float:
    if not found:
        return 0.0
    ranked = sorted(found, key=lambda f: -(f.score if f.score is not None else 0.0))
    table, free = _table(ranked, gold), np.ones(len(gold), bool)
    hits = np.zeros(len(ranked))
    for index, row in enumerate(table):
        best = int(np.argmax(np.where(free, row, -1.0)))
        if free[best] and row[best] >= threshold:
            hits[index], free[best] = 1, False
    precision = np.cumsum(hits) / np.arange(1, len(hits) + 1)
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    return float((envelope * hits).sum() / len(gold))


MODES: dict[str, Compare] = {
    "iou": lambda found, gold: pair(found[0].box, gold[0].box)[0],
    "giou": lambda found, gold: (pair(found[0].box, gold[0].box)[1] + 1) / 2,
    "set": matched,
    "map": mean_precision,
}


def covered(boxes: Sequence[Box], mask: np.ndarray, size: tuple[float, float] | None = None) -> float:
    """IoU of the union of boxes and a mask, whose picture may be of another `size`."""
    rows, columns = mask.shape
    width, height = size or (columns, rows)
    drawn = np.zeros_like(mask)
    for x0, y0, x1, y1 in boxes:
        left, right = (round(x * columns / width) for x in (x0, x1))
        top, bottom = (round(y * rows / height) for y in (y0, y1))
        drawn[max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)] = True
    union = int((drawn | mask).sum())
    return int((drawn & mask).sum()) / union if union else 1.0
