"""Checkpoints: N + M steps are N, stop, resume, M; a kill at any moment leaves a good one; which step is the best."""

import hashlib
import json
import os
import shutil
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from saccade.errors import ConfigError, EnvironmentProblem, Interrupted
from saccade.models import files
from saccade.plugins.engines.weights import folder_shapes
from saccade.plugins.evaluation import evaluate
from saccade.plugins.export.export import export
from saccade.plugins.generate import generate
from saccade.recipes import rl, sft
from saccade.run import checkpoint
from saccade.run.progress import Progress, from_json
from tests.ranks.processes import forked


def steps_of(run):
    return checkpoint.complete_steps(run / "checkpoints")


RECIPES = {
    # Step 2 ends with the last row of an epoch; step 3 begins the next one.
    "grpo with a KL over the end of an epoch": (
        rl.run, "rl", {"data.val": "val", "val.every": 2, "train.prompts_per_step": 12, "train.samples_per_prompt": 2}),
    "dapo with dynamic sampling": (
        rl.run, "rl", {"algorithm.preset": "dapo", "algorithm.overlong.buffer": 0, "train.updates_per_step": 2}),
    "sft over the end of an epoch": (sft.run, "sft", {"train.prompts_per_step": 10}),
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_stopped_and_resumed_is_the_same_run(tmp_path, name, scenes, rl_config, sft_config, resumed):
    recipe, kind, changes = RECIPES[name]
    config = {"rl": rl_config, "sft": sft_config}[kind](tmp_path, run__max_steps=3) | changes
    if "data.val" in config:
        config["data.val"] = str(scenes / "val.jsonl")
    last, _ = resumed(recipe, config)
    if "epoch" in name:
        place = checkpoint.read_progress(last.with_name("step-2"))["stream"]
        assert (place["epoch"], place["cursor"]) == ((1, 0) if kind == "rl" else (0, 20))


@pytest.fixture(scope="module")
def begun(tmp_path_factory, rl_config):
    """A run of two steps, both saved, in a folder of its own."""
    config = rl_config(tmp_path_factory.mktemp("begun"), run__max_steps=2, save__every=1)
    rl.run(config | {"algorithm.kl.coef": 0.0})
    return config | {"algorithm.kl.coef": 0.0}


@pytest.fixture
def copied(begun, tmp_path):
    shutil.copytree(Path(begun["run.out"]) / "run", tmp_path / "run")
    yield begun | {"run.out": str(tmp_path)}


def flip_one_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(("name", "resume"), [("model.safetensors", "auto"), ("state/optimizer.safetensors", "path")])
def test_a_flipped_byte_is_found_before_going_on(copied, name, resume):
    folder = Path(copied["run.out"]) / "run" / "checkpoints"
    newest, older = folder / "step-2", folder / "step-1"
    flip_one_byte(newest / name)
    asked = str(newest) if resume == "path" else resume
    with pytest.raises(EnvironmentProblem) as caught:
        checkpoint.find(folder, asked)
    assert str(newest / name) in str(caught.value)
    assert f"run.resume={older}" in str(caught.value)
    assert checkpoint.find(folder, str(older)) == older
    older.rename(aside := folder / f".{older.name}.before")  # as a kill amid the exchange of one leaves it
    assert checkpoint.find(folder, str(older)) == older and not aside.exists()
    flip_one_byte(older / name)
    with pytest.raises(EnvironmentProblem, match=r"start again under another run\.name"):
        checkpoint.find(folder, asked)


def test_weights_may_be_read_by_whom_the_folder_is_open_to(begun):
    files = [*Path(begun["run.out"]).rglob("*.safetensors")]
    assert files and all(file.stat().st_mode & 0o777 == file.parent.stat().st_mode & 0o666 for file in files)


def test_damaged_weights_are_refused_wherever_they_are_loaded(copied):
    out = Path(copied["run.out"])
    folder = out / "run" / "checkpoints" / "step-2"
    flip_one_byte(folder / "state" / "optimizer.safetensors")
    files.require_intact(folder)  # what only a run that goes on reads does no harm here
    flip_one_byte(folder / "model.safetensors")
    options = copied | {"model.path": str(folder), "run.name": "other", "run.out": str(out)}
    options |= {"data.val": options["data.train"]}
    for loading in (
        lambda: evaluate.run(options),
        lambda: generate.run(options),
        lambda: rl.run(options | {"run.name": "third"}),
        lambda: export(folder, out / "exported"),
        lambda: export(folder, out / "exported", dtype="bfloat16", verify=False),
        lambda: folder_shapes(str(folder)),  # of engines that load them on their own
    ):
        with pytest.raises(EnvironmentProblem, match=r"^/.*step-2/model\.safetensors: damaged"):
            loading()
    assert not (out / "exported").exists()
    (folder / "state" / "files.json").unlink()  # as the message says
    files.require_intact(folder)


def test_a_large_file_has_the_hash_of_the_hashes_of_its_blocks(tmp_path, monkeypatch):
    data, path = bytes(range(250)) * 10, tmp_path / "weights"
    monkeypatch.setattr(files, "HASHED", 1000)
    blocks = [hashlib.sha256(data[start : start + 1000]).digest() for start in (0, 1000, 2000)]
    path.write_bytes(data)
    expected = hashlib.sha256(b"".join(blocks)).hexdigest()
    assert files.checksum(path) == {"bytes": 2500, "sha256_of_blocks": expected}


def test_a_changed_option_is_refused_a_longer_run_is_not(copied, numbers, capsys):
    folder = Path(copied["run.out"]) / "run"
    before = numbers(folder)
    rl.run(copied | {"run.resume": "auto"})
    assert f"resuming from {folder / 'checkpoints' / 'step-2'}, after step 2\n" in capsys.readouterr().out
    assert numbers(folder) == before and steps_of(folder) == [1, 2]  # a finished run trains nothing more
    with pytest.raises(ConfigError, match=r"train\.lr: 0\.005 in the folder, 0\.001 now"):
        rl.run(copied | {"run.resume": "auto", "train.lr": 1e-3})
    rl.run(copied | {"run.resume": "auto", "run.max_steps": 3, "save.keep": 9, "track.trajectories_every": 3})
    assert steps_of(folder) == [1, 2, 3]


def test_changed_data_and_weights_to_start_from_are_refused(copied, tmp_path):
    base, rows = tmp_path / "base", tmp_path / "train.jsonl"
    shutil.copytree(copied["model.path"], base)
    (tmp_path / "images").symlink_to(Path(copied["data.train"]).parent / "images")
    rows.write_text(Path(copied["data.train"]).read_text())
    config = copied | {"model.path": str(base), "run.name": "moved", "run.max_steps": 1, "data.train": str(rows)}
    rl.run(config)
    weights = base / "model.safetensors"
    flip_one_byte(weights)
    first, _, rest = rows.read_text().partition("\n")
    rows.write_text(rest)
    with pytest.raises(ConfigError, match=r"(?s)data changed.*weights changed on disk: .* \(those of model\.path"):
        rl.run(config | {"run.resume": "auto", "run.max_steps": 2})
    rows.write_text(f"{first}\n{rest}")
    weights.unlink()  # a checkpoint of all weights needs them no more
    rl.run(config | {"run.resume": "auto", "run.max_steps": 2})
    assert steps_of(Path(config["run.out"]) / "moved") == [1, 2]


def test_going_back_to_a_path_leaves_one_history(copied, numbers):
    folder = Path(copied["run.out"]) / "run"
    first = folder / "checkpoints" / "step-1"
    shutil.copytree(first, first.with_name("step-1-backup"))  # copies by hand disturb nothing
    (folder / "trajectories" / "step-2 (copy).jsonl").write_text("")
    rl.run(copied | {"run.resume": str(first), "run.max_steps": 2, "save.every": 0})
    assert [row["step"] for row in numbers(folder)] == [1, 2]
    rl.run(copied | {"run.resume": "auto", "run.max_steps": 4})
    assert steps_of(folder) == [2, 3, 4]
    rl.run(copied | {"run.resume": str(folder / "checkpoints" / "step-2"), "run.max_steps": 3})
    assert steps_of(folder) == [2, 3]  # step-4 belonged to the history that was left


def test_a_start_from_a_checkpoint_that_is_not_whole(copied, tmp_path, capsys):
    broken = Path(copied["run.out"]) / "run" / "checkpoints" / "step-2"
    (broken / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="no complete checkpoint there"):
        rl.run(copied | {"run.resume": str(broken), "run.max_steps": 3})
    rl.run(copied | {"run.resume": "auto", "run.max_steps": 2})  # from step 1
    assert steps_of(tmp_path / "run") == [1, 2]
    said = capsys.readouterr().out.replace("\n", "")
    assert "step-2, which is incomplete: model.safetensors has 0 of" in said
    assert "step 2/2" in said and "step 1/2" not in said


def test_without_a_validation_no_checkpoint_is_the_best(copied):
    with pytest.raises(ConfigError, match="no validation has named a best checkpoint"):
        rl.run(copied | {"run.resume": "best"})


def hang_in_a_save(config):
    checkpoint._verify = lambda folder, _: time.sleep(600 * folder.name.startswith(".step-2"))
    rl.run(config)


def test_killed_in_a_save_and_resumed(begun, copied, tmp_path, same_weights, numbers):
    """Another process makes the run of `begun` once more, and hangs in its second save."""
    config = copied | {"run.name": "killed"}
    process = forked(hang_in_a_save, config)
    run, folder = tmp_path / "killed", tmp_path / "killed" / "checkpoints"
    while process.exitcode is None and not any(folder.glob(".step-2.*/state/progress.json")):
        time.sleep(0.01)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL and steps_of(run) == [1]
    rl.run(config | {"run.resume": "auto"})
    whole = Path(begun["run.out"]) / "run"
    one, other = (path / "checkpoints" / "step-2" for path in (whole, run))
    assert same_weights(one, other) and same_weights(one / "state", other / "state")
    assert numbers(whole) == numbers(run)
    assert not list(folder.glob(".step-*"))


def test_a_request_to_stop_during_a_rollout_saves_the_last_whole_step(
    tmp_path, rl_config, same_weights, word_model, numbers
):
    """An environment sends the signal while the first step still samples."""
    world = tmp_path / "world.py"
    world.write_text(STOPPER.replace("RUN", str(os.getpid())))
    env = {"env.name": f"{world}:Stopper", "reward.terms": []}
    config = rl_config(tmp_path, run__max_steps=1, rollout__stop=["?", "red", "1", "2"]) | env
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match=r"stopped after step 0; continue with run\.resume=auto") as stopped:
        rl.run(config)
    assert stopped.value.exit_code == 130
    assert signal.getsignal(signal.SIGTERM) == before
    assert steps_of(tmp_path / "run") == [0]
    assert same_weights(word_model, tmp_path / "run" / "checkpoints" / "step-0")
    rl.run(config | {"run.resume": "auto"})
    rl.run(config | {"run.name": "whole"})
    paths = (tmp_path / name / "checkpoints" / "step-1" for name in ("run", "whole"))
    assert same_weights(*paths)
    # Its process answers when it likes: who shares a batch differs, and with it the last digits.
    ((row,), (whole,)) = (numbers(tmp_path / name) for name in ("run", "whole"))
    assert row == pytest.approx(whole, abs=1e-5, nan_ok=True)


STOPPER = """
import os
import signal
from pathlib import Path
class Stopper:
    def reset(self, sample, seed):
        return sample.messages
    def step(self, message):
        asked = Path(__file__).with_suffix(".asked")
        if not asked.exists():
            asked.touch()
            os.kill(RUN, signal.SIGTERM)
        return [], float("2" in message.text.split()), True, {}
    def close(self):
        pass
"""


START = Progress()


def test_progress_survives_a_checkpoint():
    progress = Progress(
        step=3, updates=6, stream={"epoch": 0, "cursor": 12}, algorithm=("grpo", "clip"),
        algorithm_state={"kl_coef": 0.04}, scores=("a",), bad_updates={"policy": 1}, validation_sets={"val": "hash"},
    )  # fmt: skip
    assert from_json(json.loads(json.dumps(asdict(progress)))) == progress
    assert progress.with_scores(["c", "a", "b"]).scores == ("a", "b", "c")


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
