from __future__ import annotations

from typing import Any

import pytest

from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.verifiers import FORMATS, VERIFIERS


def value(name: str, response: str, prefilled: bool = False, **args: Any) -> float:
    sample = RewardSample(id="a", response=response, think_prefilled=prefilled, choices=("cat", "dog"))
    return VERIFIERS[f"format:{name}"].function(sample, **args).value


def test_a_prefilled_thought_is_not_required_again() -> None:
    assert value("think_answer", "a</think><answer>b</answer>", prefilled=True) == 1
    assert value("think_answer", "<think>a</think><answer>b</answer>", prefilled=True) == 0
    assert value("think_boxed", r"a</think>\boxed{1}", prefilled=True) == 1


def test_gap_none_wants_the_blocks_to_touch() -> None:
    assert value("think_answer", "<think>a</think>\n<answer>b</answer>", gap="none") == 0
    assert value("think_answer", "<think>a</think><answer>b</answer>", gap="none") == 1


CALL = '<think>small</think><grounding>{"bbox_2d": [0, 0, 1, 1]}</grounding>'
FINAL = "<think>a</think><answer>b</answer>"


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ((FINAL,), 1),
        ((CALL, FINAL), 1),
        ((CALL, CALL, FINAL), 1),
        ((CALL,), 0),
        ((CALL, "<think>a</think> b"), 0),
        ((FINAL, FINAL), 0),
        ((CALL + CALL, FINAL), 0),  # one call a turn
        (("<grounding>{}</grounding>", FINAL), 0),
        (("<think>a</think><grounding> </grounding>", FINAL), 0),
        (("<think><answer>b</answer></think><grounding>{}</grounding>", FINAL), 0),
        ((CALL, "so", FINAL), 0),
    ],
)
def test_grounding_looks_at_every_turn(turns: tuple[str, ...], expected: float) -> None:
    check = VERIFIERS["format:grounding"].function
    assert check(RewardSample(id="a", response="".join(turns), turns=turns)).value == expected
    opened = tuple(turn.removeprefix("<think>") for turn in turns)
    prefilled = RewardSample(id="a", response="", turns=opened, think_prefilled=True)
    if all(turn.startswith("<think>") for turn in turns):
        assert check(prefilled).value == expected


@pytest.mark.parametrize(
    ("boxes", "thought", "expected"),
    [
        ('```json\n[{"bbox_2d": [0, 0, 1, 1], "label": "a"}]\n```\n', "<think>a</think>", 1),
        ("```json\n[]\n```", "<think>a</think>", 1),
        ('```json\n[{"bbox_2d": [0, 0, 1, 1]}]\n```', "<think>a</think>", 0),
        ("```json\nhere\n```", "<think>a</think>", 0),
        ("", "<think>a</think>", 0),
        ("```json\n[]\n```", "", 0),
    ],
)
def test_boxes_json(boxes: str, thought: str, expected: float) -> None:
    assert value("boxes_json", boxes + thought + r"\boxed{1}") == expected


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.check])
def test_what_a_format_renders_passes_its_own_check(name: str) -> None:
    assert value(name, FORMATS[name].render("B" if name == "letter" else "12")) == 1
