from __future__ import annotations

from typing import Any

import pytest

from saccade.plugins.verifiers.short_answers import VERDICTS, avqa, dapo_math, digit, verdict
from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.verifiers import VERIFIERS
from saccade.types import Score


def score(verifier: Any, response: str, answer: Any, choices: Any = (), **args: Any) -> Score:
    sample = RewardSample(id="a", response=response, answer=answer, choices=choices)
    return verifier(sample, **args)


def test_digits_outside_of_the_allowed_ones() -> None:
    assert score(digit, "<answer>9</answer>", "9", allowed="012").kind == "abstain"
    assert score(digit, "<answer>9 of 2</answer>", "2", allowed="012").value == 1
    with pytest.raises(ValueError, match="single digits"):
        score(digit, "1", "1", allowed=["10"])


@pytest.mark.parametrize(
    ("response", "gold", "expected"),
    [
        ("Answer: 12", "12", 1),
        ("so\n**Answer:** $12$.", "12", 1),
        (r"Answer: \boxed{\dfrac{1}{2}}", r"\frac12", 1),
        ("Answer: 13", "12", -1),
        ("Answer: 12\nAnswer: 13", "12", -1),
        ("12", "12", -1),
        ("", "12", -1),
        ("Answer: 12" + " so" * 200, "12", -1),  # not in the last 300 characters
        ("Answer: 0.5", r"\frac12", -1),  # spelling, not value
    ],
)
def test_dapo_math(response: str, gold: str, expected: float) -> None:
    result = score(dapo_math, response, gold)
    assert (result.value, result.parts) == (expected, {"accuracy_normalized": expected > 0})


THOUGHT = "<think>x</think>"


@pytest.mark.parametrize(
    ("response", "gold", "expected"),
    [
        (f"{THOUGHT}<answer>rain</answer>", "rain", 2),
        (f"{THOUGHT}<answer>Rain.</answer>", "rain", 2),
        (f"{THOUGHT}<answer>A</answer>", "rain", 2),
        (f"{THOUGHT}<answer>(B) wind</answer>", "1", 2),
        (f"{THOUGHT}<answer>1</answer>", "B", 2),
        (f"{THOUGHT}<answer>wind</answer>", "rain", 1),
        ("<answer>rain</answer>", "rain", 1),
        ("rain", "rain", 0),
    ],
)
def test_avqa(response: str, gold: str, expected: float) -> None:
    assert score(avqa, response, gold, ("rain", "wind")).value == expected


def test_avqa_without_listed_options() -> None:
    assert score(avqa, f"{THOUGHT}<answer>rain</answer>", "rain").value == 2
    table = VERIFIERS["avqa"].function
    assert score(table, f"{THOUGHT}<answer>rain</answer>", None).kind == "abstain"


@pytest.mark.parametrize("medium", VERDICTS)
@pytest.mark.parametrize(("gold", "side"), [("A", 0), ("2", 1), ("tie", 2), ("C", 2)])
def test_verdict(medium: str, gold: str, side: int) -> None:
    for said, phrase in enumerate(VERDICTS[medium]):
        result = score(verdict, f"{THOUGHT}<answer>{phrase}</answer>", gold)
        assert result.value == 1 + (said == side)
        assert result.parts == {"accuracy": said == side, "format": 1}


def test_a_verdict_names_one_side() -> None:
    both = "Image 1 is better, no, Image 2 is better"
    for answer in (both, "Image 1", "Image 1 is not better", "1", ""):
        assert score(verdict, f"<answer>{answer}</answer>", "A").value == 0
    longer = "<answer>Image 1 is better than Image 2.</answer>"
    assert score(verdict, longer, "A").value == 1
    assert score(verdict, longer, "Image 1 is better").value == 1
    assert score(verdict, longer, "D").kind == "abstain"
