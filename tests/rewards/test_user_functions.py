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
        id=n, response=f"r{n}", prompt=f"p{n} ", answer=n, length=int(n), extra={"level": int(n)},
        messages=[{"role": "user", "content": f"p{n}"}],
    ) for n in "01"
]  # fmt: skip


def with_parameters(parameters: str) -> Callable[..., Any]:
    return eval(f"lambda {parameters}: None")


INPUT = {"response": "r1", "response_length": 1, "ground_truth": "1"}
GOLDS = {"ground_truths": ["0", "1"], "extra_infos": [{"level": 0}, {"level": 1}]}


@pytest.mark.parametrize(
    ("function", "args", "result"),
    [
        (lambda sample, bonus=0.0: (sample.id, bonus), {"bonus": 1}, ("1", 1)),
        (lambda x: x.id, {}, "1"),
        (lambda samples: [each.id for each in samples], {}, ["0", "1"]),
        (lambda reward_input, weight: (reward_input, weight), {"weight": 2}, (INPUT, 2)),
        (lambda reward_inputs, **kwargs: reward_inputs[1:], {}, [INPUT]),
        (
            lambda prompts, completions, solution, level, **kwargs: (prompts[1], completions[1], solution, level),
            {},
            ([{"role": "user", "content": "p1"}], [{"role": "assistant", "content": "r1"}], ["0", "1"], [0, 1]),
        ),
        (lambda completion_ids, **kwargs: completion_ids, {}, [(), ()]),
        (lambda queries, prompts, labels: (queries, *prompts), {}, (["p0 r0", "p1 r1"], "p0 ", "p1 ")),
        (lambda data_source, solution_str, extra_info: (solution_str, extra_info), {}, ("r1", {"level": 1})),
        (lambda solution_strs, data_sources, **others: (solution_strs, others), {}, (["r0", "r1"], GOLDS)),
        (lambda predicts, ground_truths, w: (*predicts, *ground_truths, w), {"w": 2}, ("r0", "r1", "0", "1", 2)),
        (lambda predict_str, ground_truth: (predict_str, ground_truth), {}, ("r1", "1")),
    ],
)  # fmt: skip
def test_the_form_follows_from_parameter_names(function, args, result):
    check_arguments(function, args)
    form = form_of(function)
    assert call(function, form, SAMPLES if form.batch else SAMPLES[1], args) == result


def test_verl_has_its_own_column_where_there_is_one():
    told = replace(SAMPLES[1], extra={"extra_info": {"index": 7}})
    verl = with_parameters("solution_str, extra_info")
    assert form_of(verl).arguments(told)["extra_info"] == {"index": 7}


@pytest.mark.parametrize(("parameters", "args", "words"), [
    ("predicts, ground_truths, format_weight=0.1", {"bonus": 1}, r"'bonus'; .*\(here: format_weight\)"),
    ("answer, question", {}, r"'question'; .*def mine\(sample\): return <lambda>\(sample.response, sample.answer\)"),
    ("sample, bonus=0.0", {"bonsu": 1}, r"'bonsu'; .*f\(sample\), .*\(here: bonus\)"),
])  # fmt: skip
def test_arguments_are_checked_against_the_signature(parameters, args, words):
    check_arguments(with_parameters("sample, bonus=0.0"), {"bonus": 1})
    with pytest.raises(TypeError, match=words):
        check_arguments(with_parameters(parameters), args)


@pytest.mark.parametrize(("result", "value", "parts"), [
    (1, 1.0, {}),
    (np.float32(0.5), 0.5, {}),
    ({"overall": 0.9, "accuracy": 1, "format": 0}, 0.9, {"accuracy": 1.0, "format": 0.0}),
    ({"value": 2, "parts": {"a": 1}, "note": "text"}, 2.0, {"a": 1.0}),
    ({"score": 0.5, "acc": True, "pred": "7"}, 0.5, {"accuracy": 1.0}),
    (Score(kind="value", value=3.0), 3.0, {}),
])  # fmt: skip
def test_results_that_count(result, value, parts):
    score = to_score(result)
    assert (score.kind, score.value, dict(score.parts)) == ("value", value, parts)


@pytest.mark.parametrize(("result", "kind"), [
    (None, "none"),
    (math.nan, "nan"),
    ("1", "bad_type"),
    ({"points": 1}, "bad_type"),
    ({"overall": 1.0, "accuracy": math.nan}, "nan"),
    (Score(kind="value", value=1.0, parts={"a": math.nan}), "nan"),
])  # fmt: skip
def test_results_that_are_errors(result, kind):
    score = to_score(result)
    assert (score.kind, score.reason.partition(":")[0]) == ("error", kind)


def test_list_results():
    values = [score.value for score in to_scores(np.array([1.0, 0.5]), 2)]
    assert values == [1.0, 0.5]
    assert [s.value for s in to_scores({"rewards": [1, 2], "extra": 0}, 2)] == [1.0, 2.0]
    for wrong, count in (([1.0], 2), (1.0, 1)):
        with pytest.raises(ValueError, match=f"results for {count} samples"):
            to_scores(wrong, count)
