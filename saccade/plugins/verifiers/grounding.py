r"""Verifiers for boxes and points, and the composite reward for findings with boxes.

A row may say `box_frame` and `box_layout` in its columns; the arguments of that name are for rows that do not.
`answer_frame` and `layout` are what the prompt asks for.

    >>> sample = RewardSample(id="a", response="<answer>[5,0,15,10]</answer>", answer="[0,0,10,10]")
    >>> round(iou(sample).value, 4)
    0.3333
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from saccade.plugins.verifiers.boxes import (
    FRAMES,
    LAYOUTS,
    MODES,
    Box,
    Compare,
    Found,
    Frame,
    Space,
    covered,
    from_pixels,
    overlap,
    read_boxes,
    read_json,
    read_points,
    space_of,
    to_pixels,
)
from saccade.plugins.verifiers.extract import Scope, fenced, graded, written
from saccade.plugins.verifiers.text_match import LABEL_ORDER, joined, labels_f1
from saccade.rewards.reward_sample import RewardSample, no_gold
from saccade.rewards.verifiers import Verifier
from saccade.types import Score

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
                "pixel_resized needs `unit`, the pixels of a side that the model sees as one "
                "token: 28 for Qwen2.5-VL, 32 for Qwen3-VL"
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
