from __future__ import annotations

from typing import Any

from saccade.plugins.verifiers.numbers import count, gsm8k, number
from saccade.rewards.reward_sample import RewardSample
from saccade.types import Score


def score(verifier: Any, response: str, answer: str, **args: Any) -> Score:
    return verifier(RewardSample(id="a", response=response, answer=answer), **args)


def test_count_reads_numbers_as_they_are_written() -> None:
    assert score(count, "<answer>1,000</answer>", "1000").value == 1
    assert score(count, "<answer>twenty</answer>", "20").value == 1
    assert score(count, "<answer>\u22123</answer>", "-3").value == 1
    assert score(count, "<answer>9</answer>", "7", tolerance=2).value == 1
    assert score(count, "<answer>10</answer>", "7", tolerance=2).value == 0
    assert score(count, "<answer>7</answer>", "several").kind == "abstain"
    assert score(count, "7" * 5000, "7").value == 0


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
