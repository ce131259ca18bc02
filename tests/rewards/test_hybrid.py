"""Who goes to the judge: nobody whom a rule can settle."""

from __future__ import annotations

from typing import Any

import pytest

from saccade.config import RewardConfig
from saccade.errors import ConfigError
from saccade.plugins.verifiers.hybrid import ASK, hybrid, judge
from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.scorer import Scorer

OPTIONS = ("a cat", "a dog")


def answered(answer: str, gold: Any, choices: tuple[str, ...] = ()) -> RewardSample:
    return RewardSample(id="a", response=f"<answer>{answer}</answer>", answer=gold, choices=choices)


@pytest.mark.parametrize(
    ("sample", "value"),
    [
        (answered("B", "B", OPTIONS), 1),
        (answered("a dog", "B", OPTIONS), 1),
        (answered("A", "B", OPTIONS), 0),
        (answered("some animal", "B", OPTIONS), 0),  # what `choice` calls wrong is wrong
        (answered("(b)", "B"), 1),
        (answered("7", "7"), 1),
        (answered("8", "7"), 0),
        (answered("1/2", "0.5"), 1),
        (answered("100 cm", "1 m"), 1),
        (answered("The Red Car.", "the red car"), 1),
        (answered("", "the red car"), 0),
        (RewardSample(id="a", response="<think>so the red car", answer="the red car"), 0),
    ],
)
def test_settled_by_the_rule(sample: RewardSample, value: float) -> None:
    score = hybrid(sample)
    assert (score.kind, score.value, dict(score.info)) == ("value", value, {})


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("a crimson automobile", "the red car"),
        ("about 7 o'clock", "7"),
        ("x^2 + 1", "x^2 + 2"),
        ("blue", ("red", "crimson")),
    ],
)
def test_left_to_the_judge(answer: str, gold: Any) -> None:
    score = hybrid(answered(answer, gold))
    assert score.info == {ASK: True} and score.extracted == answer
    assert score.value == 0


def test_the_rule_can_be_named() -> None:
    near = {"rule": "number", "options": {"rel_tol": 0.05}}
    assert hybrid(answered("10.4", "10"), **near).value == 1
    assert hybrid(answered("about 11 or 12", "10"), rule="number").info == {}
    assert hybrid(answered("10.4", "10"), rule="exact").info == {}  # both are plain numbers
    assert hybrid(answered("ten", "10"), rule="exact").info == {ASK: True}


def test_a_judge_without_a_rule_sees_every_answer() -> None:
    assert judge(answered("7", "7")).info == {ASK: True}
    assert (judge(answered("", "7")).value, judge(answered("", "7")).reason) == (0, "no_answer")
    assert judge(answered("7", None)).kind == hybrid(answered("7", "")).kind == "abstain"
    assert not judge(answered("7", None)).info


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"rule": "maths"}, "rule is auto, choice, math.*not 'maths'"),
        ({"options": {"rel_tol": 1}}, "name it, such as rule: number"),
        ({"rule": "number", "options": {"tol": 1}}, "tol"),
        ({"rool": "math"}, "did you mean 'rule'"),
    ],
)
def test_what_cannot_run_is_refused(args: dict[str, Any], said: str) -> None:
    config = RewardConfig(terms=[{"verifier": "hybrid", "args": args}])
    with pytest.raises(ConfigError, match=said):
        Scorer(config, prompt_format="think_answer", max_tokens=64)
