"""Metrics reach their files, survive a kill and never stop a run."""

import json
import signal
import sys
from contextlib import closing

import numpy as np
import pytest

from saccade.config import TrackConfig
from saccade.recipes import rl
from saccade.run.loggers import LOGGERS, Logger, Loggers, read_metrics

PLAIN = TrackConfig(tensorboard=False)


def test_one_line_per_call(folder):
    with closing(Loggers(folder, PLAIN)) as loggers:
        half = np.float32(0.5)
        loggers.log({"reward/mean": half, "time/bottleneck": "rollout"}, 1)
        loggers.log({"reward/mean": float("nan"), "policy/ratio_max": float("inf")}, 2)
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["reward/mean"] == 0.5 and lines[0]["time/bottleneck"] == "rollout"
    assert lines[1]["reward/mean"] is None and lines[1]["policy/ratio_max"] is None


def test_resume_appends_after_dropping_later_steps(folder):
    with closing(Loggers(folder, PLAIN)) as loggers:
        for step in (0, 1, 2, 3):
            loggers.log({"reward/mean": step}, step)
    with closing(Loggers(folder, PLAIN)) as loggers:
        loggers.truncate_after(1)
        loggers.log({"reward/mean": 20.0}, 2)
    assert [row["reward/mean"] for row in read_metrics(folder.path)] == [0.0, 1.0, 20.0]


def test_a_line_cut_by_a_kill_is_dropped(folder):
    folder.metrics.write_text('{"step": 1}\n{"step": 2, "rew')
    assert read_metrics(folder.metrics) == [{"step": 1}] and read_metrics(folder.path / "nowhere") == []
    with closing(Loggers(folder, PLAIN)) as loggers:
        loggers.log({}, 2)
    assert [row["step"] for row in read_metrics(folder.metrics)] == [1, 2]


def test_rows_wait_while_the_disk_refuses(folder, said):
    with closing(Loggers(folder, PLAIN)) as loggers:
        folder.metrics.unlink()
        folder.metrics.mkdir()
        loggers.log({}, 1)
        loggers.log({}, 2)
        assert len(said) == 1 and "metrics.jsonl" in said[0]
        folder.metrics.rmdir()
        loggers.log({}, 3)
    assert [row["step"] for row in read_metrics(folder.metrics)] == [1, 2, 3]


def test_tensorboard_holds_the_scalars_and_drops_stale_steps(folder):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    track = TrackConfig(tensorboard=True)
    with closing(Loggers(folder, track)) as loggers:
        for step in (1, 2, 3):
            loggers.log({"reward/mean": step, "time/bottleneck": "rollout"}, step)
    with closing(Loggers(folder, track)) as loggers:
        loggers.truncate_after(1)
        loggers.log({"reward/mean": 20.0}, 2)
    accumulator = loader.EventAccumulator(str(folder.path / "tensorboard"))
    accumulator.Reload()
    scalars = [(event.step, event.value) for event in accumulator.Scalars("reward/mean")]
    assert scalars == [(1, 1.0), (2, 20.0)]


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab"])
def test_tables_of_answers_reach_loggers_with_their_pictures(name, tmp_path, rl_config, scenes, said, monkeypatch):
    """With the libraries themselves, offline; skipped where one is not installed."""
    library = pytest.importorskip(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_DATA_DIR", raising=False)
    val = {"data.val": str(scenes / "val.jsonl"), "val.n": 2, "val.every": 1, "val.log_generations": 2}
    rl.run(rl_config(tmp_path, run__max_steps=1, track__loggers=[name]) | val)
    assert not [text for text in said if "left out" in text or "not installed" in text]
    folder = tmp_path / "run"
    if name == "mlflow":
        client = library.MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
        [run] = client.search_runs([client.get_experiment_by_name("saccade").experiment_id])
        assert run.data.metrics["val/val/pass_at_2"] >= 0 and run.info.status == "FINISHED"
        tables = [file.path for file in client.list_artifacts(run.info.run_id, "generations/val/val")]
        assert tables == [f"generations/val/val/step-{n}.json" for n in (0, 1)]
    if name == "swanlab":  # a picture says of which question it is
        assert b"counting-8-0" in next(folder.glob("swanlab/*/*.swanlab")).read_bytes()
    text = "".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.suffix in (".json", ".txt"))
    assert "how many" in text
    files = [path for path in folder.rglob("*") if path.is_file() and "trajectories" not in path.parts]
    assert sum(path.read_bytes().startswith(b"\x89PNG") for path in files) >= 2


def test_an_interrupt_stays_that_of_the_run(folder, said, monkeypatch):
    pytest.importorskip("swanlab")
    monkeypatch.setenv("HOME", str(folder.path))
    handler = signal.getsignal(signal.SIGINT)
    with closing(Loggers(folder, TrackConfig(tensorboard=False, loggers=["swanlab"]))) as loggers:
        loggers.log({"reward/mean": 1.0}, 1)
        assert signal.getsignal(signal.SIGINT) is handler and not said


def test_a_logger_that_breaks_is_left_out(folder, said, monkeypatch):
    rows = []

    def write(row, step):
        if step == 2:
            raise ConnectionError("gone")
        rows.append((row, step))

    monkeypatch.setitem(LOGGERS, "wandb", lambda *_: Logger(write, str))
    with closing(Loggers(folder, TrackConfig(tensorboard=False, loggers=["wandb"]))) as loggers:
        for step in (1, 2, 3):
            loggers.log({"reward/mean": 1.0, "time/bottleneck": "rollout"}, step)
    assert rows == [({"reward/mean": 1.0, "time/bottleneck": "rollout"}, 1)]
    assert said == ["WARNING: wandb failed and is left out from here: ConnectionError: gone"]
    assert len(read_metrics(folder.metrics)) == 3
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with closing(Loggers(folder, TrackConfig(tensorboard=False, loggers=["mlflow"]))) as loggers:
        loggers.log({}, 4)
    assert said[1] == "WARNING: mlflow is not installed: pip install mlflow, or take it out of track.loggers"
