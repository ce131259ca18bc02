"""One file, several trainings: each from the checkpoint of the one before, also after a kill."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import typer
import yaml

from saccade.config import load, to_yaml
from saccade.errors import ConfigError
from saccade.plugins.stages import stages
from saccade.run.loggers import read_metrics
from tests.ranks.processes import forked, run_command

KILLS = """
import os, pathlib, signal

def held(sample):
    mark = pathlib.Path(__file__).with_name("killed")
    if sample.step > 1 and not mark.exists():
        mark.touch()
        os.kill(os.getppid(), signal.SIGKILL)
    return 1.0
"""


@pytest.fixture
def file(tmp_path, rl_config, scenes):
    """SFT, then RL whose process is killed once in its second step."""
    (tmp_path / "kills.py").write_text(KILLS)
    shared = yaml.safe_load(
        to_yaml(load(rl_config(tmp_path, run__max_steps=2, save__every=1, save__background=False)), full=False)
    )
    train = shared["data"].pop("train")
    shared["reward"] = {"terms": [f"{tmp_path / 'kills.py'}:held"], "self_test": "off"}
    shared["stages"] = [
        {"command": "sft", "name": "cold", "data": {"train": str(scenes / "shown.jsonl")}, "run": {"max_steps": 1}},
        {"command": "rl", "name": "seen", "data": {"train": train}},
    ]
    path = tmp_path / "stages.yaml"
    path.write_text(yaml.safe_dump(shared))
    return path


def start(line: list[str], *, start_new_session: bool) -> SimpleNamespace:
    """As `subprocess.Popen`, but forked from a process that has imported torch."""
    assert line[:2] == [sys.executable, "-c"] and start_new_session
    assert "saccade 0" in subprocess.check_output([*line[:3], "--version"], text=True)  # what it would start
    process = forked(run_command, {"arguments": line[3:], "environment": {}, "folder": os.getcwd()})
    return SimpleNamespace(wait=lambda: process.join() or process.exitcode)


def test_a_killed_stage_goes_on_and_what_is_over_is_not_repeated(tmp_path, file, said, monkeypatch):
    monkeypatch.setattr(stages, "subprocess", SimpleNamespace(Popen=start))
    with pytest.raises(typer.Exit) as ended:
        stages.run(file, [], dry_run=False, smoke=False)
    folder = tmp_path / "run"
    assert ended.value.exit_code == 137 and [*json.loads((folder / "stages.json").read_text())] == ["cold"]
    with pytest.raises(ConfigError, match=r"exists; continue with run\.resume=auto"):
        stages.run(file, [], dry_run=False, smoke=False)
    trained = (folder / "cold" / "checkpoints" / "step-1" / "state" / "files.json").stat().st_mtime_ns
    stages.run(file, ["run.resume=auto"], dry_run=False, smoke=False)
    assert trained == (folder / "cold" / "checkpoints" / "step-1" / "state" / "files.json").stat().st_mtime_ns
    config = load(folder / "seen" / "config.yaml")
    assert config.model.path == str(folder / "cold" / "checkpoints" / "step-1")
    assert [row["step"] for row in read_metrics(folder / "seen")] == [1, 2]
    assert f"resuming from {folder / 'seen' / 'checkpoints' / 'step-1'}" in (folder / "seen" / "log.txt").read_text()
    with pytest.raises(ConfigError, match=r"(?s)stage cold is over.*\+ *lr: 0\.5"):
        stages.run(file, ["run.resume=auto", "cold.train.lr=0.5"], dry_run=False, smoke=False)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"command": "eval"}, r"command=eval: is no training; try command=rl, sft, dpo, reward-model"),
        ({"command": None}, r"command=: is no training; try command=rl"),
        ({"from": "first"}, r"from=first: no such name; expected one of last, best"),
        ({"name": "train"}, r"`name`: expects one that no other stage and no section has"),
        ({"run": {"name": "x"}}, r"run\.name is that of all stages"),
        ({"train": {"lrr": 1}}, r"(?s)stage cold: unknown key 'train\.lrr'; did you mean 'train\.lr'"),
        ({"data": {"train": "no.jsonl"}}, r"stage cold: .*no\.jsonl"),
    ],
)
def test_what_is_wrong_with_any_stage_is_told_before_the_first(file, change, told):
    tree = yaml.safe_load(file.read_text())
    tree["stages"][0] |= change
    file.write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match=told):
        stages.read(file, [])


def test_the_best_checkpoint_is_that_of_a_stage_that_validates(file):
    tree = yaml.safe_load(file.read_text())
    tree["stages"][1]["from"] = "best"
    file.write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match=r"stage seen: `from: best` needs validations in stage cold"):
        stages.read(file, [])
    with pytest.raises(ConfigError, match=r"colds\.train\.lr=1: no section and no stage begins so"):
        stages.read(file, ["colds.train.lr=1"])
