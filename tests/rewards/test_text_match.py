from __future__ import annotations

from typing import Any

import pytest

from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.verifiers import VERIFIERS
from saccade.types import Score


def score(verifier: str, response: str, answer: Any = None, **args: Any) -> Score:
    sample = RewardSample(id="a", response=f"<answer>{response}</answer>", answer=answer)
    return VERIFIERS[verifier].function(sample, **args)


def test_words_are_matched_and_no_sentence_is_read() -> None:
    denied = "it is not a cat"
    assert score("contains_one_of", denied, "cat").value == 1
    assert score("token_recall", denied, "cat").value == 1
    assert score("token_f1", denied, "cat").value == pytest.approx(2 / 5)
    assert score("number", "it is not 7", "7").value == 0  # those that read one do


def test_golds_that_any_text_contains_are_refused() -> None:
    for golds in ("a", ("cat", "A"), "", None):
        assert score("contains_one_of", "a cat", golds).kind == "abstain"


def test_case_counts_where_it_is_asked_for() -> None:
    assert score("contains_one_of", "paris", "Paris", ignore_case=False).value == 0
    assert score("exact", "paris.", "Paris").value == 1
    assert score("exact", "paris", "Paris", ignore_case=False).value == 0


def test_regex_searches_the_answer() -> None:
    assert score("regex", "item 42", pattern=r"\b\d{2}\b").value == 1
    assert score("regex", "item 4", pattern=r"\b\d{2}\b").reason == "wrong"
    assert score("regex", "", pattern="a*").reason == "no_answer"
