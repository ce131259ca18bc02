"""The probe in a run: where the engine has weights of its own, before step 1."""

import shutil

import pytest

from saccade.errors import EnvironmentProblem
from saccade.models.load import load_model
from saccade.recipes import rl, rl_setup, sft, validation
from saccade.run.loggers import read_metrics
from tests.engines.copies import CopyEngine


@pytest.fixture
def foreign(monkeypatch):
    """Runs sample from a copy of the policy, built with these options."""

    def use(**options):
        def make_engine(config, policy, **others):
            dtype = next(policy.model.parameters()).dtype
            copy = load_model(policy.family, dtype=dtype, device=policy.model.device)
            return CopyEngine(copy, policy.family, **options)

        for recipe in (rl_setup, validation):
            monkeypatch.setattr(recipe, "make_engine", make_engine)

    return use


def test_a_foreign_engine_is_probed_and_trains_as_the_embedded_one(rl_config, foreign, tmp_path, numbers):
    rl.run(rl_config(tmp_path / "own", run__max_steps=2))
    foreign()
    with pytest.raises(EnvironmentProblem, match="limit 1e-12"):
        rl.run(rl_config(tmp_path / "foreign", rollout__parity_max=1e-12, rollout__replicas=1))
    shutil.rmtree(tmp_path / "foreign")
    rl.run(rl_config(tmp_path / "foreign", run__max_steps=2))
    folders = [tmp_path / name / "run" for name in ("own", "foreign")]
    first, *steps = read_metrics(folders[1] / "metrics.jsonl")
    assert first["step"] == 0 and first["parity/gap"] < 1e-5 and first["parity/by_picture"] > 1e-3
    assert "parity: engine and trainer agree" in (folders[1] / "log.txt").read_text()
    own, theirs = (numbers(folder / "metrics.jsonl") for folder in folders)
    assert [row["reward/mean"] for row in own] == [row["reward/mean"] for row in theirs[1:]]
    assert [row["step"] for row in own] == [row["step"] for row in steps] == [1, 2]


def test_weights_that_do_not_arrive_stop_the_run(rl_config, foreign, tmp_path):
    foreign(takes=lambda name: not name.startswith("model.visual."))
    with pytest.raises(EnvironmentProblem, match="wrong weights"):
        rl.run(rl_config(tmp_path))


def test_the_engine_that_validates_supervised_training_is_probed(sft_config, scenes, foreign, tmp_path, monkeypatch):
    """It leaves the memory to training before the first step and after every validation."""
    told = []
    for name in ("sleep", "update_weights"):
        monkeypatch.setattr(CopyEngine, name, noted(told, name, getattr(CopyEngine, name)))
    foreign()
    options = {"data__val": str(scenes / "val.jsonl"), "val__every": 2, "val__before": False, "val__max_tokens": 8}
    sft.run(sft_config(tmp_path / "sound", **options))
    first, *_ = read_metrics(tmp_path / "sound" / "run" / "metrics.jsonl")
    assert first["step"] == 0 and first["parity/gap"] < 1e-5
    assert told == [*["update_weights"] * 3, "sleep", *["update_weights", "sleep"] * 2]


def noted(told, name, method):
    def call(*arguments, **options):
        told.append(name)
        return method(*arguments, **options)

    return call


def test_rollouts_follow_a_validation_with_the_same_weights(rl_config, scenes, foreign, tmp_path, monkeypatch):
    """So the engine sleeps once in a step, after the rollout; and `eval` has no trainer at all."""
    told = []
    monkeypatch.setattr(CopyEngine, "sleep", noted(told, "sleep", CopyEngine.sleep))
    foreign()
    two = [str(scenes / "val.jsonl"), str(scenes / "shown.jsonl")]
    rl.run(rl_config(tmp_path, run__max_steps=2, data__val=two, val__every=1))
    assert told == ["sleep"] * 2
