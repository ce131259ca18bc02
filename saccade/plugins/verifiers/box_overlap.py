"""How well found boxes match gold ones: overlap of two, best matching of many, mean average precision, a mask.

overlap(found, gold, MODES["giou"])
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Box = tuple[float, ...]  # left, top, right, bottom
Size = tuple[float, float]  # width, height


class Detection(NamedTuple):
    box: Any  # a Box, or the two numbers of a point
    label: str | None = None
    score: float | None = None


THRESHOLDS = [0.5 + 0.05 * step for step in range(10)]  # of IoU, for mean average precision

Compare = Callable[[Sequence[Detection], Sequence[Detection]], float]


def overlap(found: Sequence[Detection], gold: Sequence[Detection], compare: Compare) -> float:
    """compare(found, gold); 1 if both are empty, 0 if one is."""
    return compare(found, gold) if found and gold else float(not found and not gold)


def pair(a: Box, b: Box) -> tuple[float, float]:
    """IoU and generalised IoU."""
    one, other = ((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b))
    if not (one and other):
        return 0.0, -1.0
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(0.0, width) * max(0.0, height)
    union = one + other - shared
    hull = (max(a[2], b[2]) - min(a[0], b[0])) * (max(a[3], b[3]) - min(a[1], b[1]))
    return shared / union, shared / union - (hull - union) / hull


def _table(found: Sequence[Detection], gold: Sequence[Detection]) -> np.ndarray:
    return np.array([[pair(f.box, g.box)[0] for g in gold] for f in found])


def matched(found: Sequence[Detection], gold: Sequence[Detection]) -> float:
    """The best one-to-one matching: its sum of IoU divided by the larger number of boxes."""
    gains = _table(*sorted((found, gold), key=len))
    owner = np.full(gains.shape[1], -1)  # the row of each column; -1: none
    for row in range(len(gains)):
        # Augmenting path: the best way to give this row a column, where other rows may change theirs.
        value, came = gains[row].copy(), np.full(len(owner), -1)
        held = np.flatnonzero(owner >= 0)
        for _ in held:
            passed_on = (value[held] - gains[owner[held], held])[:, None] + gains[owner[held]]
            better = passed_on.max(0) > value + 1e-12
            if not better.any():
                break
            value[better], came[better] = passed_on.max(0)[better], held[passed_on.argmax(0)[better]]
        column = int(np.argmax(np.where(owner < 0, value, -np.inf)))
        while came[column] >= 0:
            owner[column], column = owner[came[column]], came[column]
        owner[column] = row
    taken = np.flatnonzero(owner >= 0)
    return float(gains[owner[taken], taken].sum()) / max(len(found), len(gold))


def mean_precision(found: Sequence[Detection], gold: Sequence[Detection]) -> float:
    """Average precision at IoU thresholds 0.5, 0.55 … 0.95, averaged over thresholds and gold labels.
    Boxes are ranked by score, else in their order; without gold labels all boxes are one class.
    """
    labelled = all(item.label for item in gold)

    def kind(item: Detection) -> str:
        return (item.label or "").strip().casefold() if labelled else ""

    ranked = sorted(found, key=lambda item: -(item.score or 0.0))
    sides = [[[i for i in side if kind(i) == each] for side in (ranked, gold)] for each in sorted(set(map(kind, gold)))]
    return float(np.mean([_precision(these, those, at) for these, those in sides for at in THRESHOLDS]))


def _precision(ranked: Sequence[Detection], gold: Sequence[Detection], threshold: float) -> float:
    hits, free = np.zeros(len(ranked)), np.ones(len(gold), bool)
    for index, row in enumerate(_table(ranked, gold)):
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


def covered(found: Sequence[Detection], mask: np.ndarray, size: Size | None) -> float:
    """IoU of the union of boxes with a mask. `size`: of the image that boxes refer to, if not the mask's."""
    rows, columns = mask.shape
    width, height = size or (columns, rows)
    drawn = np.zeros_like(mask)
    for x0, y0, x1, y1 in (item.box for item in found):
        left, right = (max(round(x * columns / width), 0) for x in (x0, x1))
        top, bottom = (max(round(y * rows / height), 0) for y in (y0, y1))
        drawn[top:bottom, left:right] = True
    union = int((drawn | mask).sum())
    return int((drawn & mask).sum()) / union if union else 1.0
