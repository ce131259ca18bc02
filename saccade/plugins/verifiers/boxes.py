r"""Boxes and points in a text, their coordinate frames, and how much they overlap, in numbers between 0 and 1.

A text holds JSON (fenced or bare) with the keys of `KEYS`, or four bare numbers. Frames are `unit` (0..1), `milli`
(0..1000), `pixel_original` and `pixel_resized`; everything is compared in original pixels.

    >>> one, other = read_boxes('[{"bbox_2d": [0, 0, 10, 10], "label": "cat"}, {"bbox_2d": [5, 0, 15, 10]}]')
    >>> one.label, round(overlap([other], [one], MODES["iou"]), 4)
    ('cat', 0.3333)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from saccade.plugins.verifiers.extract import NUMBER, fenced
from saccade.plugins.verifiers.wording import unsettled

KEYS = ("bbox_2d", "bbox", "box", "objects_of_interest")
POINT_KEYS = ("point_2d", "point", "coordinate")
LABELS, SCORES = ("label", "name", "category"), ("score", "confidence")
FRAMES = ("unit", "milli", "pixel_original", "pixel_resized")
LAYOUTS = ("xyxy", "xywh")
LONGEST = 20_000  # characters that are read
MOST_BOXES = 200
LARGEST = 1e9  # of a coordinate
NOTHING = ("", "none", "[]")

Box = tuple[float, float, float, float]  # left, top, right, bottom


class Found(NamedTuple):
    box: Any  # a Box, or the two numbers of a point
    label: str | None = None
    score: float | None = None


class Frame(NamedTuple):
    name: str
    layout: str = "xyxy"


class Space(NamedTuple):
    """The sizes of a picture as (width, height): of the file, and as the model sees it."""

    original: tuple[float, float] | None = None
    resized: tuple[float, float] | None = None

    def scale(self, frame: str) -> tuple[float, float] | None:
        """Original pixels per unit of a frame; None where the size that it takes is unknown."""
        if frame == "pixel_original":
            return 1.0, 1.0
        whole = {"unit": (1.0, 1.0), "milli": (1000.0, 1000.0), "pixel_resized": self.resized}
        size = whole[frame]
        if self.original is None or size is None:
            return None
        return self.original[0] / size[0], self.original[1] / size[1]


def space_of(images: Sequence[Mapping[str, Any]], index: int, unit: int | None) -> Space:
    """Of a sample's picture; `unit` is the side in pixels that the model sees as one token."""
    if not -len(images) <= index < len(images):
        return Space()
    image = images[index]
    width, height = image["size"]
    if unit is None or "pixels" not in image:
        return Space((width, height))
    from saccade.media.images import resized_size  # brings libraries that workers start faster without

    least, most = image["pixels"]
    rows, columns = resized_size(width, height, unit=unit, min_pixels=least, max_pixels=most)
    return Space((width, height), (columns, rows))


def to_pixels(box: Box, frame: Frame, space: Space) -> Box:
    """In original pixels, corners sorted, clipped to the picture."""
    across, down = space.scale(frame.name) or (1.0, 1.0)
    x0, y0, x1, y1 = box
    if frame.layout == "xywh":
        x1, y1 = x0 + x1, y0 + y1
    xs, ys = sorted((x0 * across, x1 * across)), sorted((y0 * down, y1 * down))
    if space.original:
        width, height = space.original
        xs = [min(max(x, 0.0), width) for x in xs]
        ys = [min(max(y, 0.0), height) for y in ys]
    return xs[0], ys[0], xs[1], ys[1]


def from_pixels(box: Box, frame: Frame, space: Space) -> Box:
    across, down = space.scale(frame.name) or (1.0, 1.0)
    x0, y0, x1, y1 = box[0] / across, box[1] / down, box[2] / across, box[3] / down
    return (x0, y0, x1 - x0, y1 - y0) if frame.layout == "xywh" else (x0, y0, x1, y1)


# -- reading ---------------------------------------------------------------------------------------


def read_boxes(text: str) -> list[Found] | None:
    """Every box, in its order; an empty list where the text says that there is none, None where
    it says neither.
    """
    text = _body(text)
    if text.lower() in NOTHING:
        return []
    if _in_doubt(text):
        return None
    value = read_json(text)
    found = list(_groups(value, 4, KEYS))[: MOST_BOXES + 1] or (_bare(text, 4) if value is None else [])
    return found if 0 < len(found) <= MOST_BOXES or value == [] else None


def read_points(text: str) -> list[tuple[float, float]]:
    text = _body(text)
    if _in_doubt(text):
        return []
    return [found.box for found in list(_groups(read_json(text), 2, POINT_KEYS)) or _bare(text, 2)]


def _bare(text: str, count: int) -> list[Found]:
    """The only numbers of a text, where they are so many."""
    numbers = [float(n.replace(",", "").replace("\u2212", "-")) for n in NUMBER.findall(text)[: count + 1]]
    return [Found(tuple(numbers))] if _numbers(numbers, count) else []


def read_json(text: str) -> Any:
    """The JSON that a text is or holds; None where there is none."""
    text = _body(text)
    inner = text[slice(*_brackets(text))]
    for candidate in (text, inner, f"[{inner}]") if inner else ():
        try:
            return json.loads(candidate)
        except (ValueError, RecursionError):  # no JSON, or nested beyond all measure
            continue
    return None


def _brackets(text: str) -> tuple[int, int]:
    """Where the first one opens and the last one closes."""
    starts = [at for at in map(text.find, "[{") if at >= 0]
    return min(starts, default=0), max(map(text.rfind, "]}")) + 1


def _in_doubt(text: str) -> bool:
    """What is said around the brackets: a label inside may well be `no helmet`."""
    start, end = _brackets(text)
    return unsettled(f"{text[:start]} {text[end:]}")


def _body(text: str) -> str:
    inside = fenced(text)
    return (text if inside is None else inside).strip()[:LONGEST]


def _groups(
    value: Any, count: int, keys: Sequence[str], label: str | None = None, score: float | None = None, levels: int = 4
) -> Iterator[Found]:
    """Every group of `count` numbers: alone, in a list, or under one of the keys of a record."""
    if _numbers(value, count):
        yield Found(tuple(map(float, value)), label, score)
    elif isinstance(value, list):
        for item in value if levels else ():
            if isinstance(item, dict) or _numbers(item, count):  # deeper lists are none
                yield from _groups(item, count, keys, label, score, levels - 1)
    elif isinstance(value, dict):
        label = next((str(value[key]) for key in LABELS if key in value), label)
        scores = [float(value[key]) for key in SCORES if _is_number(value.get(key))]
        pair = [value.get("x"), value.get("y")] if count == 2 else None
        for inner in (pair, *map(value.get, keys)):
            if isinstance(inner, list):
                yield from _groups(inner, count, keys, label, next(iter(scores), score), levels - 1)


def _numbers(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count and all(map(_is_number, value))


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and value == value and abs(value) < LARGEST


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
    pairs = [[[i for i in side if _kind(i, labelled) == kind] for side in (found, gold)] for kind in kinds]
    return float(np.mean([_precision(own, its, threshold) for own, its in pairs for threshold in THRESHOLDS]))


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
