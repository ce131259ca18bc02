"""What goes wrong inside a run costs as little as it can."""

import json
import os
import re
import shutil

import pytest
import torch
from typer.testing import CliRunner

from saccade.algorithms.build import resolve
from saccade.cli import app
from saccade.config import AlgorithmConfig, load, to_yaml
from saccade.errors import ConfigError, DataError, EnvironmentProblem, RewardError, TrainingError
from saccade.plugins.evaluation import evaluate
from saccade.plugins.generate import generate
from saccade.recipes import rl
from saccade.recipes.failures import check_mismatch
from saccade.rollout import scoring
from saccade.run.checkpoint import complete_steps
from saccade.run.loggers import read_metrics
from saccade.trainer.local import LocalTrainer
from saccade.types import Metrics


def damaged_copy(scenes, folder, name="train.jsonl"):
    """The first picture has an intact header and end mark, so only decoding shows the damage."""
    shutil.copytree(scenes, folder)
    first = json.loads((folder / name).read_text().splitlines()[0])
    picture = folder / first["images"][0]
    content = bytearray(picture.read_bytes())
    middle = len(content) // 2
    content[middle - 10 : middle + 10] = bytes(20)
    picture.write_bytes(bytes(content))
    return folder / name, first["id"]


def rows_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_damaged_image_is_set_aside_by_id_and_the_run_goes_on(rl_config, scenes, tmp_path):
    data, bad = damaged_copy(scenes, tmp_path / "data")
    changes = {"data.train": str(data), "data.order": "sequential", "run.max_steps": 2, "data.max_samples": 5}
    rl.run(rl_config(tmp_path) | changes | {"data.max_bad_fraction": 0.5})  # two passes: it counts once
    aside = rows_of(tmp_path / "run" / "quarantine.jsonl")
    assert [(row["id"], row["row"]) for row in aside] == [(bad, 1)]
    assert "decoded" in aside[0]["reason"]
    assert read_metrics(tmp_path / "run")[-1]["data/bad_rows"] == 1
    with pytest.raises(DataError, match=f"(?s){bad}.*check-data"):
        rl.run(rl_config(tmp_path / "strict") | changes | {"data.max_bad_fraction": 0.001})


def test_eval_and_generate_set_a_damaged_image_aside_as_training_does(rl_config, scenes, tmp_path, capsys):
    data, bad = damaged_copy(scenes, tmp_path / "data", "val.jsonl")
    config = rl_config(tmp_path) | {"data.train": [], "data.val": str(data)}
    strict = re.compile(rf"(?s)data\.val: 1 of 8 rows are bad .*{bad} \(row 1 .*check-data")
    for command in (evaluate, generate):
        with pytest.raises(DataError, match=strict):
            command.run(config)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
    config |= {"data.max_bad_fraction": 0.5}
    [found] = evaluate.run(config, out=tmp_path / "eval").values()
    assert (found["items"], found["left_out"]) == (7, 1)
    assert generate.run(config)["rows"] == len(rows_of(tmp_path / "run/generations.jsonl")) == 7
    for folder in ("eval", "run"):
        [aside] = rows_of(tmp_path / folder / "quarantine.jsonl")
        assert aside["id"] == bad and "cannot be decoded" in aside["reason"]
    said = capsys.readouterr().out.replace("\n", " ")
    assert f"row {bad} is excluded: " in said and "items 7  rows left out 1" in said


def test_a_damaged_image_in_validation_costs_its_row_or_no_finished_step(rl_config, scenes, tmp_path, capsys):
    data, bad = damaged_copy(scenes, tmp_path / "data", "val.jsonl")
    config = rl_config(tmp_path) | {"data.val": str(data), "val.before": False, "val.every": 2}
    config |= {"run.max_steps": 3, "save.every": 0}
    with pytest.raises(DataError, match=rf"(?s)1 of 8 rows .*{bad} .*step 2 is saved in"):
        rl.run(config)
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2]
    assert complete_steps(tmp_path / "run" / "checkpoints") == [2]
    # With a whole set in its place the run goes on, and says so.
    repaired = {"data.val": [{"path": str(scenes / "val.jsonl")}], "run.resume": "auto"}
    row = rl.run(config | repaired)
    assert (row["val/val/items"], row["val/val/left_out"]) == (8, 0)
    assert "data.val: val is not what it was up to step 2" in (capsys.readouterr().out.replace("\n", " "))
    rows = [(row["step"], "time/step" in row, "val/val/accuracy" in row) for row in read_metrics(tmp_path / "run")]
    assert rows == [(1, True, False), (2, True, False), (2, False, True), (3, True, True)]


def test_weights_that_are_no_numbers_end_what_answers_with_5(rl_config, tmp_path, word_model, damage):
    weight = damage(shutil.copytree(word_model, tmp_path / "model"))
    config = rl_config(tmp_path, model__path=str(tmp_path / "model"))
    config["data.val"] = config.pop("data.train")
    (tmp_path / "run.yaml").write_text(to_yaml(load(config), full=False))
    done = CliRunner().invoke(app, ["eval", str(tmp_path / "run.yaml")])
    assert done.exit_code == 5 and not (tmp_path / "run" / "results.json").exists()
    said = done.stderr.replace("\n", " ")
    assert "log-probs are not finite, because" in said and f"{weight} holds NaN" in said


def test_what_fails_before_an_update_keeps_the_steps_before_it(rl_config, tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def score(sample):\n"
        "    assert sample.step < 3, 'the judge went home'\n"
        "    return float(len(sample.token_ids) % 3)\n"
    )
    changes = {"reward.terms": [f"{reward}:score"], "reward.self_test": "warn", "save.every": 0}
    with pytest.raises(RewardError, match="went home") as stopped:
        rl.run(rl_config(tmp_path) | changes | {"run.max_steps": 5})
    assert complete_steps(tmp_path / "run" / "checkpoints") == [2]
    assert str(stopped.value).endswith("then continue with run.resume=auto")
    assert "step 2 is saved in" in str(stopped.value)
    # A number says nothing of whether an answer could be read.
    rows = read_metrics(tmp_path / "run")
    assert [row["turns/void_frac"] for row in rows] == [0, 0]
    assert [row["length/parse_rate"] for row in rows] == [1, 1]


def test_a_reward_that_hangs_is_told_of_and_given_up_before_all_have_hung(rl_config, tmp_path, monkeypatch):
    monkeypatch.setattr(scoring, "PATIENCE", 0.0)
    reward = tmp_path / "reward.py"
    reward.write_text("import time\n\ndef slow(sample):\n    time.sleep(100)\n")
    changes = {"reward.terms": [f"{reward}:slow"], "reward.deadline": 1.0, "reward.workers": 1}
    with pytest.raises(RewardError) as error:
        rl.run(rl_config(tmp_path) | changes | {"reward.self_test": "off"})
    failed, total, left = map(int, re.findall(r"(\d+) (?:of|samples|others)", str(error.value)))
    assert 0 < failed < total and left == total - failed
    assert "raise reward.deadline above 1 s, or reward.max_error_rate above" in str(error.value)
    told = (tmp_path / "run" / "log.txt").read_text()
    assert f"waiting for rewards (slow): 0 of {total} after" in told


def test_a_gap_stops_a_run_and_a_larger_one_is_allowed_by_its_option():
    algorithm = resolve(AlgorithmConfig(preset="grpo"), max_tokens=4)
    found = Metrics()
    found.add("mismatch/mult_prob_error", 1.116)
    with pytest.raises(TrainingError, match=r"1\.116, above 1\.105"):
        check_mismatch(found, algorithm, 0.1)
    check_mismatch(found, algorithm, 0.2)


def test_a_full_gpu_says_what_makes_room(rl_config, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 260 MiB. GPU 0 has")

    monkeypatch.setattr(LocalTrainer, "train_step", full)
    with pytest.raises(EnvironmentProblem, match=r"Tried to allocate 260 MiB after step 0.*estimate"):
        rl.run(rl_config(tmp_path))
    assert "Tried to allocate 260 MiB" in (tmp_path / "run" / "log.txt").read_text()


def test_an_update_that_fails_before_the_weights_change_loses_no_step(rl_config, tmp_path, monkeypatch):
    whole, calls = LocalTrainer.sum_gradients, []

    def full(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 260 MiB. GPU 0 has")
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(LocalTrainer, "sum_gradients", full)
    with pytest.raises(EnvironmentProblem, match="after step 2"):
        rl.run(rl_config(tmp_path, save__every=0, run__max_steps=4))
    assert complete_steps(tmp_path / "run" / "checkpoints") == [2]


def test_a_skipped_update_counts_in_the_schedule(rl_config, tmp_path, monkeypatch):
    take_step, calls = LocalTrainer.take_step, []

    def spoiled(self, role, metrics, lr, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            metrics.add("policy/loss", float("nan"))
        return take_step(self, role, metrics, lr, **kwargs)

    monkeypatch.setattr(LocalTrainer, "take_step", spoiled)
    rl.run(rl_config(tmp_path, save__every=0, run__max_steps=4, train__schedule="linear", train__warmup=0))
    rows = read_metrics(tmp_path / "run")
    assert [row["policy/update_skipped"] for row in rows] == [0, 1, 0, 0]
    assert [row["policy/lr"] for row in rows] == pytest.approx([5e-3, 3.75e-3, 2.5e-3, 1.25e-3])


def test_weights_that_were_cut_short_or_are_missing_are_refused_before_a_run_begins(rl_config, tmp_path):
    config = rl_config(tmp_path)
    half = tmp_path / "half"
    shutil.copytree(config["model.path"], half)
    os.truncate(half / "model.safetensors", 100_000)
    with pytest.raises(EnvironmentProblem, match=r"model.path: .*half.* has 100,000 bytes, its"):
        rl.run(config | {"model.path": str(half)})
    (half / "model.safetensors").unlink()
    with pytest.raises(EnvironmentProblem, match=r"half has no model\.safetensors"):
        rl.run(config | {"model.path": str(half)})
    assert not (tmp_path / "run").exists()


def test_the_log_holds_the_traceback_of_what_nobody_expected(rl_config, tmp_path):
    mine, run = tmp_path / "mine.py", tmp_path / "run"
    mine.write_text(
        "seen = []\n\ndef keep(groups):\n    seen.append(1)\n    if len(seen) == 2:\n        1 / 0\n    return groups\n"
    )
    with pytest.raises(ConfigError):
        rl.run(rl_config(tmp_path, algorithm__filter__function=f"{mine}:keep", run__max_steps=2))
    told = (run / "log.txt").read_text()
    assert "Traceback (most recent call last):" in told and "ConfigError: " in told
    assert f'File "{mine}", line 6, in keep' in told


def test_steps_without_a_checkpoint_are_kept_and_begun_again(rl_config, tmp_path, capsys):
    changes = rl_config(tmp_path) | {"run.max_steps": 1, "track.trajectories_every": 1}
    rl.run(changes)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    capsys.readouterr()
    rl.run(changes | {"run.resume": "auto"})
    said = capsys.readouterr().out
    assert "records steps up to 1 and has no complete checkpoint" in said
    assert "metrics.jsonl.1 and trajectories.1" in said
    old, new = (read_metrics(tmp_path / "run" / f"metrics.jsonl{end}") for end in (".1", ""))
    assert [row["step"] for row in old] == [row["step"] for row in new]
    assert list((tmp_path / "run" / "trajectories.1").glob("step-*.jsonl"))
