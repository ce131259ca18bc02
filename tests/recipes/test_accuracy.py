"""Numbers of scored groups that can be worked out by hand."""

import numpy as np
import pytest

from saccade.config import RewardConfig
from saccade.plugins.evaluation.breakdown import by_category, by_limit, by_source, by_turns
from saccade.recipes.accuracy import group_accuracy, items_of, score_terms
from saccade.rewards.scorer import Scorer
from saccade.types import Group, Message, Sample, Source, Trajectory


def group(id, outcomes, turns=1, source="", **extra):
    asked = (Message(role="user", parts=("?",)),)
    sample = Sample(id=id, messages=asked, extra=extra, data_source=source or "default")
    members = tuple(
        Trajectory(
            sample_id=id, repeat=n, ids=np.zeros(1, np.int64), sources=np.full(1, Source.POLICY, np.int8),
            logprobs=np.zeros(1, np.float32), versions=np.zeros(1, np.int32), outcome=outcome,
            status="ok" if outcome is not None else "error", turns=turns,
            end_reason="max_turns" if turns == 4 else "answered",
        )
        for n, outcome in enumerate(outcomes)
    )  # fmt: skip
    return Group(sample=sample, trajectories=members, uid=id)


def test_rotations_of_a_question_count_together():
    """Sample by sample: the first of "a" is right in both orders, the second in one of them."""
    rows = [group("a0", [1, 1]), group("a1", [1, 0]), group("b0", [0, 1]), group("b1", [0, 1])]
    plain = group_accuracy(rows)
    turned = group_accuracy([group(g.uid, [t.outcome for t in g.trajectories], rotation_of=g.uid[0]) for g in rows])
    assert plain["accuracy"] == turned["accuracy"] == 5 / 8 and "all_rotations" not in plain
    assert turned["all_rotations"] == 0.5
    assert turned["items"] == 4 and turned["avg@2"] == 5 / 8 and turned["pass@2"] == 1
    assert (turned["ci_low"], turned["ci_high"]) == (0.5, 0.75)  # two questions, not four
    assert plain["ci_high"] > 0.75


def test_categories_turns_and_limits():
    groups = [
        group("a", [1, 0], turns=2, category="single"),
        group("b", [1, None], turns=4, category="cross"),
        group("c", [0, 0], turns=2, category=None),
    ]
    found = by_category(groups)
    assert {name: row["accuracy"] for name, row in found.items()} == {"cross": 1, "single": 0.5}
    used = by_turns(groups)
    assert used["2"] == {"episodes": 4, "accuracy": 0.25}
    assert used["4"] == {"episodes": 1, "accuracy": 1}
    rows = by_limit({4: groups, 2: groups[:1]})
    assert list(rows) == ["2", "4"] and rows["2"]["overturn_frac"] == 0
    assert rows["4"]["overturn_frac"] == pytest.approx(1 / 3)
    assert rows["4"]["turns_mean"] == pytest.approx(16 / 6)


def test_which_outcomes_are_scores(tmp_path):
    """Those of a reward model, whatever they are, and values beyond 0..1."""
    (tmp_path / "config.json").write_text('{"reward_model": {}}')
    model = [{"verifier": "model", "args": {"path": str(tmp_path)}}]
    config = RewardConfig(by_source={"a": ["exact", *model], "b": model, "c": "exact"})
    scorer = Scorer(config, prompt_format="none", max_tokens=8)
    found = score_terms(scorer, [("a", [0.0]), ("a", [1.0]), ("b", [0.5]), ("c", [0.2])])
    assert list(found) == ["b"]
    assert list(score_terms(scorer, [("a", [1.0]), ("c", [1.5])])) == ["c"]
    assert list(score_terms(scorer, [("a", [1.0]), ("c", [1.0])], score_sources=["c"])) == ["c"]
    assert list(score_terms(None, [("a", [-0.1]), ("b", [1 + 1e-9])])) == ["a"]


def test_scores_are_never_averaged_with_right_and_wrong():
    groups = [
        group("a", [1, 0], source="colour"),
        group("b", [1, 1], source="colour"),
        group("c", [-4, -2], source="hue"),
    ]
    scores = score_terms(None, items_of(groups))
    found = group_accuracy(groups, scores)
    assert found["accuracy"] == found["avg@2"] == 0.75 and found["pass@2"] == 1
    assert found["score"] == -3 and found["score_ci_low"] == found["score_ci_high"] == -3
    assert found["items"] == 3 and found["score_items"] == 1
    parts = by_source(groups, scores)
    assert parts["colour"]["accuracy"] == 0.75 and "score" not in parts["colour"]
    assert parts["hue"]["score"] == -3 and "accuracy" not in parts["hue"]
    assert by_source(groups[:2]) == {} and by_turns(groups, scores)["1"]["episodes"] == 4
    apart = group_accuracy(
        [group("a", [3], source="x"), group("b", [50], source="y")], {"x": "model 1", "y": "model 2"}
    )
    assert (apart["score/x"], apart["score/y"]) == (3, 50) and "score" not in apart
