from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.user_functions import call, check_arguments, form_of, split_name, to_score, to_scores
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
def other(answer, question): ...
def batch(samples, bonus=0.0): ...
def easyr1(reward_input, **kwargs): ...
def easyr1_batch(reward_inputs, format_weight=0.1): ...
def r1v(prompts, completions, **columns): ...
def r1v_short(completions, solution, **kwargs): ...
def lmmr1(queries, prompts, labels): ...
def lmmr1_old(queries, prompts): ...
def verl(data_source, solution_str, ground_truth, extra_info=None): ...
def verl_batch(data_sources=None, solution_strs=None, ground_truths=None, **kwargs): ...
def easyr1_old(predicts, ground_truths, format_weight=0.1): ...
def easyr1_older(predict_str, ground_truth): ...
def easyr1_oldest(predict, ground_truth): ...
def trl_ids(completion_ids, **kwargs): ...
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
        (lmmr1_old, "queries", True),
        (verl, "solution_str", False),
        (verl_batch, "solution_strs", True),
        (easyr1_old, "predicts", True),
        (easyr1_older, "predict_str", False),
        (easyr1_oldest, "predict", False),
        (trl_ids, "completion_ids", True),
    ],
)
def test_the_form_follows_from_parameter_names(function: Callable[..., Any], form: str, is_batch: bool) -> None:
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

    def verl(data_source, solution_str, ground_truth, extra_info):
        return data_source, solution_str, ground_truth, extra_info

    def verl_batch(solution_strs, data_sources, **others):
        return solution_strs, data_sources, others

    told = replace(SAMPLES[1], extra={"extra_info": {"index": 7}})
    assert called(verl, SAMPLES[1]) == ("default", "r1", "1", {"level": 1})
    assert called(verl, told) == ("default", "r1", "1", {"index": 7})
    golds = {"ground_truths": ["0", "1"], "extra_infos": [{"level": 0}, {"level": 1}]}
    assert called(verl_batch, SAMPLES) == (["r0", "r1"], ["default"] * 2, golds)

    def easyr1_old(predicts, ground_truths, weight):
        return predicts, ground_truths, weight

    def easyr1_older(predict_str, ground_truth):
        return predict_str, ground_truth

    assert called(easyr1_old, SAMPLES, weight=2) == (["r0", "r1"], ["0", "1"], 2)
    assert called(easyr1_older, SAMPLES[1]) == ("r1", "1")


def test_arguments_are_checked_against_the_signature() -> None:
    check_arguments(per_sample, {"bonus": 1})
    for function in (r1v_short, verl, verl_batch, easyr1_old, easyr1_older, lmmr1_old, trl_ids):
        check_arguments(function, {})
    check_arguments(easyr1_old, {"format_weight": 0.5})
    with pytest.raises(TypeError, match=r"'bonus'; .*\(here: format_weight\)"):
        check_arguments(easyr1_old, {"bonus": 1})
    adapter = r"def mine\(sample\): return other\(sample.response, sample.answer\)"
    with pytest.raises(TypeError, match=rf"'question'; .*{adapter}"):
        check_arguments(other, {})
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
        ({"score": 0.5, "acc": True, "pred": "7"}, 0.5, {"accuracy": 1.0}),
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
        ({"points": 1}, "bad_type"),
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
