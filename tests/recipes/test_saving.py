"""Checkpoints that are written while training goes on: the same folder, no failure unheard."""

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from transformers import modeling_utils

from saccade.errors import EnvironmentProblem, Interrupted, RankLost
from saccade.plugins.reward_models import reward_training
from saccade.recipes import rl, sft
from saccade.run.checkpoint import complete_steps
from saccade.run.loggers import read_metrics
from saccade.run.training_run import Run
from saccade.system import devices
from saccade.trainer.local import LocalTrainer

THREAD = "checkpoint"


def is_writer():
    return threading.current_thread().name.startswith(THREAD)


@pytest.fixture
def before_writing(monkeypatch):
    """Something that happens in the thread before the first file of each checkpoint."""
    make_folder = Path.mkdir

    def use(happens):
        def mkdir(self, *args, **kwargs):
            if is_writer() and self.name.startswith(".step-") and not self.exists():
                happens()
            make_folder(self, *args, **kwargs)

        monkeypatch.setattr(Path, "mkdir", mkdir)

    return use


def wait_for_step(run, step):
    deadline = time.monotonic() + 60
    while read_metrics(run)[-1]["step"] < step and time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_run_that_starts_from_another_keeps_that_start_and_none_of_its_scores(
    rl_config, scenes, tmp_path, monkeypatch
):
    asked = {"data.val": str(scenes / "val.jsonl"), "val.every": 1, "save.every": 1}
    rl.run(rl_config(tmp_path / "a", run__max_steps=2) | asked)
    other = str(tmp_path / "a" / "run" / "checkpoints" / "step-2")
    changes = rl_config(tmp_path / "b", run__max_steps=3) | asked | {"run.resume": other, "save.every": 0}

    def stop(self, done, total):
        self._stop()

    with monkeypatch.context() as patch, pytest.raises(Interrupted, match="after step 2"):
        patch.setattr(Run, "watch", stop)
        rl.run(changes)
    assert steps_of(tmp_path / "b" / "run") == [2]
    rl.run(changes | {"run.resume": "auto"})
    assert rows_of(tmp_path / "b" / "run") == [3]
    kept = json.loads((tmp_path / "b" / "run" / "checkpoints" / "step-3" / "state" / "progress.json").read_text())
    assert kept["best_step"] == 3


def steps_of(run):
    return complete_steps(run / "checkpoints")


def rows_of(run):
    return [row["step"] for row in read_metrics(run)]


SFT = {"train.prompts_per_step": 2}
LORA = {"model.train": "lora", "model.lora.rank": 4}
DEEP = {"loss": "hps", "pooling": "attention", "head": "mlp", "bounded": True, "probe_layer": 0}
# The recipe, its options, and files that must be among those of the checkpoint.
KINDS = {
    "a critic and a surplus": (
        "rl",
        {"algorithm.preset": "ppo", "train.prompts_per_step": 6}
        | {"algorithm.filter.dynamic": True, "algorithm.filter.keep_surplus": True},
        {"state/critic/weights.safetensors", "state/critic/optimizer.safetensors", "state/surplus/groups.json"},
    ),
    "adapters that are held": (
        "rl",
        LORA | {"algorithm.kl.update": "copy", "algorithm.kl.update_every": 1},
        {"adapter/adapter_model.safetensors", "state/reference/adapters.safetensors"},
    ),
    "a deep reward model": (
        "rm",
        {f"reward_model.{name}": value for name, value in DEEP.items()} | {"model.dtype": "bfloat16", "train.ema": 0.5},
        {"reward_head.safetensors", "state/ema/reward_head.safetensors", "state/ema/weights.safetensors"},
    ),
}
RECIPES = {"rl": rl.run, "rm": reward_training.run}


def content(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


@pytest.mark.parametrize("name", KINDS)
def test_the_folder_is_that_of_a_save_that_waits(name, tmp_path, rl_config, sft_config, before_writing):
    """Nothing of step 1 is written before step 2 has moved every weight."""
    kind, changes, expected = KINDS[name]
    (rows := tmp_path / "rows.jsonl").write_text('{"prompt": "?", "chosen": "1", "rejected": "red"}\n' * 8)
    config = rl_config(tmp_path) if kind == "rl" else sft_config(tmp_path, data__train=str(rows))
    config, seen = config | {"run.max_steps": 2, "save.every": 1} | changes, list[list[int]]()
    RECIPES[kind](config | {"run.name": "waits", "save.background": False})

    def late():
        wait_for_step(tmp_path / "goes_on", 2)
        seen.append(rows_of(tmp_path / "goes_on"))

    before_writing(late)
    RECIPES[kind](config | {"run.name": "goes_on"})
    assert seen == [[1, 2]]
    for step in ("step-1", "step-2"):
        one, other = (content(tmp_path / run / "checkpoints" / step) for run in ("waits", "goes_on"))
        assert one.keys() == other.keys() > expected
        assert [path for path in one if one[path] != other[path]] == []
    first, second = (content(tmp_path / "goes_on" / "checkpoints" / f"step-{n}") for n in (1, 2))
    weights = {path for path in expected if path.endswith(".safetensors")}
    assert all(first[path] != second[path] for path in weights)


def full_disk():
    raise OSError(28, "No space left on device")


def test_a_failure_ends_the_run_at_its_next_step(tmp_path, sft_config, before_writing):
    before_writing(full_disk)
    with pytest.raises(EnvironmentProblem, match="step-3: No space left on device") as caught:
        sft.run(sft_config(tmp_path, run__max_steps=6, save__every=3) | SFT)
    reached = rows_of(tmp_path / "run")[-1]
    assert 3 <= reached < 6  # the next save would wait for this one
    assert steps_of(tmp_path / "run") == [reached]  # as after any error that touched no weight
    assert f"step {reached} is saved in" in str(caught.value)


def test_a_disk_that_stays_full_leaves_the_folder_free(tmp_path, sft_config, monkeypatch):
    """The checkpoint that is tried at the end fails like the one before it."""
    config = sft_config(tmp_path, save__every=2) | SFT
    heard = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as now:
        now.setattr("saccade.run.checkpoint.write_files", lambda *_: full_disk())
        with pytest.raises(EnvironmentProblem, match="No space left on device"):
            sft.run(config)
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []  # not half a one either
    assert signal.getsignal(signal.SIGTERM) == heard
    assert not any(thread.name.startswith(THREAD) for thread in threading.enumerate())
    sft.run(config | {"run.resume": "auto"})
    assert steps_of(tmp_path / "run") == [2, 4]


def test_a_disk_that_is_full_is_refused_before_the_first_step_or_names_the_checkpoint_before(
    tmp_path, sft_config, monkeypatch, capsys
):
    """In the end there was room for the first one; the last of step 4 is tried once more."""
    usage, folder, free = shutil.disk_usage(tmp_path), tmp_path / "run" / "checkpoints", [5_000, 9_000_000]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free[-1 - bool(steps_of(folder.parent))]))
    with pytest.raises(EnvironmentProblem, match=r"needs up to [\d.]+ MB, 5\.0 kB are free") as caught:
        sft.run(sft_config(tmp_path, save__every=2, save__background=False) | SFT)
    assert f"step 2 is saved in {folder / 'step-2'}; fix this" in str(caught.value)
    assert "could not be saved" not in capsys.readouterr().out
    free[-1] = 5_000
    with pytest.raises(EnvironmentProblem, match=r"a checkpoint needs up to [\d.]+ MB, 5\.0 kB are"):
        sft.run(sft_config(tmp_path, save__every=0, run__name="small") | SFT)
    assert not (tmp_path / "small").exists()  # so the same command can be given again


def test_a_tensor_that_is_lost_on_the_way_is_found(tmp_path, sft_config, monkeypatch):
    write = modeling_utils.safe_save_file

    def lossy(tensors, *args, **kwargs):
        write(dict(list(tensors.items())[is_writer() :]), *args, **kwargs)

    monkeypatch.setattr(modeling_utils, "safe_save_file", lossy)
    with pytest.raises(EnvironmentProblem, match=r"step-2\.\d+: parameters are missing") as caught:
        sft.run(sft_config(tmp_path, save__every=2) | SFT)
    kept = steps_of(tmp_path / "run")[-1]
    assert caught.value.exit_code == 3 and f"step {kept} is saved in" in str(caught.value)


@pytest.mark.parametrize(
    ("number", "then", "raised"),
    [
        (signal.SIGHUP, lambda: None, Interrupted),  # a terminal that is closed
        (signal.SIGTERM, full_disk, EnvironmentProblem),
    ],
    ids=["well", "badly"],
)
def test_a_request_to_stop_waits_for_what_is_being_written(number, then, raised, tmp_path, rl_config, before_writing):
    def ask():
        os.kill(os.getpid(), number)
        time.sleep(0.5)
        then()

    before_writing(ask)
    heard = signal.signal(number, signal.SIG_DFL)  # as without nohup
    try:
        with pytest.raises(raised):
            rl.run(rl_config(tmp_path, save__every=1))
    finally:
        signal.signal(number, heard)
    assert steps_of(tmp_path / "run") == [1] and rows_of(tmp_path / "run") == [1]


def test_one_is_written_at_a_time(tmp_path, sft_config, before_writing):
    found = []

    def look():
        folder = tmp_path / "run" / "checkpoints"
        found.append((steps_of(tmp_path / "run"), len(list(folder.glob(".step-*")))))
        if len(found) == 1:  # step 2 is about to be saved
            wait_for_step(tmp_path / "run", 2)
            time.sleep(0.5)

    before_writing(look)
    changes = {"save.every": 1, "save.keep": 2}
    sft.run(sft_config(tmp_path) | SFT | changes)
    assert found == [([], 0), ([1], 0), ([1, 2], 0)]  # the last step is not left to the thread
    assert steps_of(tmp_path / "run") == [3, 4]
    rows = read_metrics(tmp_path / "run")
    assert rows[2]["time/save"] > 0.15  # step 2 was saved once step 1 was on disk
    assert any(row.get("time/background/save", 0) > 0.15 for row in rows)
    phases = [n for n in rows[2] if n.startswith("time/") and n.count("/") == 1]
    parts = [rows[2][n] for n in phases if n not in ("time/step", "time/bottleneck")]
    assert sum(parts) == pytest.approx(rows[2]["time/step"])


@pytest.mark.parametrize(("options", "end"), [
    ({"save.every": 0}, "nothing is saved, and run.resume=auto starts again; run.restarts=3 does so by itself"),
    ({"save.every": 2}, "step-2, and run.resume=auto continues; run.restarts=3 does so by itself"),
])  # fmt: skip
def test_a_run_that_lost_a_rank_saves_no_more_and_ends_with_what_to_do(
    tmp_path, sft_config, monkeypatch, capsys, options, end
):
    """After the stacks of all other ranks."""
    train_step, calls = LocalTrainer.train_step, []

    def losing(self, *arguments, **more):
        calls.append(1)
        if len(calls) == 3:
            raise RankLost("rank 1 on a died: killed\n-- rank 0 on a was at:\n  File")
        return train_step(self, *arguments, **more)

    monkeypatch.setattr(LocalTrainer, "train_step", losing)
    monkeypatch.setattr(Run, "phase", lambda run, name: run.display.phase(name))  # before the update: during rollouts
    with pytest.raises(RankLost) as caught:
        sft.run(sft_config(tmp_path) | SFT | options)
    first, *stacks, last = str(caught.value).splitlines()
    assert last.startswith(f"{first}; ") and last.endswith(end) and len(stacks) == 2
    assert steps_of(tmp_path / "run") == [2] * (options["save.every"] == 2)


def test_without_room_for_a_copy_training_waits_and_says_so_once(
    tmp_path, sft_config, monkeypatch, capsys, before_writing
):
    in_thread = []
    before_writing(lambda: in_thread.append(1))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1_000_000))
    monkeypatch.setattr(devices, "count", lambda wanted: 8)
    sft.run(sft_config(tmp_path, save__every=1) | SFT)
    said = capsys.readouterr().out
    assert said.count("training waits while checkpoints are written: a copy takes") == 1
    assert said.count("1 of 8 GPUs is used; run.gpus=8 uses all of them") == 1
    assert in_thread == [] and steps_of(tmp_path / "run") == [2, 3, 4]
