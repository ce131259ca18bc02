r"""Boxes and points: how they are read from a text, their coordinate frames, how much they overlap, and the
verifiers of them; and the composite reward for findings with boxes.

A text holds JSON (fenced or bare) with the keys of `KEYS`, or four bare numbers. Frames are `unit` (0..1), `milli`
(0..1000), `pixel_original` and `pixel_resized`; everything is compared in original pixels. A row may say `box_frame`
and `box_layout` in its columns; the arguments of that name are for rows that do not. `answer_frame` and `layout` are
what the prompt asks for.

    >>> one, other = read_boxes('[{"bbox_2d": [0, 0, 10, 10], "label": "cat"}, {"bbox_2d": [5, 0, 15, 10]}]')
    >>> one.label, round(overlap([other], [one], MODES["iou"]), 4)
    ('cat', 0.3333)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from saccade.plugins.verifiers.extract import NUMBER, Scope, fenced, graded, written
from saccade.plugins.verifiers.text_match import LABEL_ORDER, joined, labels_f1
from saccade.plugins.verifiers.wording import unsettled
from saccade.rewards.reward_sample import RewardSample, no_gold
from saccade.rewards.verifiers import Verifier
from saccade.types import Score

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


# -- verifiers -------------------------------------------------------------------------------------

BOX_ORDER = ("answer_tag",)
MASKS = ("mask", "segmentation_path")  # columns
NO_SIZE = Score(kind="error", reason="image_size: frames differ and the row has no picture")


def iou(
    sample: RewardSample,
    *,
    mode: str = "iou",
    order: Sequence[str] = BOX_ORDER,
    scope: Scope = "after_think",
    answer_frame: str = "pixel_original",
    layout: str = "xyxy",
    box_frame: str = "pixel_original",
    box_layout: str = "xyxy",
    unit: int | None = None,
    image: int = 0,
) -> Score:
    """How well boxes agree. `mode`: iou, iou@0.5 (any threshold: 0 or 1), giou as (g + 1)/2, set
    (best matching), map, or mask (union of boxes against the row's mask).
    """
    compare, single = _mode(mode)
    view = view_of(sample, answer_frame, layout, box_frame, box_layout, unit, image)
    text = written(sample, order, scope)  # an empty one says that there is no box
    found = view.read(text, view.asked)
    mask = mask_of(sample.extra) if mode == "mask" else None
    golds = [view.read(gold, view.frame) for gold in sample.golds] if mode != "mask" else []
    if not view.known:
        return NO_SIZE
    if (mask is None and not golds) or None in golds or (single and max(len(gold or ()) for gold in golds) > 1):
        return no_gold(sample)
    if found is None or (single and len(found) > 1):
        return graded(text, False, "unparseable" if found is None else "not_one_box")
    if mask is not None:
        value = covered([item.box for item in found], mask, view.space.original)
    else:
        value = max(overlap(found, gold or [], compare) for gold in golds)
    reason = "" if value > 0 else "wrong"
    return Score(kind="value", value=value, reason=reason, extracted=text)


def point(
    sample: RewardSample,
    *,
    order: Sequence[str] = BOX_ORDER,
    scope: Scope = "after_think",
    answer_frame: str = "pixel_original",
    box_frame: str = "pixel_original",
    box_layout: str = "xyxy",
    unit: int | None = None,
    image: int = 0,
) -> Score:
    """1 when the one point of the answer lies in a gold box, its edge included."""
    view = view_of(sample, answer_frame, "xyxy", box_frame, box_layout, unit, image)
    if not view.known:
        return NO_SIZE
    boxes = [found.box for gold in sample.golds for found in view.read(gold, view.frame) or ()]
    if not boxes:
        return no_gold(sample)
    text = written(sample, order, scope)
    points = read_points(text or "")
    if len(points) != 1:
        return graded(text, False, "not_one_point")
    across, down = view.space.scale(answer_frame) or (1.0, 1.0)
    x, y = points[0][0] * across, points[0][1] * down
    return graded(text, any(b[0] <= x <= b[2] and b[1] <= y <= b[3] for b in boxes))


def right_boxes(sample: RewardSample, **args: Any) -> str:
    """The gold boxes as an answer: in the frame and layout that the prompt asks for. A mask has
    none.
    """
    boxes = _right(sample, args) if args.get("mode") != "mask" else ""
    return boxes if isinstance(boxes, str) else json.dumps([list(box) for box in boxes])


def right_point(sample: RewardSample, **args: Any) -> str:
    boxes = _right(sample, args)
    middles = boxes if isinstance(boxes, str) else [[(b[0] + b[2]) / 2, (b[1] + b[3]) / 2] for b in boxes[:1]]
    return middles if isinstance(middles, str) else json.dumps(middles)


def _right(sample: RewardSample, args: Mapping[str, Any]) -> list[Box] | str:
    """The text of the gold where it holds no boxes: the verifier says what is wrong with it."""
    view = view_of(sample, **{name: args[name] for name in FRAME_ARGS if name in args})
    text = next(iter(sample.golds), "")
    gold = view.read(text, view.frame)
    return text if gold is None else [from_pixels(g.box, view.asked, view.space) for g in gold]


# -- frames ----------------------------------------------------------------------------------------


class View(NamedTuple):
    """The frames of answer and gold, and the sizes that bring both to original pixels."""

    asked: Frame
    frame: Frame
    space: Space

    @property
    def known(self) -> bool:
        """Whether the sizes are there that the frames take."""
        return all(self.space.scale(frame.name) for frame in (self.asked, self.frame))

    def read(self, text: str | None, frame: Frame) -> list[Found] | None:
        """Boxes in original pixels."""
        found = None if text is None else read_boxes(text)
        if found is None or self.space.scale(frame.name) is None:
            return None
        return [item._replace(box=to_pixels(item.box, frame, self.space)) for item in found]


FRAME_ARGS = ("answer_frame", "layout", "box_frame", "box_layout", "unit", "image")


def view_of(
    sample: RewardSample,
    answer_frame: str = "pixel_original",
    layout: str = "xyxy",
    box_frame: str = "pixel_original",
    box_layout: str = "xyxy",
    unit: int | None = None,
    image: int = 0,
) -> View:
    row = sample.extra.get("box_frame"), sample.extra.get("box_layout")
    asked, frame = Frame(answer_frame, layout), Frame(row[0] or box_frame, row[1] or box_layout)
    for each in (asked, frame):
        for what, value, known in (("frame", each.name, FRAMES), ("layout", each.layout, LAYOUTS)):
            if value not in known:
                raise ValueError(f"{what} is one of {', '.join(known)}, not {value!r}")
        if each.name == "pixel_resized" and unit is None:
            raise ValueError(
                "pixel_resized needs `unit`, the side of a token in pixels: 28 for Qwen2.5-VL, 32 for Qwen3-VL"
            )
    space = space_of(sample.images, image, unit)
    if space.original is None and asked.name == frame.name in ("unit", "milli"):
        space = Space((1.0, 1.0))  # shares of any size compare the same
    return View(asked, frame, space)


def _mode(mode: str) -> tuple[Compare, bool]:
    """How boxes compare, and whether there can be only one on a side."""
    name, at, threshold = mode.partition("@")
    limit = float(threshold) if threshold.replace(".", "", 1).isdigit() else 0.0
    if (name not in MODES and mode != "mask") or (at and not (name == "iou" and 0 < limit <= 1)):
        raise ValueError(f"mode is {', '.join(MODES)}, mask or iou@0.5, not {mode!r}")
    if at:
        return lambda found, gold: float(MODES["iou"](found, gold) >= limit), True
    return MODES.get(name, MODES["set"]), name in ("iou", "giou")


# -- masks -----------------------------------------------------------------------------------------


def mask_of(extra: Mapping[str, Any]) -> np.ndarray | None:
    """The binary mask of a row, [rows, columns]: an array, or a file."""
    value = next((extra[name] for name in MASKS if extra.get(name) is not None), None)
    if value is None or isinstance(value, str):
        return _mask_file(value) if value else None
    return np.asarray(value) > 0


@lru_cache(maxsize=64)
def _mask_file(path: str) -> np.ndarray:
    if Path(path).suffix == ".npy":
        return np.load(path, allow_pickle=False) > 0
    from PIL import Image  # workers that read no masks start faster without it

    with Image.open(path) as picture:
        return np.asarray(picture.convert("L")) > 0


WEIGHTS = {"labels": 0.5, "boxes": 0.3, "json": 0.1, "length": 0.1}
LONG = 600  # characters; longer responses gain nothing


def medical(
    sample: RewardSample,
    *,
    weights: Mapping[str, float] | None = None,
    synonyms: Mapping[str, str] | None = None,
    order: Sequence[str] = LABEL_ORDER,
    scope: Scope = "after_think",
    answer_frame: str = "pixel_original",
    box_frame: str = "pixel_original",
    unit: int | None = None,
) -> Score:
    """`weights` replaces some of labels 0.5, boxes 0.3, json 0.1, length 0.1; the outcome is the
    part `accuracy`, the F1 of the labels.
    """
    weigh = WEIGHTS | dict(weights or {})
    if len(weigh) > len(WEIGHTS) or not weigh["labels"] > 0 or min(weigh.values()) < 0:
        raise ValueError(f"weights are those of {', '.join(WEIGHTS)}, labels above 0; not {weigh}")
    labels = labels_f1(sample, synonyms=synonyms, order=order, scope=scope)
    if labels.kind != "value":
        return labels
    parts = {
        "labels": labels.value,
        "json": json_quality(sample.response),
        "length": min(1.0, len(sample.response) / LONG),
    }
    view = view_of(sample, answer_frame, "xyxy", box_frame, unit=unit)
    found = view.read(fenced(sample.response) or "", view.asked) or []
    mask, gold = mask_of(sample.extra), view.read(_row_boxes(sample.extra.get("bbox")), view.frame)
    if not view.known:
        return NO_SIZE
    if gold is None:
        return Score(kind="abstain", reason="gold_unparseable: the column `bbox`")
    if mask is not None:
        parts["boxes"] = covered([item.box for item in found], mask, view.space.original)
    elif gold:
        parts["boxes"] = overlap(found, gold, MODES["set"])
    whole = sum(weigh[name] for name in parts)
    value = sum(weigh[name] * part for name, part in parts.items()) / whole
    return replace(labels, value=value, parts=parts | {"accuracy": labels.value})


def _row_boxes(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, default=lambda array: array.tolist())


def json_quality(response: str) -> float:
    """0.2 for a fence, 0.1 for its mark `json`, 0.2 if it parses, 0.1 if to a list, 0.4 times the
    share of items with a label and four numbers.
    """
    inside = fenced(response)
    value: Any = read_json(response if inside is None else inside)
    marked = inside is not None and re.search(r"```json\s", response) is not None
    items = value if isinstance(value, list) else []
    good = [isinstance(i, dict) and "label" in i and len(read_boxes(json.dumps(i)) or ()) == 1 for i in items]
    share = sum(good) / len(good) if good else 0.0
    shape = 0.2 * (inside is not None) + 0.1 * marked
    return shape + 0.2 * (value is not None) + 0.1 * isinstance(value, list) + 0.4 * share


ROWS = {
    "iou": Verifier(function=iou, graded=True, right=right_boxes, empty_modes=("set",)),
    "point": Verifier(function=point, graded=True, right=right_point),
    "medical": Verifier(function=medical, graded=True, right=joined, blank_counts=True),
}
