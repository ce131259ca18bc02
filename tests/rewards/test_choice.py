from __future__ import annotations

import pytest

from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.short_answers import choice

OPTIONS = ("a dog", "cat", "7", "none of these")


def sample(response: str, answer: str | tuple[str, ...]) -> RewardSample:
    return RewardSample(id="a", response=response, answer=answer, choices=OPTIONS)


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        ("B", "B", 1),
        ("b", "B", 1),
        ("(b)", "B", 1),
        ("B.", "B", 1),
        ("B)", "B", 1),
        ("B. cat", "B", 1),
        ("B: cat", "B", 1),
        ("(B) cat", "B", 1),
        ("The answer is B", "B", 1),
        ("The answer is B.", "B", 1),
        ("the answer is (B) because of the ears", "B", 1),
        ("cat", "B", 1),
        ("Cat.", "B", 1),
        ("7", "C", 1),
        ("A or B", "B", 0),
        ("A or B", "A", 0),
        ("(A) or (B)", "B", 0),
        ("A, B", "B", 0),
        ("A cat", "A", 0),
        ("The answer is A cat", "A", 0),
        ("a cat", "A", 0),
        ("b cat", "B", 0),
        ("E", "B", 0),
        ("E. cat", "E", 0),
        ("I think so", "B", 0),
        ("Bananas", "B", 0),
        ("", "B", 0),
    ],
)
def test_what_counts_as_naming_an_option(answer: str, gold: str, expected: float) -> None:
    score = choice(sample(f"<answer>{answer}</answer>", gold))
    assert score.value == expected


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


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<answer>B</answer>\nThe other options are wrong.", 1),
        (r"\boxed{B}. Options A and C are incorrect because of the ears.", 1),
        ("The answer is (B). The others are incorrect.", 1),
        ("Answer: B. Options A and C are incorrect.", 1),
        ("The answer is B rather than C.", 1),
        ("Wait, the answer is B", 1),
        ("Actually, the answer is B.", 1),
        ("I'm sorry for the confusion. The answer is B.", 1),
        ("Answer: B\nI made a mistake. Answer: C", 0),
        ("<answer>B</answer> No wait, that is wrong.", 0),
        ("<answer>B</answer> No, it is C.", 0),
        ("<answer>B</answer> Actually, C.", 0),
        ("Answer: B. Sorry, I mean C.", 0),
        ("The answer is (B). That is wrong.", 0),
        ("The answer is (B). Actually, it is a dog.", 0),
        ("The answer is (B). The other one, (C), is not wrong.", 0),
        ("Sorry, I don't know. B", 0),
        ("Neither; B", 0),
        ("<answer>None of them. B</answer>", 0),
    ],
)
def test_words_about_other_options_take_nothing_back(response: str, expected: float) -> None:
    assert choice(sample(response, "B")).value == expected


def test_rows_without_listed_options() -> None:
    bare = RewardSample(id="a", response=r"\boxed{E}", answer="E")
    assert choice(bare).value == 1
