import logging
from typing import Any

import pytest

from saccade.config import RewardConfig, load
from saccade.data.prompts import instruction_for
from saccade.errors import ConfigError, SelfTestError
from saccade.plugins.check_data.row_warnings import unused_prompts, unused_rewards
from saccade.plugins.check_data.self_test import SelfTest, known_answers_by_format, require, self_test
from saccade.recipes.questions import wording
from saccade.recipes.run_parts import answer_places
from saccade.rewards.scorer import Scorer
from saccade.types import Media, Message, Sample

pytestmark = pytest.mark.usefixtures("rewards_here")


def rows(*answers: Any, **known: Any) -> list[Sample]:
    question = (Message(role="user", parts=("How many?",)),)
    return [
        Sample(id=f"row-{index}", messages=question, answer=answer, **known) for index, answer in enumerate(answers)
    ]


def result_of(samples: list[Sample], terms: list[Any], form: str = "think_answer") -> SelfTest:
    config = RewardConfig(terms=terms, workers=1)
    with Scorer(config, prompt_format=form, max_tokens=64) as scorer:
        return self_test(scorer, samples, format=form)


def test_each_source_is_asked_and_scored_in_its_own_format():
    overrides = ["prompt.format={geo: hash, quiz: letter}", "prompt.system={quiz: Choose., default: Think.}"]
    config = load({"reward": {"terms": ["math"], "by_source": {"quiz": ["choice"]}}}, overrides)
    samples = [*rows("7", "8", data_source="geo"), *rows("A", "B", data_source="quiz"), *rows("1", data_source="other")]
    word = wording(config)
    assert [word(one).messages[0].text for one in (samples[0], samples[2])] == ["Think.", "Choose."]
    assert all(instruction_for(kind) in word(one).messages[1].text for kind, one in zip(
        ("hash", "letter", "think_answer"), samples[::2], strict=True))  # fmt: skip
    with Scorer(config.reward, prompt_format=config.prompt.format, max_tokens=64) as scorer:
        assert ["hash" in scorer.recipe(source).terms[0].args["order"] for source in ("geo", "other")] == [True, False]
        results = [*known_answers_by_format(scorer, samples, config.prompt)]
        assert [(one.format, one.rows, one.passed) for one in results] == [
            ("hash", 2, True), ("letter", 2, True), ("think_answer", 1, True)
        ]  # fmt: skip
        assert unused_rewards(scorer, {"geo", "quiz", "other"}) == []
    assert unused_prompts(config.prompt, samples[:2]) == [
        f"prompt.{name}: no row has the data_source quiz; there is geo" for name in ("format", "system")
    ]
    assert answer_places(load(None, ["prompt.format={a: direct, b: boxed}"]).prompt) == ("boxed", "answer_tag", "whole")
    with pytest.raises(ConfigError, match=r"prompt.format=boxxed: .* 'boxed'"):
        Scorer(config.reward, prompt_format={"geo": "boxxed"}, max_tokens=64)


@pytest.mark.parametrize(("verifier", "form", "answers"), [
    ("count", "think_answer", ("7", "8", "8")),
    ("number", "direct", ("7.5", "8")),
    ("math", "think_boxed", (r"\frac{1}{2}", "0.5", r"\sqrt{2}", r"\text{Evelyn}")),
    ("relaxed", "think_answer", ("Gray", "12.5", "0", "Q3 2019", "2019", "40%")),
    ("gsm8k", "hash", ("so 3 #### 3", "#### 4")),
    ("exact", "think_answer", ("true", "false")),
    ("contains_one_of", "think_answer", ("a red cube", "a ball")),
    ("choice", "letter", ("A", "B")),
    ("choice", "think_answer", (("A", "C"), ("B",))),
    ("avqa", "think_answer", ("rain", "wind")),
    ("verdict", "think_answer", ("A", "B", "tie")),
    ("labels_f1", "think_boxed", (("edema", "effusion"), "edema")),
    ("medical", "boxes_json", ("edema", "edema, effusion")),
    ("iou", "think_answer", ("[0,0,10,10]", "[5,0,15,10]")),
    ("point", "think_answer", ("[0,0,10,10]", "[20,20,30,30]")),
])  # fmt: skip
def test_built_in_verifiers_pass(verifier, form, answers):
    result = result_of(rows(*answers), [verifier], form)
    assert (result.passed, result.rows, result.failures) == (True, len(answers), ())


def test_gold_boxes_are_written_in_the_frame_that_is_asked_for():
    picture = Media(hash="a", path="a.png", width=200, height=100)
    question = (Message(role="user", parts=("Where is it?", picture)),)
    boxes = ("[100,0,150,30]", "[13,17,61,83]")
    samples = [Sample(id=box, messages=question, answer=box) for box in boxes]
    for frame in ({"answer_frame": "milli"}, {"answer_frame": "pixel_resized", "unit": 28}):
        for args in (frame, frame | {"layout": "xywh"}):
            assert result_of(samples, [{"verifier": "iou", "args": args}]).failures == ()
        assert result_of(samples, [{"verifier": "point", "args": frame}]).failures == ()
    fenced = {"verifier": "iou", "args": {"order": ["fenced"], "scope": "all"}}
    assert result_of(samples, [fenced], "boxes_json").passed
    assert not result_of(rows("on the left", "on the right"), ["iou"]).passed
    masked = result_of(rows("edema"), [{"verifier": "iou", "args": {"mode": "mask"}}])
    assert masked.skipped == ("iou (default): no row has an answer",)


def test_what_else_passes():
    assert result_of(rows("7", "8"), ["count", "format:think_boxed", "repetition"]).passed
    assert result_of(rows("1", "2", "3", "cat"), ["math"]).passed
    near = [{"verifier": "number", "args": {"rel_tol": 0.05}}]
    assert result_of(rows("10", "10.4", "99"), near).passed  # the foreign answer is one far away
    none = result_of(rows(None, None), ["count"])
    assert (none.passed, none.rows, none.skipped) == (True, 0, ("count (default): no row has an answer",))


def test_a_reward_that_is_not_higher_for_right_answers_is_refused():
    count, wordy = {"verifier": "count"}, {"verifier": "length", "args": {"target": 64}}
    for terms, told in (
        ([count | {"weight": -1}], r"gets the reward -1 and a wrong one 0 on 2 of 2 rows \(count: weight -1\)"),
        ([count | {"weight": 0}], "gets the reward 0 and a wrong one 0"),
        ([count | {"weight": 0}, "format:think_answer"], "gets the reward 1 and a wrong one 1"),
    ):
        with pytest.raises(SelfTestError, match=f"{told}.*give count a weight above 0"):
            require(result_of(rows("7", "8"), terms), "strict")
    repeats = {"verifier": "repetition", "weight": 0.5, "shaping": False}
    overlong = {"verifier": "overlong", "args": {"buffer": 8}}
    assert result_of(rows("7", "8"), [count, wordy | {"weight": -0.2, "shaping": False}, repeats, overlong]).passed
    assert result_of(rows("7", "8"), [count | {"weight": 0}, {"verifier": "exact"}]).passed


def test_a_verifier_that_does_not_fit_the_answers_is_refused(caplog):
    result = result_of(rows("3.5", "7.25"), ["count"])
    assert [f.case.sample.id for f in result.failures] == ["row-0", "row-1"]
    told = r"row row-0: gold response .*prompt.format=think_answer.* scored 0.*expected 1"
    with pytest.raises(SelfTestError, match=told) as error:
        require(result, "strict")
    assert error.value.exit_code == 2
    with caplog.at_level(logging.WARNING):
        require(result, "warn")
    assert "misjudges" in caplog.text


@pytest.mark.parametrize(("verifier", "answers", "told"), [
    # Its own text it knows, but every wrong word is abstained from.
    ("math", ("true", "false"), r"right answer of 0 of 2 rows .* 2 of 2.*terms=\[exact\]"),
    ("count", ("cat", "dog"), r"right answer of 2 of 2 rows .*terms=\[exact\]"),
    ("number", ("Gray", "12.5"), r"right answer of 1 of 2 rows .*terms=\[relaxed\]"),
    ("iou", ("left", "right"), r"\[10, 20, 50, 80\]"),
])  # fmt: skip
def test_golds_that_cannot_be_read_are_refused_with_what_reads_them(verifier, answers, told):
    result = result_of(rows(*answers), [verifier])
    assert len(result.failures) == 1
    with pytest.raises(SelfTestError, match=f"{verifier} cannot read these golds.*{told}"):
        require(result, "strict")
    if verifier != "iou":
        assert result_of(rows(*answers), ["exact"]).passed


def test_careless_custom_rewards_are_refused(tmp_path):
    empty = "float(sample.answer in sample.response or not sample.response)"
    for case, body in {"gold": "1.0", "empty": empty, "foreign": "float('answer' in sample.response)"}.items():
        (tmp_path / f"{case}.py").write_text(f"def compute_score(sample):\n    return {body}\n")
        result = result_of(rows("7", "8"), [f"{tmp_path}/{case}.py"])
        assert case in {failure.case.kind for failure in result.failures}


@pytest.mark.parametrize(("body", "told"), [
    ("raise ValueError('boom')", r"mine.py:f raised ValueError: boom \(mine.py:2\), on 5 of 5 rows, first on the gold"),
    ("return float('nan')", "mine.py:f: nan: the function returned nan, on 5 of 5 rows"),
    ("return float(sample.response[0] == sample.answer[0])", r"IndexError.*mine.py:2.*5 of 5"),
])  # fmt: skip
def test_what_a_function_fails_with_is_told_once(tmp_path, body, told):
    (tmp_path / "mine.py").write_text(f"def f(sample):\n    {body}\n")
    own = f"{tmp_path}/mine.py:f"
    result = result_of(rows(*map(str, range(5))), ["count", own] if "nan" in body else [own], "direct")
    if "IndexError" in told:  # one response in three costs no other term its place
        assert result_of(rows(*map(str, range(5))), ["count", own], "direct").passed
    with pytest.raises(SelfTestError, match=told) as error:
        require(result, "strict")
    assert len(result.failures) == 1 and "self_test" not in str(error.value)


@pytest.mark.parametrize("body", ["sample.response == sample.answer", "f'<answer>{sample.answer}<' in sample.response"])
def test_without_a_format_own_functions_may_read_the_bare_answer_or_tags(tmp_path, body):
    (tmp_path / "mine.py").write_text(f"def f(sample):\n    return float({body})\n")
    terms = [f"{tmp_path}/mine.py:f"]
    assert result_of(rows("red", "blue"), terms, "none").passed
    shaped = result_of(rows("red", "blue"), terms, "think_boxed")
    with pytest.raises(SelfTestError, match=r"scores 0 for all 6.*\n.*prompt.format=direct"):
        require(shaped, "strict")


def test_a_function_that_hangs_is_given_up_soon(tmp_path):
    (tmp_path / "loop.py").write_text("def loop(sample):\n    while True: pass\n")
    config = RewardConfig(terms=[f"{tmp_path}/loop.py:loop"], workers=1, deadline=0.2)
    with Scorer(config, prompt_format="direct", max_tokens=64) as scorer:
        result = self_test(scorer, rows(*map(str, range(20))), format="direct")
    assert result.ended.startswith("The test was ended after 3 of 60")
    told = r"loop.py:loop: timeout: no result after 0.2 s \(reward.deadline\), on 1 of 1 rows"
    with pytest.raises(SelfTestError, match=rf"{told}.*\n.*: 3 of them timed out or crashed") as error:
        require(result, "strict")
    assert "Raise reward.deadline; what takes long once" in str(error.value)
