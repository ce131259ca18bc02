from __future__ import annotations

from saccade.plugins.verifiers.short_answers import choice
from saccade.rewards.reward_sample import RewardSample

OPTIONS = ("a dog", "cat", "7", "none of these")


def sample(response: str, answer: str | tuple[str, ...]) -> RewardSample:
    return RewardSample(id="a", response=response, answer=answer, choices=OPTIONS)


def test_gold_may_be_a_letter_a_text_or_a_listed_option() -> None:
    for gold in ("B", "(B)", "cat", "B. cat"):
        assert choice(sample("<answer>B</answer>", gold)).value == 1
    assert choice(sample("<answer>B</answer>", "horse")).kind == "abstain"


def test_multi_select_compares_sets() -> None:
    assert choice(sample("<answer>C, A</answer>", "A,C")).value == 1
    assert choice(sample("<answer>A and C</answer>", ("A", "C"))).value == 1
    assert choice(sample("<answer>AC</answer>", "AC")).value == 1
    assert choice(sample("<answer>A</answer>", "AC")).value == 0
    assert choice(sample("<answer>A, B, C</answer>", "AC")).value == 0


def test_free_text_needs_one_named_letter() -> None:
    assert choice(sample("I compare them. The answer is B.", "B")).value == 1
    assert choice(sample("It is (A), no, (B).", "B")).value == 0
    assert choice(sample("It looks like a dog", "A")).value == 0


def test_rows_without_listed_options() -> None:
    bare = RewardSample(id="a", response=r"\boxed{E}", answer="E")
    assert choice(bare).value == 1
