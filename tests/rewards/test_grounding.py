from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from saccade.plugins.verifiers.boxes import matched, pair, read_boxes
from saccade.plugins.verifiers.grounding import iou, point
from saccade.rewards.reward_sample import RewardSample
from saccade.types import Score

GOLD = "[0,0,10,10]"
PICTURE = {"size": [200, 100], "pixels": [3136, 1_003_520]}


def score(verifier: Any, answer: str, gold: Any = GOLD, extra: Any = None, **args: Any) -> Score:
    images = args.pop("images", ())
    response = f"<answer>{answer}</answer>"
    sample = RewardSample(id="a", response=response, answer=gold, extra=extra or {}, images=images)
    return verifier(sample, **args)


@pytest.mark.parametrize(
    ("answer", "mode", "expected"),
    [
        ("[0,0,10,10]", "iou", 1),
        ("[5,0,15,10]", "iou", 1 / 3),
        ("[10,10,20,20]", "iou", 0),
        ("[10,10,0,0]", "iou", 1),  # corners are sorted
        ("[5,5,5,9]", "iou", 0),  # no area
        ("[0,0,10,10],[50,50,60,60]", "set", 0.5),
        ("somewhere on the left", "iou", 0),
        ("[0,0,10,10],[0,0,10,10]", "iou", 0),  # two guesses are none
        ("[0,0,10,6]", "iou@0.5", 1),
        ("[0,0,10,4]", "iou@0.5", 0),
        ("[0,0,10,10]", "giou", 1),
        ("[10,10,20,20]", "giou", 0.25),
        ("[0,0,10,10]", "map", 1),
        ("[0,0,10,7.2]", "map", 0.5),  # above five of ten thresholds
        ("[50,50,60,60],[0,0,10,10]", "map", 0.5),
        ("[0,0,10,10],[50,50,60,60]", "map", 1),  # the right one ranks first
    ],
)
def test_modes(answer: str, mode: str, expected: float) -> None:
    assert score(iou, answer, mode=mode).value == pytest.approx(expected)


@pytest.mark.parametrize(
    "answer",
    [
        '{"bbox_2d": [0, 0, 10, 10]}',
        '[{"bbox": [0, 0, 10, 10], "label": "cat"}]',
        '```json\n[{"box": [0, 0, 10.0, 10]}]\n```',
        '{"objects_of_interest": [{"bbox_2d": [0, 0, 10, 10]}]}',
        '{"objects_of_interest": [[0, 0, 10, 10]]}',
        "0, 0, 10, 10",
        "<|box_start|>(0,0),(10,10)<|box_end|>",
        "The box is [0, 0, 10, 10].",
    ],
)
def test_ways_to_write_a_box(answer: str) -> None:
    assert score(iou, answer).value == 1


def test_nothing_to_find_is_found_by_naming_nothing() -> None:
    for answer in ("[]", "", "none", "```json\n[]\n```"):
        assert score(iou, answer, "[]", mode="set").value == 1
        assert score(iou, answer, GOLD, mode="set").value == 0
    assert score(iou, GOLD, "[]", mode="set").value == 0
    assert score(iou, "no idea", "[]", mode="set").reason == "unparseable"
    assert iou(RewardSample(id="a", response="", answer="[]")).reason == "no_answer"


def test_what_a_tool_was_asked_for_is_no_answer() -> None:
    call = '<think>Look.</think><grounding>{"bbox_2d": [0, 0, 10, 10]}</grounding>'
    for turns in ((call,), (f"<answer>{GOLD}</answer>", call)):
        sample = RewardSample(id="a", response="\n".join(turns), turns=turns, answer=GOLD)
        assert iou(sample, order=("answer_tag", "whole")).reason == "no_answer"


def test_rows_that_cannot_be_compared_abstain() -> None:
    assert score(iou, GOLD, "the cat").kind == "abstain"
    assert score(iou, GOLD, None).kind == "abstain"
    assert score(iou, GOLD, "[[0,0,1,1],[2,2,3,3]]").kind == "abstain"  # needs mode=set
    assert score(iou, GOLD, mode="mask").kind == "abstain"


def test_frames_meet_in_original_pixels() -> None:
    answer, gold = "[500,0,1000,1000]", "[100,0,200,100]"
    assert score(iou, answer, gold, answer_frame="milli", images=[PICTURE]).value == 1
    row = {"box_frame": "unit"}
    unit = score(iou, answer, "[0.5,0,1,1]", row, answer_frame="milli", images=[PICTURE])
    assert unit.value == 1
    far = score(iou, "[0.5,0,7,7]", gold, answer_frame="unit", images=[PICTURE])
    assert far.value == 1  # clipped to the picture


def test_the_resized_picture_is_a_frame_of_its_own() -> None:
    """200x100 becomes 196x112 in steps of 28."""
    args = {"answer_frame": "pixel_resized", "unit": 28, "images": [PICTURE]}
    assert score(iou, "[98,0,196,112]", "[100,0,200,100]", **args).value == pytest.approx(1)
    assert score(iou, "[100,0,200,100]", "[100,0,200,100]", **args).value < 0.9
    with pytest.raises(ValueError, match="28 for Qwen2"):
        score(iou, GOLD, answer_frame="pixel_resized")


def test_frames_that_differ_need_a_picture() -> None:
    missing = score(iou, "[0,0,1,1]", answer_frame="unit")
    assert (missing.kind, missing.reason.partition(":")[0]) == ("error", "image_size")
    same = {"answer_frame": "milli", "box_frame": "milli"}
    assert score(iou, "[5,0,15,10]", **same).value == pytest.approx(1 / 3)


def test_layouts() -> None:
    assert score(iou, "[5,5,10,10]", "[5,5,15,15]", layout="xywh").value == 1
    assert score(iou, "[5,5,15,15]", "[5,5,10,10]", {"box_layout": "xywh"}).value == 1


@pytest.mark.parametrize("args", [{"mode": "dice"}, {"mode": "giou@0.5"}, {"mode": "iou@2"}])
def test_unknown_modes_are_refused(args: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="mode is iou, giou, set, map, mask or iou@"):
        score(iou, GOLD, **args)


def test_the_matching_is_the_best_of_all() -> None:
    draw = np.random.default_rng(0)
    for rows, columns in [(1, 3), (3, 3), (4, 2), (4, 5)]:
        corners = draw.integers(0, 12, (rows + columns, 4)).tolist()
        boxes = read_boxes(json.dumps([[*c[:2], c[0] + 6, c[1] + 6] for c in corners])) or []
        found, gold = boxes[:rows], boxes[rows:]
        few, many = sorted((found, gold), key=len)
        best = max(
            sum(pair(a.box, b.box)[0] for a, b in zip(few, some, strict=True))
            for some in itertools.permutations(many, len(few))
        )
        assert matched(found, gold) == pytest.approx(best / len(many))


def test_map_asks_for_labels_where_the_gold_has_them() -> None:
    gold = '[{"bbox": [0,0,10,10], "label": "cat"}, {"bbox": [20,20,30,30], "label": "dog"}]'
    swapped = gold.replace("cat", "x").replace("dog", "Cat").replace('"x"', '"dog"')
    assert score(iou, gold, gold, mode="map").value == 1
    assert score(iou, swapped, gold, mode="map").value == 0
    assert score(iou, swapped, gold, mode="set").value == 1


def test_masks_may_have_another_size_than_their_picture(tmp_path: Path) -> None:
    mask = np.zeros((50, 100), np.uint8)
    mask[:, 50:] = 255
    Image.fromarray(mask).save(tmp_path / "mask.png")
    np.save(tmp_path / "mask.npy", mask)
    for value in (mask, str(tmp_path / "mask.png"), str(tmp_path / "mask.npy")):
        args = {"extra": {"segmentation_path": value}, "mode": "mask", "images": [PICTURE]}
        assert score(iou, "[100,0,200,100]", None, **args).value == 1
        assert score(iou, "[100,0,200,50],[100,50,200,100]", None, **args).value == 1
        assert score(iou, "[0,0,200,100]", None, **args).value == 0.5
        assert score(iou, "[]", None, **args).value == 0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("[5,5]", 1),
        ("(5, 5)", 1),
        ('{"point_2d": [5, 5]}', 1),
        ('[{"x": 5, "y": 5}]', 1),
        ("[10,10]", 1),  # the edge counts
        ("[0,10]", 1),
        ("[10.1,5]", 0),
        ("[[5,5],[6,6]]", 0),
        ("the middle", 0),
        ("", 0),
    ],
)
def test_point(answer: str, expected: float) -> None:
    assert score(point, answer).value == expected


def test_points_have_frames_too() -> None:
    args = {"answer_frame": "milli", "images": [PICTURE]}
    assert score(point, "[750,500]", "[100,0,200,100]", **args).value == 1
    assert score(point, "[150,50]", "[100,0,200,100]", **args).value == 0
    assert score(point, "[5,5]", "the cat").kind == "abstain"
