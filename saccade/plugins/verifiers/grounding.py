r"""Verifiers of boxes and points: parsing, coordinate frames, overlap, and the `medical` reward of labels with boxes.

A text holds JSON (fenced or bare) with the keys of `KEYS`, or four bare numbers. Frames are `unit` (0..1), `milli`
(0..1000), `pixel_original` and `pixel_resized`; everything is compared in original pixels. The frame of gold boxes is
in the row's columns `box_frame` and `box_layout`, else in the arguments of that name. `answer_frame` and `layout` are
those that the prompt asks for.

    >>> one, other = read_boxes('[{"bbox_2d": [0, 0, 10, 10], "label": "cat"}, {"bbox_2d": [5, 0, 15, 10]}]')
    >>> one.label, round(overlap([other], [one], MODES["iou"]), 4)
    ('cat', 0.3333)
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from saccade.plugins.verifiers.box_overlap import MODES, Box, Compare, Detection, Size, covered, overlap
from saccade.plugins.verifiers.extract import NUMBER, answering, fenced, score_of, with_result_of
from saccade.plugins.verifiers.text_match import joined, labels_f1
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

Frame = tuple[str, str]  # name, layout


class View(NamedTuple):
    """The frames of answer and gold, and the size of the image in its file and as the model sees it."""

    asked: Frame
    gold: Frame
    original: Size | None
    resized: Size | None

    @property
    def has_sizes(self) -> bool:
        """Whether the sizes that the frames need are known."""
        return all(map(self.scale, (self.asked, self.gold)))

    def scale(self, frame: Frame) -> Size | None:
        """Original pixels per unit of a frame; None if a size that it needs is unknown."""
        if frame[0] == "pixel_original":
            return 1.0, 1.0
        size = {"unit": (1.0, 1.0), "milli": (1000.0, 1000.0), "pixel_resized": self.resized}[frame[0]]
        if self.original is None or size is None:
            return None
        return self.original[0] / size[0], self.original[1] / size[1]

    def read(self, text: str | None, frame: Frame) -> list[Detection] | None:
        """The boxes in a text in original pixels, corners sorted, clipped to the image; None if unreadable."""
        found, scale = None if text is None else read_boxes(text), self.scale(frame)
        if found is None or scale is None:
            return None
        corners = np.array([item.box for item in found], float).reshape(-1, 2, 2)
        if frame[1] == "xywh":
            corners[:, 1] += corners[:, 0]
        corners = np.sort(corners * scale, axis=1)
        corners = corners.clip(0, self.original) if self.original else corners
        return [item._replace(box=tuple(box)) for item, box in zip(found, corners.reshape(-1, 4).tolist(), strict=True)]

    def asked_for(self, box: Box) -> Box:
        """Convert a box from original pixels to the frame and layout that the prompt asks for."""
        corners = np.array(box).reshape(2, 2) / (self.scale(self.asked) or (1.0, 1.0))
        if self.asked[1] == "xywh":
            corners[1] -= corners[0]
        return tuple(corners.ravel().tolist())


FRAME_ARGS = ("answer_frame", "layout", "box_frame", "box_layout", "unit", "image")


def view_of(
    sample: RewardSample,
    *,
    answer_frame: str = "pixel_original",
    layout: str = "xyxy",
    box_frame: str = "pixel_original",
    box_layout: str = "xyxy",
    unit: int | None = None,
    image: int = 0,
) -> View:
    """The view of a sample. `unit`: side of an image token in pixels; `image`: index of the row's image."""
    asked = answer_frame, layout
    gold = sample.extra.get("box_frame") or box_frame, sample.extra.get("box_layout") or box_layout
    for name, shape in (asked, gold):
        if name not in FRAMES or shape not in LAYOUTS:
            expected = f"frame is one of {', '.join(FRAMES)} and layout one of {', '.join(LAYOUTS)}"
            raise ValueError(f"{expected}, not {name!r} and {shape!r}")
        if name == "pixel_resized" and unit is None:
            raise ValueError("pixel_resized needs `unit`, the side of a token in pixels, such as 28 for Qwen2.5-VL")
    original, resized = _sizes(sample.images, image, unit)
    if original is None and asked[0] == gold[0] in ("unit", "milli"):
        original = (1.0, 1.0)  # relative coordinates compare the same at any size
    return View(asked, gold, original, resized)


def _sizes(images: Sequence[Mapping[str, Any]], index: int, unit: int | None) -> tuple[Size | None, Size | None]:
    if not -len(images) <= index < len(images):
        return None, None
    width, height = images[index]["size"]
    if unit is None or "pixels" not in images[index]:
        return (width, height), None
    from saccade.media.images import resized_size  # imported on use: workers start faster without its libraries

    least, most = images[index]["pixels"]
    rows, columns = resized_size(width, height, unit=unit, min_pixels=least, max_pixels=most)
    return (width, height), (columns, rows)


# -- reading ---------------------------------------------------------------------------------------


def read_boxes(text: str) -> list[Detection] | None:
    """All boxes in order; an empty list if the text says that there is none, None if it can be read
    neither way.
    """
    text = _body(text)
    if text.lower() in NOTHING:
        return []
    if _in_doubt(text):
        return None
    value = read_json(text)
    found = list(_groups(value, 4, KEYS, Detection(()))) or (_bare(text, 4) if value is None else [])
    return found if 0 < len(found) <= MOST_BOXES or value == [] else None


def _bare(text: str, count: int) -> list[Detection]:
    """The numbers of a text without JSON, if there are exactly `count`."""
    numbers = [float(n.replace(",", "").replace("\u2212", "-")) for n in NUMBER.findall(text)[: count + 1]]
    return [Detection(tuple(numbers))] if _numbers(numbers, count) else []


def read_json(text: str) -> Any:
    """The JSON value that a text is or contains; None if there is none."""
    text = _body(text)
    inner = text[_brackets(text)]
    for candidate in (text, inner, f"[{inner}]") if inner else ():
        try:
            return json.loads(candidate)
        except (ValueError, RecursionError):  # no JSON, or nested too deeply
            continue
    return None


def _brackets(text: str) -> slice:
    """The range from the first opening bracket to the last closing one."""
    starts = [at for at in map(text.find, "[{") if at >= 0]
    return slice(min(starts, default=0), max(map(text.rfind, "]}")) + 1)


def _in_doubt(text: str) -> bool:
    """Whether the text around the brackets expresses doubt; a label inside may be `no helmet`."""
    inside = _brackets(text)
    return unsettled(f"{text[: inside.start]} {text[inside.stop :]}")


def _body(text: str) -> str:
    inside = fenced(text)
    return (text if inside is None else inside).strip()[:LONGEST]


def _groups(value: Any, count: int, keys: Sequence[str], like: Detection, levels: int = 4) -> Iterator[Detection]:
    """Every group of `count` numbers: alone, in a list, or under one of the keys of a record."""
    if _numbers(value, count):
        yield like._replace(box=tuple(map(float, value)))
    elif isinstance(value, list):
        for item in value if levels else ():
            if isinstance(item, dict) or _numbers(item, count):  # deeper lists are not searched
                yield from _groups(item, count, keys, like, levels - 1)
    elif isinstance(value, dict):
        label = next((str(value[key]) for key in LABELS if key in value), like.label)
        score = next((float(value[key]) for key in SCORES if _is_number(value.get(key))), like.score)
        pair = [value.get("x"), value.get("y")] if count == 2 else None
        for inner in (pair, *map(value.get, keys)):
            if isinstance(inner, list):
                yield from _groups(inner, count, keys, Detection((), label, score), levels - 1)


def _numbers(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count and all(map(_is_number, value))


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and value == value and abs(value) < LARGEST


# -- verifiers -------------------------------------------------------------------------------------

NO_SIZE = Score(kind="error", reason="image_size: frames differ and the row has no picture")


@with_result_of(view_of)
@answering("answer_tag", blank=True)  # an empty answer means that there is no box
def iou(sample: RewardSample, text: str | None, view: View, *, mode: str = "iou", dice: bool = False) -> Score:
    """Overlap of boxes. `mode`: iou, iou@0.5 (any threshold; gives 0 or 1), giou as (g + 1)/2, set (best
    matching), map, or mask (union of boxes against the row's mask). `dice`: the Dice coefficient in place of
    the IoU, with mode iou or mask.
    """
    compare, single = _mode(mode)
    if dice and mode not in ("iou", "mask"):
        raise ValueError(f"dice is for mode iou or mask, not {mode!r}")
    mask = mask_of(sample.extra) if mode == "mask" else None
    if not view.has_sizes:
        return NO_SIZE
    found = view.read(text, view.asked)
    golds = [] if mode == "mask" else [view.read(gold, view.gold) for gold in sample.golds]
    if (mask is None and not golds) or None in golds or (single and max(len(gold or ()) for gold in golds) > 1):
        return no_gold(sample)
    if found is None or (single and len(found) > 1):
        return score_of(text, False, "unparseable" if found is None else "not_one_box")
    if mask is not None:
        value = covered(found, mask, view.original)
    else:
        value = max(overlap(found, gold or [], compare) for gold in golds)
    return score_of(text, 2 * value / (1 + value) if dice else value)


@with_result_of(view_of)
@answering("answer_tag", blank=True)
def point(sample: RewardSample, text: str | None, view: View) -> Score:
    """1 if the answer is one point that lies in a gold box, edges included."""
    if not view.has_sizes:
        return NO_SIZE
    boxes = [found.box for gold in sample.golds for found in view.read(gold, view.gold) or ()]
    if not boxes:
        return no_gold(sample)
    said = _body(text or "")
    points = list(_groups(read_json(said), 2, POINT_KEYS, Detection(()))) or _bare(said, 2)
    if len(points) != 1 or _in_doubt(said):
        return score_of(text, False, "not_one_point")
    across, down = view.scale(view.asked) or (1.0, 1.0)
    x, y = points[0].box[0] * across, points[0].box[1] * down
    return score_of(text, any(b[0] <= x <= b[2] and b[1] <= y <= b[3] for b in boxes))


def right_boxes(sample: RewardSample, **args: Any) -> str:
    """The gold boxes as an answer in the prompt's frame and layout; empty with mode mask."""
    return "" if args.get("mode") == "mask" else _right(sample, args, list)


def right_point(sample: RewardSample, **args: Any) -> str:
    return _right(sample, args | {"layout": "xyxy"}, lambda b: [(b[0] + b[2]) / 2, (b[1] + b[3]) / 2])


def _right(sample: RewardSample, args: Mapping[str, Any], shown: Callable[[Box], list[float]]) -> str:
    """The gold boxes as JSON, or the gold's text if it has no boxes: the verifier will give the reason."""
    view = view_of(sample, **{name: args[name] for name in FRAME_ARGS if name in args})
    text = next(iter(sample.golds), "")
    gold = view.read(text, view.gold)
    return text if gold is None else json.dumps([shown(view.asked_for(item.box)) for item in gold])


def _mode(mode: str) -> tuple[Compare, bool]:
    """Returns the comparison of a mode, and whether it allows only one box per side."""
    name, at, threshold = mode.partition("@")
    limit = float(threshold) if threshold.replace(".", "", 1).isdigit() else 0.0
    if (name not in MODES and mode != "mask") or (at and not (name == "iou" and 0 < limit <= 1)):
        raise ValueError(f"mode is {', '.join(MODES)}, mask or iou@0.5, not {mode!r}")
    if at:
        return lambda found, gold: float(MODES["iou"](found, gold) >= limit), True
    return MODES.get(name, MODES["set"]), name in ("iou", "giou")


# -- masks -----------------------------------------------------------------------------------------


def mask_of(extra: Mapping[str, Any]) -> np.ndarray | None:
    """The binary mask of a row, [rows, columns], from its array or file; None if it has none."""
    value = next((extra[name] for name in ("mask", "segmentation_path") if extra.get(name) is not None), None)
    if value is None or isinstance(value, str):
        return _mask_file(value) if value else None
    return np.asarray(value) > 0


@lru_cache(maxsize=64)
def _mask_file(path: str) -> np.ndarray:
    if Path(path).suffix == ".npy":
        return np.load(path, allow_pickle=False) > 0
    from PIL import Image  # imported on use: workers that read no masks start faster

    with Image.open(path) as picture:
        return np.asarray(picture.convert("L")) > 0


WEIGHTS = {"labels": 0.5, "boxes": 0.3, "json": 0.1, "length": 0.1}
LONG = 600  # characters that give the full length score


@with_result_of(view_of)
@with_result_of(labels_f1)
def medical(sample: RewardSample, labels: Score, view: View, *, weights: Mapping[str, float] | None = None) -> Score:
    """Weighted mean of labels, boxes, JSON quality and length. `weights` replaces some of labels 0.5,
    boxes 0.3, json 0.1, length 0.1. The outcome is the part `accuracy`, the F1 of the labels.
    """
    weigh = {**WEIGHTS, **(weights or {})}
    if len(weigh) > len(WEIGHTS) or not weigh["labels"] > 0 or min(weigh.values()) < 0:
        raise ValueError(f"weights are those of {', '.join(WEIGHTS)}, labels above 0; not {weigh}")
    if labels.kind != "value":
        return labels
    if not view.has_sizes:
        return NO_SIZE
    mask, gold = mask_of(sample.extra), view.read(_row_boxes(sample.extra.get("bbox")), view.gold)
    if gold is None:
        return Score(kind="abstain", reason="gold_unparseable: the column `bbox`")
    length = min(1.0, len(sample.response) / LONG)
    parts = {"labels": labels.value, "json": json_quality(sample.response), "length": length}
    found = view.read(fenced(sample.response) or "", view.asked) or []
    if mask is not None:
        parts["boxes"] = covered(found, mask, view.original)
    elif gold:
        parts["boxes"] = overlap(found, gold, MODES["set"])
    value = sum(weigh[name] * part for name, part in parts.items()) / sum(weigh[name] for name in parts)
    return replace(labels, value=value, parts=parts | {"accuracy": labels.value})


def _row_boxes(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, default=lambda array: array.tolist())


def json_quality(response: str) -> float:
    """0.2 for a fenced block, 0.1 if it is marked `json`, 0.2 if the JSON parses, 0.1 if it is a list, plus
    0.4 times the share of its items with a label and a box of four numbers.
    """
    fence, value = fenced(response) is not None, read_json(response)
    items = value if isinstance(value, list) else []
    good = [isinstance(i, dict) and "label" in i and len(read_boxes(json.dumps(i)) or ()) == 1 for i in items]
    shape = 0.2 * fence + 0.1 * (fence and re.search(r"```json\s", response) is not None)
    parsed = 0.2 * (value is not None) + 0.1 * isinstance(value, list)
    return shape + parsed + 0.4 * (sum(good) / len(good) if good else 0.0)


ROWS = {
    "iou": Verifier(function=iou, partial_credit=True, best_answer=right_boxes, empty_modes=("set",)),
    "point": Verifier(function=point, partial_credit=True, best_answer=right_point),
    "medical": Verifier(function=medical, partial_credit=True, best_answer=joined, blank_counts=True),
}
