"""Where an answer stands; which answers people would call right or wrong, and what the verifiers call them."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from saccade.config import RewardConfig
from saccade.plugins.verifiers.box_overlap import matched, pair
from saccade.plugins.verifiers.extract import answer_of, extract
from saccade.plugins.verifiers.grounding import read_boxes
from saccade.rewards.reward_sample import RewardSample, to_json
from saccade.rewards.scorer import Scorer
from saccade.rewards.verifiers import FORMATS, VERIFIERS
from saccade.types import Score


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(__file__).with_name(name).read_text("utf-8").splitlines()]


ROWS, SCORED = read("golden_answers.jsonl"), read("scored_answers.jsonl")
COMPARING = [name for name, row in VERIFIERS.items() if row.needs_answer]


def score(verifier: str, response: str = "", answer: Any = None, args: Any = None, **known: Any) -> Score:
    sample = RewardSample(id="a", response=response, answer=answer, **known)
    return VERIFIERS[verifier].function(sample, **(args or {}))


def right(row: dict[str, Any]) -> bool:
    found = score(row["verifier"], row["response"], row["gold"], row.get("args"), choices=row.get("choices", ()))
    outcome = found.parts.get("accuracy", found.value)  # without what the shape earns
    assert found.kind != "error", row
    return found.kind == "value" and outcome == 1


def test_right_answers_pass_and_no_other():
    assert [row for row in ROWS if right(row) != row["right"]] == []


def test_every_part_of_a_score():
    """`about` says what a row shows."""
    for row in SCORED:
        sample, wanted = row["sample"], row["score"]
        if isinstance(sample.get("answer"), list):
            sample = sample | {"answer": tuple(sample["answer"])}
        found = score(row["verifier"], args=row.get("args"), **sample)
        numbers = {"value": found.value, **found.parts}
        assert numbers == pytest.approx({"value": wanted["value"], **wanted.get("parts", {})}), row
        said = (found.kind, found.reason, found.extracted or None, dict(found.info))
        assert said == (wanted["kind"], wanted.get("reason", ""), wanted.get("extracted"), wanted.get("info", {})), row


@pytest.mark.parametrize("name", COMPARING)
def test_no_gold_is_no_verdict(name):
    blank = ("", " \n", (), ("", " "), "[]", "null", ("[]", ""))
    more = {"math": [{"gold_unparseable": "string"}, {"gold_unparseable": "error"}]}
    for answer in (None,) if VERIFIERS[name].blank_counts else (None, *blank):
        for response in ("", "<answer>7</answer>", r"\boxed{7}"):
            for args in ({}, *more.get(name, [])):
                assert score(name, response, answer, args, choices=("a", "b")).kind == "abstain"


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.check])
def test_what_a_format_renders_passes_its_own_check(name):
    shown = FORMATS[name].render("B" if name == "letter" else "12")
    assert score(f"format:{name}", shown, choices=("cat", "dog")).value == 1


@pytest.mark.parametrize(("verifier", "args", "words"), [
    ("medical", {"weights": {"lenght": 0}}, "weights are those of labels, boxes, json, length"),
    ("iou", {"mode": "dice"}, "mode is iou, giou, set, map, mask or iou@"),
    ("iou", {"mode": "iou@2"}, "mode is iou"),
    ("iou", {"mode": "set", "dice": True}, "dice is for mode iou or mask, not 'set'"),
    ("overlong", {}, "0 < buffer < 2048 .the token limit., such as {verifier: overlong, args: {buffer: 512}}"),
    ("length", {}, "either target"),
    ("sokoban", {}, "solved at its start"),
    ("hybrid", {"rule": "maths"}, "rule is auto, choice, math.*not 'maths'"),
])  # fmt: skip
def test_arguments_and_rows_of_no_use_are_refused(verifier, args, words):
    solved = {"level": "#####\n#@ *#\n#####"}
    with pytest.raises(ValueError, match=words):
        score(verifier, "<answer>left</answer>", "[0,0,1,1]", args, extra=solved, max_tokens=2048)


def test_the_matching_is_the_best_of_all():
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


def test_masks_may_have_another_size_than_their_picture(tmp_path):
    mask = np.zeros((50, 100), np.uint8)
    mask[:, 50:] = 255
    Image.fromarray(mask).save(tmp_path / "mask.png")
    np.save(tmp_path / "mask.npy", mask)
    picture = {"size": [200, 100], "pixels": [3136, 1_003_520]}
    boxes = {"[100,0,200,100]": 1, "[100,0,200,50],[100,50,200,100]": 1, "[0,0,200,100]": 0.5, "[]": 0}
    for value in (mask, str(tmp_path / "mask.png"), str(tmp_path / "mask.npy")):
        for said, wanted in boxes.items():
            known: Any = {"extra": {"segmentation_path": value}, "images": [picture]}
            assert score("iou", f"<answer>{said}</answer>", None, {"mode": "mask"}, **known).value == wanted
            dice = score("iou", f"<answer>{said}</answer>", None, {"mode": "mask", "dice": True}, **known)
            assert dice.value == pytest.approx({0.5: 2 / 3}.get(wanted, wanted))


def test_levels_as_grids_and_files(tmp_path):
    grid = np.array([[0, 0, 0, 0, 0], [0, 5, 4, 2, 0], [0, 0, 0, 0, 0]])
    np.save(tmp_path / "level.npy", grid)
    np.save(tmp_path / "objects.npy", np.array([{"a": 1}], dtype=object))
    for level in (grid, str(tmp_path / "level.npy")):
        assert score("sokoban", "<answer>right</answer>", extra={"level": level}).value == 1
    with pytest.raises(ValueError, match="allow_pickle=False"):
        score("sokoban", "<answer>right</answer>", extra={"level": str(tmp_path / "objects.npy")})
    assert score("sokoban", "<answer>right</answer>", extra={"level": None}).kind == "error"


def test_the_use_of_tools_costs_as_far_as_the_answer_is_right():
    calls = [{"name": "zoom", "ok": n > 1} for n in (1, 2, 3)]
    for args, answer, reward in (({}, "7", 0.9), ({}, "8", 0.0), ({"penalty": 0.0, "bonus": 0.5}, "7", 1.5)):
        config = RewardConfig(terms=["count", {"verifier": "tool_use", "args": args}])
        with Scorer(config, prompt_format="direct", max_tokens=64) as scorer:
            (scored,) = scorer.score([RewardSample(id="a", response=answer, answer="7", tool_calls=calls)])
        assert scored.reward == pytest.approx(reward) and scored.outcome == float(answer == "7")


MATH = ("answer_tag", "boxed", "answer_line")


@pytest.mark.parametrize(("response", "order", "found"), [
    ("<answer>1</answer> no: <answer>2</answer>", MATH, "2"),
    ("<answer>1</answer><answer>2", MATH, "1"),
    (r"<answer>so \boxed{\frac{1}{2}}</answer>", MATH, r"\frac{1}{2}"),
    (r"\boxed{1} and \boxed{\{2\}}", MATH, r"\{2\}"),
    (r"\boxed{1} and \boxed{2", MATH, "1"),
    (r"\boxed{\boxed{5}}", MATH, "5"),
    (r"\boxed{}", MATH, ""),
    ("steps\n**Final answer:** 12", MATH, "12"),
    ("Answer: 3\nAnswer: $4$", MATH, "$4$"),
    ("my answer: is late", ("answer_line",), None),
    ("Answer: 3" + "\nfurther" * 60, MATH, None),
    ("so #### 72\n", ("hash",), "72"),
    ("it is 7, not 8.5", ("last_number",), "8.5"),
    ("The answer is (B).", ("letter",), "B"),
    ("(A) or (B)", ("letter",), None),
    ("  cat ", ("whole",), "cat"),
])  # fmt: skip
def test_order_and_places(response, order, found):
    assert extract(response, order) == found


@pytest.mark.parametrize(("response", "prefilled", "found"), [
    ("<think><answer>1</answer></think><answer>2</answer>", False, "2"),
    ("<think><answer>1</answer></think>", False, None),
    ("<answer>1</answer>", True, None),
    ("a thought</think><answer>1</answer>", True, "1"),
    ("<think>a</think><think>b<answer>1</answer>", False, None),
])  # fmt: skip
def test_scope_is_what_follows_the_last_closed_thought(response, prefilled, found):
    assert extract(response, MATH, think_prefilled=prefilled) == found
    assert extract("<think><answer>1</answer>", MATH, scope="all") == "1"


def test_an_answer_of_several_turns_stands_in_the_last_one():
    turns = ("<answer>3</answer> wait", "<think>so</think><answer>7</answer>")
    for given, found in ((turns, "7"), ((*turns, "hm"), None), ((), "7"), (("x",), "7")):
        sample = RewardSample(id="a", response="".join(turns), turns=given)
        assert answer_of(sample, ["answer_tag"], "after_think") == found
        sent = RewardSample(**json.loads(to_json(sample, brief=True)))
        assert answer_of(sent, ["answer_tag"], "after_think") == found


@pytest.mark.parametrize(("last", "found"), [
    ('<think>Look.</think><grounding>{"bbox_2d": [0, 0.5, 1, 1]}</grounding>', None),
    ('<tool_call>{"name": "calculator", "arguments": {"expression": "3*4"}}</tool_call>', None),
    ('<grounding>{"bbox_2d": [0, 0.5', None),
    ("<grounding>[1] <answer>7</answer>", "7"),
])  # fmt: skip
def test_a_call_is_no_answer(last, found):
    for turns in ((last,), ("I see 99.", last)):
        sample = RewardSample(id="a", response="\n".join(turns), turns=turns)
        assert answer_of(sample, ("answer_tag", "last_number"), "after_think") == found
