"""A run folder is created once, compared on resume and held by one process."""

import json
import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

from saccade.config import load
from saccade.errors import ConfigError, DataError


@pytest.fixture
def visit(open_folder):
    def opened_and_closed(*overrides, **manifest):
        with open_folder(*overrides, **manifest):
            pass

    return opened_and_closed


def test_a_new_folder_holds_everything(open_folder, config):
    with open_folder(data={"train": "ab12"}, template="cd34") as folder:
        names = {entry.name for entry in folder.path.iterdir()}
        manifest = json.loads((folder.path / "manifest.json").read_text())
        stored = load(folder.path / "config.resolved.yaml")
        chosen = load(folder.path / "config.yaml")
    assert chosen == config and chosen.model_fields_set == config.model_fields_set
    assert names >= {"config.resolved.yaml", "manifest.json", "metrics.jsonl", "log.txt"}
    assert names >= {"trajectories", "checkpoints"}
    assert not folder.resumed
    assert stored.model_dump() == config.model_dump()
    assert manifest["data"] == {"train": "ab12"} and manifest["template"] == "cd34"
    assert manifest["seed"] == 42 and manifest["command"] == "rl"
    assert manifest["packages"]["numpy"] == metadata.version("numpy")
    assert manifest["starts"][0]["argv"] == sys.argv
    assert manifest["git"] is None or len(manifest["git"].removesuffix("-dirty")) == 40


def test_resume_continues_and_remembers_both_starts(open_folder):
    with open_folder("run.resume=auto") as folder:
        assert not folder.resumed  # there was none to go on with
        assert load(folder.path / "config.yaml").run.resume == "none"  # what repeats a run does not go on with it
    with open_folder("run.resume=auto", "run.max_steps=9", "val.every=3", "save.keep=1") as folder:
        assert folder.resumed
        assert len(json.loads((folder.path / "manifest.json").read_text())["starts"]) == 2
        assert load(folder.path / "config.resolved.yaml").run.max_steps == 9


def test_a_second_start_and_other_settings_are_refused_by_name_and_value(visit):
    visit("train.lr=1e-6")
    with pytest.raises(ConfigError, match=r"run\.resume=auto.*run\.name=.*--out"):
        visit("train.lr=1e-6")
    with pytest.raises(ConfigError) as refusal:
        visit("run.resume=auto", "train.lr=2e-6", "algorithm.preset=rloo", "track.loggers=wandb")
    text = str(refusal.value)
    assert "train.lr: 1e-06 in the folder, 2e-06 now" in text
    assert "algorithm.preset: ['grpo'] in the folder, ['rloo'] now" in text
    assert "track" not in text
    visit("run.resume=auto", "train.lr=1e-6")  # the refusal left no lock


def test_resume_names_the_file_that_changed(visit):
    sets = [{"path": f"{name}.jsonl", "rows": 8, "hash": name} for name in ("a", "b")]
    visit(data="ab", sets=sets)
    with pytest.raises(ConfigError, match=r"data changed on disk: 'ab' in the folder, 'cd' now"):
        visit("run.resume=auto", data="cd")
    changed = [sets[0], sets[1] | {"hash": "c", "rows": 9}]
    with pytest.raises(ConfigError, match=r"data changed on disk: b\.jsonl.*8 usable.*9 now"):
        visit("run.resume=auto", data="ac", sets=changed)


def test_one_process_at_a_time_writes_to_a_folder(open_folder, visit):
    with open_folder(), pytest.raises(ConfigError, match=f"in use by process {os.getpid()} "):
        visit("run.resume=auto")
    visit("run.resume=auto")


@pytest.mark.parametrize("name", ["", "quarantine.jsonl"])
@pytest.mark.parametrize("error", [DataError, KeyboardInterrupt, ZeroDivisionError])
def test_a_refused_start_keeps_only_what_was_recorded_a_crash_all(open_folder, name, error):
    with pytest.raises(error), open_folder() as folder:
        if name:
            (folder.path / name).write_text("{}\n")
        raise error("no rows")
    kept = bool(name) or error is ZeroDivisionError
    assert folder.path.exists() == kept == (folder.path / "manifest.json").exists()
    assert not name or (folder.path / name).exists()


def test_a_function_that_changed_before_a_resume_is_named(open_folder, tmp_path):
    mine = tmp_path / "mine.py"
    for body, changed in (("1", []), ("1", []), ("2", [str(mine)])):
        mine.write_text(body)
        with open_folder("run.resume=auto", f"algorithm.filter.function={mine}:keep") as folder:
            assert folder.changed == changed


def test_a_run_that_was_killed_before_its_config_was_written_begins_again(visit, config):
    home = Path(config.run.out) / config.run.name
    home.mkdir(parents=True)
    for name in (".lock", "rank-0.log", ".seen-by-ranks", "config.resolved.yaml.4711", "metrics.jsonl"):
        (home / name).touch()
    visit("run.resume=auto")
    assert (home / "manifest.json").exists()


def test_what_is_no_run_is_not_taken_over(visit, config):
    home = Path(config.run.out) / config.run.name
    home.mkdir(parents=True)
    (home / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="holds other files"):
        visit("run.resume=auto")
    (home / "thesis.tex").unlink()
    (home / ".lock").unlink()
    home.rmdir()
    home.write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        visit()
