r"""The composite reward for findings with boxes: labels, overlap, JSON and length.

The response holds a fenced JSON list of `{"bbox_2d": …, "label": …}` and the labels in `\boxed{}`
or in the answer tag. Rows have labels as their answer and may have `bbox` or a mask
(`segmentation_path`); parts that a row cannot have are left out and the others weigh more.

    >>> sample = RewardSample(id="a", response=r"\boxed{edema}", answer="edema")
    >>> round(medical(sample, weights={"json": 0, "length": 0}).value, 3)
    1.0
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from saccade.plugins.verifiers.boxes import read_boxes, read_json
from saccade.plugins.verifiers.extract import Scope, fenced
from saccade.plugins.verifiers.grounding import NO_SIZE, mask_of, view_of
from saccade.plugins.verifiers.label_overlap import LABEL_ORDER, joined, labels_f1
from saccade.plugins.verifiers.overlap import MODES, covered, overlap
from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.verifiers import Verifier
from saccade.types import Score

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
    found = view.found(fenced(sample.response) or "") or []
    mask, gold = mask_of(sample.extra), view.gold(_row_boxes(sample.extra.get("bbox")))
    if not view.known:
        return NO_SIZE
    if gold is None:
        return Score(kind="abstain", reason="gold_unparseable: the column `bbox`")
    if mask is not None:
        parts["boxes"] = covered([item.box for item in found], mask, view.space.original)
    elif gold:
        parts["boxes"] = overlap(found, gold, MODES["set"])
    whole = sum(weigh[name] for name in parts)
    return Score(
        kind="value",
        value=sum(weigh[name] * part for name, part in parts.items()) / whole,
        reason=labels.reason,
        parts=parts | {"accuracy": labels.value},
        extracted=labels.extracted,
    )


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
    return (
        0.2 * (inside is not None)
        + 0.1 * marked
        + 0.2 * (value is not None)
        + 0.1 * isinstance(value, list)
        + 0.4 * share
    )


ROWS = {"medical": Verifier(function=medical, graded=True, right=joined, blank_counts=True)}
