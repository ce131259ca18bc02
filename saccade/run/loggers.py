"""Metrics of a run: one JSON line per step always, TensorBoard and Weights & Biases when asked for.

A logger that fails is reported once and left out; training goes on. Refuses to know what a metric
means.

    loggers = Loggers(folder, config.track)
    loggers.log({"reward/mean": 0.5}, step=1)
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from saccade.config import TrackConfig
from saccade.run.folder import METRICS, RunFolder, write_whole

log = logging.getLogger(__name__)

Row = Mapping[str, float | str]


class Sink(NamedTuple):
    """An open logger: what takes a row, and what ends it."""

    write: Callable[[Row, int], object]
    close: Callable[[], object]


class Loggers:
    """All loggers of one run behind one call."""

    def __init__(self, folder: RunFolder, track: TrackConfig) -> None:
        self._folder = folder
        self._first_step: int | None = None  # of a resumed run
        self._unwritten: list[str] = []
        wanted = {"tensorboard": track.tensorboard, "wandb": track.wandb}
        self._waiting = [name for name, on in wanted.items() if on]
        self._sinks: dict[str, Sink] = {}

    def log(self, metrics: Row, step: int) -> None:
        """Write one row. Never raises for a logger's sake."""
        values = {name: _json_value(value) for name, value in metrics.items()}
        assert "step" not in values, "the step is an argument"
        row = {"step": step, "time": round(time.time(), 3)} | values
        self._unwritten.append(json.dumps(row, ensure_ascii=False) + "\n")
        self._append()
        self._open_waiting()
        for name in list(self._sinks):
            self._guard(name, self._sinks[name].write, metrics, step)

    def truncate_after(self, step: int) -> None:
        """Forget what a killed run logged after the checkpoint that is resumed from."""
        path = self._folder.metrics
        kept = [row for row in read_metrics(path) if row["step"] <= step]
        write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))
        self._first_step = step + 1

    def close(self) -> None:
        for name in list(self._sinks):
            self._guard(name, self._sinks[name].close)
        self._sinks.clear()
        if self._unwritten:
            self._append()

    def __enter__(self) -> Loggers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self) -> None:
        """Rows that a full disk refuses wait for the next call."""
        first_failure = len(self._unwritten) == 1
        try:
            append_whole(self._folder.metrics, "".join(self._unwritten).encode())
        except OSError as error:
            if first_failure:
                log.warning(f"{self._folder.metrics} cannot be written ({error}); rows are kept for later")
        else:
            self._unwritten.clear()

    def _open_waiting(self) -> None:
        for name in self._waiting:
            self._guard(name, self._open, name)
        self._waiting = []

    def _open(self, name: str) -> None:
        self._sinks[name] = SINKS[name](self._folder, self._first_step)

    def _guard(self, name: str, action: Callable[..., object], *arguments: object) -> None:
        try:
            action(*arguments)
        except ImportError:
            self._sinks.pop(name, None)
            log.warning(f"{name} is not installed: pip install {name}, or track.{name}=false")
        except Exception as error:
            self._sinks.pop(name, None)
            log.warning(f"{name} failed and is left out from here: {type(error).__name__}: {error}")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics file or run folder; a last line that a kill cut short is left out."""
    file = path / METRICS if path.is_dir() else path
    if not file.exists():
        return []
    *whole, _torn = file.read_bytes().split(b"\n")
    return [json.loads(line) for line in whole]


def append_whole(path: Path, data: bytes) -> None:
    """Append all of it or nothing. A line that an earlier kill cut short is removed first."""
    with path.open("r+b" if path.exists() else "w+b", buffering=0) as file:
        start = _end_of_last_line(file)
        file.truncate(start)
        file.seek(start)
        written = 0
        try:
            while written < len(data):
                written += file.write(data[written:]) or 0
        except OSError:
            file.truncate(start)
            raise


def _end_of_last_line(file: Any) -> int:
    end = file.seek(0, os.SEEK_END)
    block = 1 << 16
    while end:
        start = max(0, end - block)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _json_value(value: float | str) -> float | str | None:
    if isinstance(value, str):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


# -- optional loggers ------------------------------------------------------------------------------


def _numbers(row: Row) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if not isinstance(value, str)}


def _tensorboard(folder: RunFolder, first_step: int | None) -> Sink:
    """Records of a step at once, in this thread: what goes wrong is heard here."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    path = folder.path / "tensorboard" / f"events.out.tfevents.{time.time_ns()}.{os.getpid()}"
    path.parent.mkdir(exist_ok=True)
    writer = RecordWriter(path.open("wb"))

    def add(**event: Any) -> None:
        writer.write(Event(wall_time=time.time(), **event).SerializeToString())
        writer.flush()

    add(file_version="brain.Event:2")
    if first_step is not None:
        # Tells TensorBoard to drop what an earlier process wrote from this step on.
        add(step=first_step, session_log=SessionLog(status=SessionLog.START))

    def write(row: Row, step: int) -> None:
        values = [Summary.Value(tag=name, simple_value=v) for name, v in _numbers(row).items()]
        add(step=step, summary=Summary(value=values))

    return Sink(write, writer.close)


def _wandb(folder: RunFolder, first_step: int | None) -> Sink:
    os.environ.setdefault("WANDB_MODE", "offline")
    import wandb

    name = folder.path.name if first_step is None else f"{folder.path.name} from {first_step}"
    run = wandb.init(project="saccade", name=name, dir=str(folder.path))
    return Sink(lambda row, step: run.log(_numbers(row), step=step), run.finish)


SINKS: Mapping[str, Callable[[RunFolder, int | None], Sink]] = {"tensorboard": _tensorboard, "wandb": _wandb}
