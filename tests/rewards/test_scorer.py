from pathlib import Path
from typing import Any

import pytest

from saccade.config import RewardConfig
from saccade.errors import ConfigError
from saccade.plugins.check_data.row_warnings import unused_rewards
from saccade.rewards.combine import Scored
from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.scorer import Scorer

pytestmark = pytest.mark.usefixtures("rewards_here")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "my_reward.py"


def scorer(overlong: tuple[int, float] | None = None, form: str = "think_answer", **config: Any):
    settings = RewardConfig(**config)
    return Scorer(settings, prompt_format=form, max_tokens=100, overlong=overlong)


def one(scoring: Scorer, response: str, answer: str | None = "7", **known: Any) -> Scored:
    with scoring:
        return scoring.score([RewardSample(id="a", response=response, answer=answer, **known)])[0]


RIGHT = "<think>a</think><answer>7</answer>"
BARE = "<answer>7</answer>"
TWO = ["count", {"verifier": "format:think_answer", "weight": 0.5}]


@pytest.mark.parametrize(
    ("combine", "right", "bare"),
    [("weighted_sum", 1.5, 1.0), ("product", 0.5, 0.0), ("min", 0.5, 0.0), ("gate(format)", 1.5, 0.0)],
)
def test_combinations(combine, right, bare):
    for response, reward in ((RIGHT, right), (BARE, bare)):
        scored = one(scorer(terms=TWO, combine=combine), response)
        assert (scored.status, scored.reward, scored.outcome) == ("ok", reward, 1.0)


@pytest.mark.parametrize("combine", ["weighted_sum", "min"])
def test_a_term_with_a_condition_counts_only_where_the_other_term_does(combine, tmp_path):
    raises = tmp_path / "raises.py"
    raises.write_text("def score(sample):\n    raise ValueError(sample.response)\n")
    for when, right, wrong in (("count", 0.5, 0.0), ("not count", 1.0, 0.0)):
        terms = ["count", {"verifier": "format:think_answer", "weight": 0.5, "when": when}]
        sum_of = {"weighted_sum": (1.5, 0.0) if when == "count" else (1.0, 0.5), "min": (right, wrong)}[combine]
        found = [one(scorer(terms=terms, combine=combine), RIGHT.replace("7", n)) for n in "78"]
        assert tuple(scored.reward for scored in found) == sum_of, when
        assert [scored.parts["format"] for scored in found] == ([1.0, 0.0] if when == "count" else [0.0, 1.0])
    never = {"verifier": f"{raises}:score", "when": "not count"}  # what fails where it does not count costs nothing
    assert one(scorer(terms=["count", never], combine=combine), RIGHT).status == "ok"
    assert one(scorer(terms=["count", never], combine=combine), "8").status == "error"


def test_order_is_combine_then_shape_and_limits_are_for_training():
    config = {"terms": TWO, "combine": "gate(format)", "clip": (-0.25, 0.9)}
    shaped = one(scorer(overlong=(50, 1.0, 100), **config), BARE, length=75)
    assert shaped.parts == {"count": 1.0, "format": 0.0, "overlong": -0.5}
    assert (shaped.reward, shaped.outcome) == (-0.5, 1.0)
    free = one(scorer(overlong=(50, 1.0, 100), **config), RIGHT, length=75)
    assert (free.reward, free.outcome) == (1.0, 1.0)
    terms = ["repetition", "count", {"verifier": "length", "args": {"band": [0, 5]}, "weight": 0.1}]
    first = one(scorer(terms=terms), "7", length=3)  # terms that only shape never reach the outcome
    assert (first.reward, first.outcome) == (1.1, 1.0)


def test_the_outcome_is_the_accuracy_part_where_there_is_one():
    scored = one(scorer(preset="geo3k", form="think_boxed"), r"\boxed{7}")
    assert (scored.reward, scored.outcome) == (0.9, 1.0)
    wrong = one(scorer(terms=["dapo_math"], form="answer_line"), "Answer: 8")
    assert (wrong.reward, wrong.outcome) == (-1, 0)


def test_abstentions_exclude_the_member_unless_renormalised_and_errors_always(tmp_path):
    terms = [{"verifier": "count", "weight": 3.0}, {"verifier": "format:think_answer", "weight": 1.0}]
    scored = one(scorer(terms=terms), RIGHT, answer="several")
    assert (scored.status, scored.reward, scored.reason_kind) == ("abstain", None, "gold_unparseable")
    rescaled = one(scorer(terms=terms, reweight_abstained=True), RIGHT, answer="several")
    assert (rescaled.status, rescaled.reward, rescaled.outcome) == ("ok", 4.0, None)
    alone = one(scorer(terms=["count"], reweight_abstained=True), RIGHT, answer="several")
    assert alone.status == "abstain"
    gated = scorer(terms=terms, reweight_abstained=True, combine="gate(count)")
    assert one(gated, RIGHT, answer="several").status == "abstain"
    (tmp_path / "bad.py").write_text("def compute_score(sample):\n    raise ValueError('boom')\n")
    terms = ["count", f"{tmp_path}/bad.py"]
    scored = one(scorer(terms=terms, reweight_abstained=True, workers=1), RIGHT, answer="several")
    assert (scored.status, scored.reason_kind) == ("error", "raised")
    assert scored.reason.startswith("raised: bad: ValueError: boom")


def test_recipes_by_source():
    by_source = {"clevr": ["count"], "geo": "geo3k", "words": {"verifier": "exact", "weight": 2.0}}
    with scorer(by_source=by_source) as scoring:
        samples = [
            RewardSample(id="a", response=BARE, answer="7", data_source="clevr"),
            RewardSample(id="b", response=r"\boxed{7}", answer="7", data_source="geo"),
            RewardSample(id="c", response=BARE, answer="7", data_source="words"),
        ]
        assert [s.reward for s in scoring.score(samples)] == [1.0, 0.9, 2.0]
        with pytest.raises(ConfigError, match="did you mean 'clevr'"):
            scoring.check_sources(["clevr", "clever"])
        assert unused_rewards(scoring, {"clevr", "geo", "words"}) == []
        [warning] = unused_rewards(scoring, {"clevr"})
        assert "no row has the data_source geo, words; there is clevr" in warning
    with scorer(by_source={**by_source, "default": "gsm8k"}) as scoring:
        scoring.check_sources(["anything"])
    with scorer(by_source=by_source, terms=["math"]) as scoring:
        scoring.check_sources(["anything"])
        assert unused_rewards(scoring, {"clevr", "geo", "words", "anything"}) == []
        [warning] = unused_rewards(scoring, {"clevr", "geo", "words"})
        assert warning.startswith("reward.terms: scores no row, as reward.by_source")
        assert unused_rewards(scoring, {"clevr", "geo", "words"}, shared=False) == []


def test_a_source_may_say_how_its_terms_are_combined():
    """With `terms` nothing of the other sources holds, or what it says itself."""
    by_source = {"own": {"terms": "math"}, "least": {"terms": TWO, "combine": "min"}, "same": TWO}
    with scorer(terms=TWO, by_source=by_source, combine="gate(format)", accuracy_term="format") as scoring:
        found = {source: scoring.recipe(source) for source in (*by_source, "any")}
        sums = {source: (recipe.combination, recipe.gate, recipe.outcome) for source, recipe in found.items()}
        gated = ("weighted_sum", 1, 1)
        assert sums == {"own": ("weighted_sum", None, 0), "least": ("min", None, 0), "same": gated, "any": gated}
    for rest, said in (
        ({"combin": "min"}, r"own=combin: no such name; did you mean 'combine'\? Expected one of terms, combine"),
        ({"combine": 3}, r"reward\.combine=3"),
        ({"accuracy_term": "count"}, r"own: reward\.accuracy_term=count: no such name"),
    ):
        with pytest.raises(ConfigError, match=said):
            scorer(terms=TWO, by_source={"own": {"terms": "math", **rest}})


def test_weights_of_the_components_of_a_sum():
    by_source = {"bare": ["count"], "both": TWO}
    with scorer(terms=TWO, by_source=by_source, overlong=(50, 2.0, 100)) as scoring:
        weights = {"count": 1.0, "format": 0.5, "overlong": 1.0}
        assert scoring.component_weights("any") == scoring.component_weights("both") == weights
        assert scoring.component_weights("bare") == {"count": 1.0, "overlong": 1.0}
        scored = one(scoring, RIGHT, length=75)
        assert scored.reward == sum(weights[name] * part for name, part in scored.parts.items())
    gated = scorer(terms=TWO, combine="gate(format)")
    with gated, pytest.raises(ConfigError, match=r"combine=weighted_sum .*count, format"):
        gated.component_weights("any")


PRESETS = {
    "lmmr1_math": {RIGHT: 1.5, "<think>a</think>\n<answer>7</answer>": 1.0},
    "r1v": {RIGHT: 2.0},
    "easyr1_math": {r"<think>a</think>\boxed{7}": 1.0},
    "lightrft": {r"\boxed{7}": 0.9},
    "gsm8k": {"#### 7": 1.0},
    "easyr1_r1v": {RIGHT: 1.0},
    "medical_safe": {"<answer>7</answer>": 0.5 / 0.6},
    "lmmr1_sokoban": {"<think>a</think><answer>right</answer>": 11.45},
}


def test_presets():
    level = {"level": "#####\n#@$.#\n#####"}
    with scorer(by_source={name: name for name in PRESETS}, workers=1) as scoring:
        for name, rewards in PRESETS.items():
            asked = [
                RewardSample(id=text, response=text, answer="7", data_source=name, extra=level) for text in rewards
            ]
            assert [scored.reward for scored in scoring.score(asked)] == pytest.approx([*rewards.values()]), name
    assert one(scorer(preset="gsm8k"), "#### 7").reward == 1


def test_the_prompt_format_tells_where_to_look():
    assert one(scorer(terms=["count"], form="hash"), "3 + 4\n#### 7").outcome == 1
    assert one(scorer(terms=["exact"], form="direct"), "7").outcome == 1
    assert one(scorer(terms=["exact"]), "7").outcome == 0
    assert one(scorer(terms=["relaxed"]), "Answer: 7").outcome == 1
    boxes = {"verifier": "iou", "args": {"mode": "iou@0.5"}}
    assert one(scorer(terms=[boxes], form="direct"), "[0,0,9,9]", answer="[0,0,9,9]").outcome == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "reward.terms is empty"),
        ({"terms": ["cuont"]}, "did you mean 'count'"),
        ({"terms": [{"verifier": "count", "args": {"tolerence": 1}}]}, "did you mean 'tolerance'"),
        ({"terms": [{"verifier": "geo3k", "args": {"a": 1}}]}, "takes no arguments"),
        ({"terms": [{"verifier": "count", "args": {"order": ["tag"]}}]}, "some of answer_tag"),
        ({"terms": [{"verifier": "exact", "args": {"scope": "tail"}}]}, "scope is"),
        ({"terms": [{"verifier": "regex", "args": {"pattern": "(a"}}]}, "unterminated"),
        ({"terms": ["math"], "form": "think_anser"}, "did you mean 'think_answer'"),
        ({"terms": [{"verifier": "iou", "args": {"answer_frame": "pixel_resized"}}]}, "iou with .* needs `unit`"),
        ({"terms": ["math", "math"]}, "two terms are called 'math'"),
        ({"terms": ["math"], "preset": "r1v"}, "both set"),
        ({"preset": "r2v"}, "did you mean 'r1v'"),
        ({"terms": ["math"], "combine": "sum"}, "no such name; expected one of weighted_sum"),
        ({"terms": ["format:boxed"]}, "reward.accuracy_term=format"),
        ({"terms": ["repetition"]}, "only shaping terms"),
        ({"terms": [{"verifier": "overlong", "args": {"buffer": 100}}]}, "0 < buffer < 100"),
        ({"terms": ["nowhere/reward.py:f"]}, "does not exist"),
        ({"terms": [f"{EXAMPLE}:no_such_name"]}, "no function 'no_such_name'"),
        ({"terms": [{"verifier": f"{EXAMPLE}:close_count", "args": {"wide": 1}}]}, "wide"),
        ({"terms": ["count", {"verifier": "exact", "when": "not coumt"}]}, "did you mean 'count'"),
        ({"terms": [{"verifier": "count", "when": "exact"}, "exact"]}, "when of count: expects another term"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_at_once(config, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(").replace(")", r"\)")):
        scorer(**config).close()


def test_the_example_file():
    terms = [f"{EXAMPLE}:close_count", {"verifier": f"{EXAMPLE}:brevity", "shaping": True, "args": {"target": 10}}]
    scored = one(scorer(terms=terms, workers=1), "<answer>6</answer>", length=15)
    assert scored.parts == {"close_count": pytest.approx(2 / 3), "brevity": -0.5}
    assert (scored.outcome, scored.reward) == (0.0, pytest.approx(1 / 6))


def test_cheap_terms_start_no_process():
    samples = [RewardSample(id=str(n), response=f"<answer>{n % 10}</answer>", answer=str(n % 9)) for n in range(512)]
    with scorer(terms=["count", "format:think_answer"]) as scoring:
        assert scoring.pool is None
        assert sum(s.outcome or 0 for s in scoring.score(samples)) == 54
