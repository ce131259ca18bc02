from __future__ import annotations

from typing import Any

import pytest

from saccade.rewards.numbers import count, gsm8k, number
from saccade.rewards.reward_sample import RewardSample
from saccade.types import Score


def score(verifier: Any, response: str, answer: str, **args: Any) -> Score:
    return verifier(RewardSample(id="a", response=response, answer=answer), **args)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("7", 1),
        ("7.0", 1),
        ("seven", 1),
        ("Seven", 1),
        ("There are 7 items", 1),
        ("$7$", 1),
        ("7 or 8", 0),
        ("7.5", 0),
        ("-7", 0),
        ("3-7", 0),
        ("x7", 0),
        ("many", 0),
        ("1e1000000000", 0),
        ("7" * 5000, 0),
        ("", 0),
    ],
)
def test_count_of_seven(answer: str, expected: float) -> None:
    assert score(count, f"<answer>{answer}</answer>", "7").value == expected
    assert score(count, answer, "7").value == expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (r"The answer is \boxed{7}. Note that 8 would be incorrect.", 1),
        ("Answer: 7\nNo other objects are visible.", 1),
        ("Answer: 7. No other objects are visible.", 1),
        ("<answer>7</answer>\nActually this matches the picture.", 1),
        ("There are 7 apples, not 8.", 1),
        ("So the answer is 7 (no more, no less).", 1),
        ("I count seven. There are no others.", 1),
        ("Answer: 7 (not counting the reflection)", 1),
        ("There are 8 apples, not 7.", 0),
        ("not 8, not 7", 0),
        ("There are 7. No more than two are green.", 0),
        ("Answer: 7\nI made a mistake.", 0),
        ("<answer>7</answer> I miscounted.", 0),
        ("<answer>7</answer> Actually, it is 8.", 0),
    ],
)
def test_words_about_other_numbers_take_nothing_back(response: str, expected: float) -> None:
    assert score(count, response, "7").value == expected


def test_count_reads_numbers_as_they_are_written() -> None:
    assert score(count, "<answer>1,000</answer>", "1000").value == 1
    assert score(count, "<answer>twenty</answer>", "20").value == 1
    assert score(count, "<answer>\u22123</answer>", "-3").value == 1
    assert score(count, "<answer>9</answer>", "7", tolerance=2).value == 1
    assert score(count, "<answer>10</answer>", "7", tolerance=2).value == 0
    assert score(count, "<answer>7</answer>", "several").kind == "abstain"


def test_only_a_single_number_counts_as_read() -> None:
    assert score(count, "<answer>There are 7 items</answer>", "7").extracted == "There are 7 items"
    for verifier, answer in ((count, "7 or 8"), (number, "many"), (gsm8k, "a few")):
        read = score(verifier, f"<answer>{answer}</answer>", "7")
        assert (read.value, read.reason, read.extracted) == (0, "not_one_number", None)


def test_number_tolerances() -> None:
    assert score(number, "<answer>10.4</answer>", "10", rel_tol=0.05).value == 1
    assert score(number, "<answer>10.6</answer>", "10", rel_tol=0.05).value == 0
    assert score(number, "<answer>10.4</answer>", "10").value == 0
    assert score(number, "<answer>3.14</answer>", "3.1416", decimals=2).value == 1
    assert score(number, "<answer>3.15</answer>", "3.1416", decimals=2).value == 0
    assert score(number, "<answer>-9.6</answer>", "-10", rel_tol=0.05).value == 1


@pytest.mark.parametrize(
    ("response", "gold", "mode", "expected"),
    [
        ("#### 72", "72", "default", 1),
        ("#### $1,200", "1200", "default", 1),
        ("#### 72.", "48/2 = 24 and so on\n#### 72", "default", 1),
        ("<answer>72</answer>", "72", "default", 1),
        (r"\boxed{72}", "72", "boxed", 1),
        ("so 72", "72", "default", 0),
        ("so 72", "72", "strict", 0),
        ("so 72", "72", "flexible", 1),
        ("72 of 80", "72", "flexible", 0),
    ],
)
def test_gsm8k(response: str, gold: str, mode: str, expected: float) -> None:
    assert score(gsm8k, response, gold, mode=mode).value == expected
