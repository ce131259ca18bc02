from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from saccade.rewards.custom import call, check_arguments, form_of, split_name, to_score, to_scores
from saccade.rewards.sample import RewardSample
from saccade.types import Score

SAMPLES = [
    RewardSample(
        id=str(index),
        response=f"r{index}",
        prompt=f"p{index} ",
        answer=str(index),
        length=index,
        messages=[{"role": "user", "content": f"p{index}"}],
        extra={"level": index},
    )
    for index in range(2)
]


def per_sample(sample, bonus=0.0): ...
def any_name(x): ...
def batch(samples, bonus=0.0): ...
def easyr1(reward_input, **kwargs): ...
def easyr1_batch(reward_inputs, format_weight=0.1): ...
def r1v(prompts, completions, **columns): ...
def r1v_short(completions, solution, **kwargs): ...
def lmmr1(queries, prompts, labels): ...
async def asynchronous(samples): ...


@pytest.mark.parametrize(
    ("function", "form", "is_batch"),
    [
        (per_sample, "sample", False),
        (any_name, "sample", False),
        (batch, "samples", True),
        (asynchronous, "samples", True),
        (easyr1, "reward_input", False),
        (easyr1_batch, "reward_inputs", True),
        (r1v, "completions", True),
        (r1v_short, "completions", True),
        (lmmr1, "queries", True),
    ],
)
def test_the_form_follows_from_parameter_names(
    function: Callable[..., Any], form: str, is_batch: bool
) -> None:
    assert (form_of(function).name, form_of(function).batch) == (form, is_batch)


def called(function: Callable[..., Any], given: Any, **args: Any) -> Any:
    return call(function, form_of(function), given, args)


def test_what_each_form_is_given() -> None:
    def easyr1(reward_input, weight):
        return reward_input, weight

    def r1v(prompts, completions, solution, level, **kwargs):
        return prompts[1][0]["content"], completions[1][0]["content"], solution, level

    def short(completions, solution):
        texts = [completion[0]["content"] for completion in completions]
        return texts == [f"r{label}" for label in solution]

    def lmmr1(queries, prompts, labels):
        return queries, prompts, labels

    expected = {"response": "r1", "response_length": 1, "ground_truth": "1"}
    assert called(easyr1, SAMPLES[1], weight=2) == (expected, 2)
    assert called(r1v, SAMPLES) == ("p1", "r1", ["0", "1"], [0, 1])
    assert called(short, SAMPLES) is True
    assert called(lmmr1, SAMPLES) == (["p0 r0", "p1 r1"], ["p0 ", "p1 "], ["0", "1"])


def test_arguments_are_checked_against_the_signature() -> None:
    check_arguments(per_sample, {"bonus": 1})
    check_arguments(r1v_short, {})
    with pytest.raises(TypeError, match=r"'bonsu'; .*f\(sample\), .*\(here: bonus\)"):
        check_arguments(per_sample, {"bonsu": 1})
    with pytest.raises(TypeError, match="weight"):
        check_arguments(lambda sample, weight: 0, {})


@pytest.mark.parametrize(
    ("result", "value", "parts"),
    [
        (1, 1.0, {}),
        (True, 1.0, {}),
        (np.float32(0.5), 0.5, {}),
        ({"overall": 0.9, "accuracy": 1, "format": 0}, 0.9, {"accuracy": 1.0, "format": 0.0}),
        ({"value": 2, "parts": {"a": 1}, "note": "text"}, 2.0, {"a": 1.0}),
        (Score(kind="value", value=3.0), 3.0, {}),
    ],
)
def test_results_that_count(result: Any, value: float, parts: dict[str, float]) -> None:
    score = to_score(result)
    assert (score.kind, score.value, dict(score.parts)) == ("value", value, parts)


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (None, "none"),
        (math.nan, "nan"),
        (math.inf, "infinite"),
        ("1", "bad_type"),
        ([1.0], "bad_type"),
        ({"score": 1}, "bad_type"),
        ({"overall": None}, "none"),
        ({"overall": 1.0, "accuracy": math.nan}, "nan"),
        (Score(kind="value", value=1.0, parts={"a": math.nan}), "nan"),
    ],
)
def test_results_that_are_errors(result: Any, kind: str) -> None:
    score = to_score(result)
    assert (score.kind, score.reason.partition(":")[0]) == ("error", kind)


def test_list_results() -> None:
    values = [score.value for score in to_scores(np.array([1.0, 0.5]), 2) or []]
    assert values == [1.0, 0.5]
    assert [s.value for s in to_scores({"rewards": [1, 2], "extra": 0}, 2) or []] == [1.0, 2.0]
    assert to_scores([1.0], 2) is None
    assert to_scores(1.0, 1) is None


def test_names() -> None:
    assert split_name("a/b.py:f") == ("a/b.py", "f")
    assert split_name("a/b.py") == ("a/b.py", "compute_score")
    assert split_name("format:think_answer") is None
