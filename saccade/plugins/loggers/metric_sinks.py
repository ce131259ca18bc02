"""Loggers besides the JSON lines: TensorBoard, and Weights & Biases (offline unless WANDB_MODE says
otherwise).

    write, close = tensorboard(folder, first_step=None)
    write({"reward/mean": 0.5}, 1)
"""

import os
import time
from collections.abc import Callable
from typing import Any

from saccade.run.folder import RunFolder
from saccade.run.loggers import Row

Logger = tuple[Callable[[Row, int], object], Callable[[], object]]  # writes a row of a step, closes


def _numbers(row: Row) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if not isinstance(value, str)}


def tensorboard(folder: RunFolder, first_step: int | None) -> Logger:
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

    return (write, writer.close)


def wandb(folder: RunFolder, first_step: int | None) -> Logger:
    os.environ.setdefault("WANDB_MODE", "offline")
    import wandb as library

    name = folder.path.name if first_step is None else f"{folder.path.name} from {first_step}"
    run = library.init(project="saccade", name=name, dir=str(folder.path))
    return (lambda row, step: run.log(_numbers(row), step=step), run.finish)
