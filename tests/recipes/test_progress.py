"""What a checkpoint stores of a run, and which step counts as the best."""

import json
from dataclasses import asdict, replace

import pytest

from saccade.run.progress import Progress, from_json

START = Progress()


def test_progress_survives_a_checkpoint():
    progress = Progress(
        step=3, updates=6, stream={"epoch": 0, "cursor": 12}, algorithm=("grpo", "clip"),
        algorithm_state={"kl_coef": 0.04}, scores=("a",), bad_updates={"policy": 1}, validation_sets={"val": "hash"},
    )  # fmt: skip
    assert from_json(json.loads(json.dumps(asdict(progress)))) == progress
    assert progress.with_scores(["c", "a", "b"]).scores == ("a", "b", "c")


def test_a_checkpoint_with_the_names_of_before_is_read():
    stored = {"step": 2, "updates": 2, "best_step": None, "best_score": None}
    assert from_json(stored) == Progress(step=2, updates=2)
    found = from_json(stored | {"memory": {"kl_coef": 0.1}, "val": {"a": "x"}, "scores": ["s"]})
    assert (found.algorithm_state, found.validation_sets) == ({"kl_coef": 0.1}, {"a": "x"})
    assert found.scores == ("s",)


@pytest.mark.parametrize(
    ("metrics", "before", "best"),
    [
        ({"val/a/reward": 9.0, "val/a/score": 2.0, "val/b/accuracy": 0.5}, None, "val/b/accuracy"),
        ({"val/a/reward": 9.0, "val/a/score": 2.0}, None, "val/a/score"),
        ({"val/b/accuracy": 0.5}, "val/pairs/accuracy", "val/pairs/accuracy"),  # of other sets
    ],
)
def test_the_best_is_that_of_one_metric(metrics, before, best):
    found, warning = replace(START, best_metric=before).with_best(metrics, 4, None)
    assert (found.best_metric, warning) == (best, "")
    assert found.best_step == (4 if best in metrics else None)


def test_a_changed_set_or_metric_starts_the_comparison_again():
    progress, _ = START.with_sets({"a": "1"})[0].with_best({"val/a/accuracy": 0.9}, 1, None)
    assert progress.with_best({"val/a/accuracy": 0.8}, 2, None)[0].best_step == 1
    same, changed = progress.with_sets({"a": "1", "b": "1"})
    assert changed == [] and same.best_score == 0.9
    other, changed = progress.with_sets({"a": "2"})
    assert changed == ["a"] and other.best_score is None
    wanted, _ = progress.with_best({"val/a/reward": 0.1}, 3, "val/a/reward")
    assert (wanted.best_step, wanted.best_score) == (3, 0.1)
    _, warning = progress.with_best({"val/a/accuracy": 1.0}, 3, "val/a/score")
    assert "val/a/score was not measured" in warning and "val/a/accuracy" in warning
