import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from saccade.plugins.reward_workers.user_functions import call, check_arguments, form_of, to_score, to_scores
from saccade.rewards.reward_sample import RewardSample
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


def with_parameters(parameters: str) -> Callable[..., Any]:
    return eval(f"lambda {parameters}: None")


@pytest.mark.parametrize(
    ("parameters", "form", "is_batch"),
    [
        ("sample, bonus=0.0", "sample", False),
        ("samples, bonus=0.0", "samples", True),
        ("reward_input, **kwargs", "reward_input", False),
        ("reward_inputs, format_weight=0.1", "reward_inputs", True),
        ("prompts, completions, **columns", "completions", True),
        ("queries, prompts, labels", "queries", True),
        ("data_source, solution_str, ground_truth, extra_info=None", "solution_str", False),
        ("data_sources=None, solution_strs=None, ground_truths=None, **kwargs", "solution_strs", True),
        ("predicts, ground_truths, format_weight=0.1", "predicts", True),
        ("predict_str, ground_truth", "predict_str", False),
        ("completion_ids, **kwargs", "completion_ids", True),
    ],
)
def test_the_form_follows_from_parameter_names(parameters, form, is_batch):
    function = with_parameters(parameters)
    assert (form_of(function).known_by[0], form_of(function).batch) == (form, is_batch)
    check_arguments(function, {})


def called(function: Callable[..., Any], given: Any, **args: Any) -> Any:
    return call(function, form_of(function), given, args)


def test_what_each_form_is_given():
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


@pytest.mark.parametrize(
    ("parameters", "args", "words"),
    [
        ("predicts, ground_truths, format_weight=0.1", {"bonus": 1}, r"'bonus'; .*\(here: format_weight\)"),
        (
            "answer, question",
            {},
            r"'question'; .*def mine\(sample\): return <lambda>\(sample.response, sample.answer\)",
        ),
        ("sample, bonus=0.0", {"bonsu": 1}, r"'bonsu'; .*f\(sample\), .*\(here: bonus\)"),
    ],
)
def test_arguments_are_checked_against_the_signature(parameters, args, words):
    check_arguments(with_parameters("sample, bonus=0.0"), {"bonus": 1})
    with pytest.raises(TypeError, match=words):
        check_arguments(with_parameters(parameters), args)


@pytest.mark.parametrize(
    ("result", "value", "parts"),
    [
        (1, 1.0, {}),
        (np.float32(0.5), 0.5, {}),
        ({"overall": 0.9, "accuracy": 1, "format": 0}, 0.9, {"accuracy": 1.0, "format": 0.0}),
        ({"value": 2, "parts": {"a": 1}, "note": "text"}, 2.0, {"a": 1.0}),
        ({"score": 0.5, "acc": True, "pred": "7"}, 0.5, {"accuracy": 1.0}),
        (Score(kind="value", value=3.0), 3.0, {}),
    ],
)
def test_results_that_count(result, value, parts):
    score = to_score(result)
    assert (score.kind, score.value, dict(score.parts)) == ("value", value, parts)


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (None, "none"),
        (math.nan, "nan"),
        ("1", "bad_type"),
        ({"points": 1}, "bad_type"),
        ({"overall": 1.0, "accuracy": math.nan}, "nan"),
        (Score(kind="value", value=1.0, parts={"a": math.nan}), "nan"),
    ],
)
def test_results_that_are_errors(result, kind):
    score = to_score(result)
    assert (score.kind, score.reason.partition(":")[0]) == ("error", kind)


def test_list_results():
    values = [score.value for score in to_scores(np.array([1.0, 0.5]), 2) or []]
    assert values == [1.0, 0.5]
    assert [s.value for s in to_scores({"rewards": [1, 2], "extra": 0}, 2) or []] == [1.0, 2.0]
    assert to_scores([1.0], 2) is None
    assert to_scores(1.0, 1) is None
