"""Metrics reach their files, survive a kill and never stop a run."""

import json
import sys
from contextlib import closing
from types import ModuleType

import numpy as np
import pytest

from saccade.config import TrackConfig
from saccade.run.loggers import Loggers, read_metrics

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


def test_a_logger_that_breaks_is_left_out(folder, said, monkeypatch):
    rows = []

    class Run:
        def log(self, row, step):
            if step == 2:
                raise ConnectionError("gone")
            rows.append((row, step))

        def finish(self): ...

    wandb = ModuleType("wandb")
    wandb.init = lambda **_: Run()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_MODE", "offline")
    with closing(Loggers(folder, TrackConfig(tensorboard=False, wandb=True))) as loggers:
        for step in (1, 2, 3):
            loggers.log({"reward/mean": 1.0, "time/bottleneck": "rollout"}, step)
    assert rows == [({"reward/mean": 1.0}, 1)]
    assert said == ["WARNING: wandb failed and is left out from here: ConnectionError: gone"]
    assert len(read_metrics(folder.metrics)) == 3
    monkeypatch.setitem(sys.modules, "wandb", None)
    with closing(Loggers(folder, TrackConfig(tensorboard=False, wandb=True))) as loggers:
        loggers.log({}, 4)
    assert said[1] == "WARNING: wandb is not installed: pip install wandb, or track.wandb=false"
