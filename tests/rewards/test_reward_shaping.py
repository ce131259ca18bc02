from __future__ import annotations

from typing import Any

import pytest

from saccade.config import RewardConfig
from saccade.plugins.verifiers.response_shape import length, overlong, repetition, tool_use
from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.scorer import Scorer
from saccade.rewards.verifiers import VERIFIERS


def of_length(tokens: int) -> RewardSample:
    return RewardSample(id="a", response="", length=tokens, max_tokens=2048)


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (1536, 0), (1792, -0.5), (2048, -1), (4000, -1)])
def test_overlong(tokens: int, expected: float) -> None:
    assert overlong(of_length(tokens), buffer=512).value == expected
    assert overlong(of_length(tokens), buffer=512, factor=0.5).value == expected / 2


@pytest.mark.parametrize(
    ("tokens", "expected"), [(16000, 0), (16384, 0), (16385, -0.00024414), (18432, -0.5), (20480, -1), (30000, -1)]
)
def test_overlong_as_in_its_paper(tokens: int, expected: float) -> None:
    value = overlong(of_length(tokens), buffer=4096, limit=20480).value
    assert value == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("buffer", [0, 2048, 5000])
def test_overlong_needs_a_buffer_inside_the_limit(buffer: int) -> None:
    with pytest.raises(ValueError, match="0 < buffer < 2048"):
        overlong(of_length(1), buffer=buffer)


@pytest.mark.parametrize(
    ("text", "n", "expected"),
    [
        ("a b c d a b c d", 2, -3 / 7),
        ("a b c d a b c d", 4, -0.2),
        ("a b c", 4, 0),
        ("", 4, 0),
        ("红红红红", 2, -2 / 3),
    ],
)
def test_repetition(text: str, n: int, expected: float) -> None:
    score = repetition(RewardSample(id="a", response=text), n=n)
    assert score.value == pytest.approx(expected)


def test_length() -> None:
    assert length(of_length(256), target=512).value == 0.5
    assert length(of_length(900), target=512).value == 1
    assert length(of_length(900), band=[64, 512]).value == 0
    assert length(of_length(64), band=[64, 512]).value == 1
    with pytest.raises(ValueError, match="either target"):
        length(of_length(1))


def test_geo3k_is_nine_tenths_answer_and_one_tenth_shape() -> None:
    def scored(response: str) -> tuple[float, dict[str, float]]:
        score = VERIFIERS["geo3k"].function(RewardSample(id="a", response=response, answer="5"))
        return score.value, dict(score.parts)

    assert scored(r"<think>a</think>\boxed{5}") == (1.0, {"accuracy": 1, "format": 1})
    assert scored(r"\boxed{5}") == (0.9, {"accuracy": 1, "format": 0})
    assert scored(r"<think>a</think>\boxed{6}") == (0.1, {"accuracy": 0, "format": 1})


def test_exact() -> None:
    verify = VERIFIERS["exact"].function
    sample = RewardSample(id="a", response="<answer> True. </answer>", answer="true")
    assert verify(sample).value == 1
    assert verify(sample, ignore_case=False).value == 0


CALLS = [{"turn": n, "name": "zoom", "ok": n > 1, "reason": ""} for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("args", "calls", "answer", "reward"),
    [
        ({}, [], "7", 1.0),
        ({}, CALLS, "7", 0.9),
        ({"mode": "per_call"}, CALLS, "7", 0.7),
        ({}, CALLS, "8", 0.0),
        ({"only_if_correct": False}, CALLS, "8", -0.1),
        ({"penalty": 0.0, "bonus": 0.5}, CALLS, "7", 1.5),
        ({"penalty": 0.0, "bonus": 0.5}, CALLS, "8", 0.0),
        ({"penalty": 0.0, "bonus": 0.5}, CALLS[:1], "7", 1.0),
        ({"penalty": 0.0, "bonus": 0.5}, [{"name": "zoom"}], "7", 1.5),
    ],
)
def test_tool_use(args: Any, calls: Any, answer: str, reward: float) -> None:
    config = RewardConfig(terms=["count", {"verifier": "tool_use", "args": args}])
    with Scorer(config, prompt_format="direct", max_tokens=64) as scorer:
        sample = RewardSample(id="a", response=answer, answer="7", tool_calls=calls)
        (scored,) = scorer.score([sample])
    assert scored.reward == pytest.approx(reward)
    assert scored.outcome == float(answer == "7")
    assert scored.parts["tool_use"] == pytest.approx(reward - scored.outcome)


def test_tool_use_knows_two_modes() -> None:
    with pytest.raises(ValueError, match="once or per_call"):
        tool_use(of_length(1), mode="twice")  # type: ignore[arg-type]
