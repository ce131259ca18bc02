"""Loggers besides the JSON lines: TensorBoard, Weights & Biases, MLflow, SwanLab; all but TensorBoard also show tables
of stored rollouts with pictures. Unless environment variables name a server, they write to the folder of the run.

    write, close, show = tensorboard(folder, first_step=None)
    write({"reward/mean": 0.5}, 1)
"""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from saccade.plugins.reports.trajectories import read_trajectories
from saccade.run.folder import TRAJECTORIES, RunFolder
from saccade.run.loggers import Logger, Row

PROJECT = "saccade"
COLUMNS = ("step", "id", "prompt", "response", "gold", "extracted", "reward", "status")  # pictures follow them


def _numbers(row: Row) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if not isinstance(value, str)}


def _name(folder: RunFolder, first_step: int | None) -> str:
    return folder.path.name if first_step is None else f"{folder.path.name} from {first_step}"


def _generations(folder: RunFolder, kind: str, step: int, picture: Callable[[str], Any]) -> dict[str, list[Any]]:
    """Stored rollouts of a step as columns of a table; `picture` converts an image file to the logger's type."""
    table: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for number, record in enumerate(read_trajectories(folder.path, kind, step)):
        segments = record["segments"]
        first = next((n for n, segment in enumerate(segments) if segment["source"] == "policy"), len(segments))
        texts = ["".join(s.get("text", "<image>") for s in part) for part in (segments[:first], segments[first:])]
        row = {**record, "prompt": texts[0], "response": texts[1]}
        for place, one in enumerate((one for one in record["images"] if one["file"]), 1):
            table.setdefault(f"picture_{place}", [None] * number)
            row[f"picture_{place}"] = picture(str(folder.path / TRAJECTORIES / one["file"]))
        for name, column in table.items():
            column.append(row.get(name))
    return table


def tensorboard(folder: RunFolder, first_step: int | None) -> Logger:
    """Writes each step at once and in this thread, so that errors are raised here."""
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
        # Makes TensorBoard drop what an earlier process wrote from this step on.
        add(step=first_step, session_log=SessionLog(status=SessionLog.START))

    def write(row: Row, step: int) -> None:
        values = [Summary.Value(tag=name, simple_value=v) for name, v in _numbers(row).items()]
        add(step=step, summary=Summary(value=values))

    return Logger(write, writer.close)


def wandb(folder: RunFolder, first_step: int | None) -> Logger:
    """Offline unless WANDB_MODE says otherwise."""
    os.environ.setdefault("WANDB_MODE", "offline")
    os.environ.setdefault("WANDB_DATA_DIR", str(folder.path / "wandb"))  # pictures, until they are sent
    import wandb as library

    run = library.init(project=PROJECT, name=_name(folder, first_step), dir=str(folder.path))

    def show(kind: str, step: int) -> None:
        columns = _generations(folder, kind, step, library.Image)
        text = {name: [*map(str, column)] if name in COLUMNS else column for name, column in columns.items()}
        rows = [[*row] for row in zip(*text.values(), strict=True)]
        run.log({f"generations/{kind}": library.Table([*text], rows)})  # no step=: W&B refuses one before the latest

    return Logger(lambda row, step: run.log(_numbers(row), step=step), run.finish, show)


def mlflow(folder: RunFolder, first_step: int | None) -> Logger:
    """In mlflow.db and mlflow/ of the run, unless MLFLOW_TRACKING_URI names a server."""
    import mlflow as library
    from mlflow.entities import Metric

    given = os.environ.get("MLFLOW_TRACKING_URI")
    client = library.MlflowClient(tracking_uri=given or f"sqlite:///{folder.path.resolve()}/mlflow.db")
    known = client.get_experiment_by_name(PROJECT)
    place = None if given else f"file://{folder.path.resolve()}/mlflow"
    experiment = known.experiment_id if known else client.create_experiment(PROJECT, artifact_location=place)
    run = client.create_run(experiment, run_name=_name(folder, first_step)).info.run_id

    def write(row: Row, step: int) -> None:
        now = int(time.time() * 1000)
        named = {name.replace("@", "_at_"): value for name, value in _numbers(row).items()}  # MLflow allows no @
        client.log_batch(run, metrics=[Metric(name, value, now, step) for name, value in named.items()])

    def show(kind: str, step: int) -> None:
        client.log_table(run, _generations(folder, kind, step, library.Image), f"generations/{kind}/step-{step}.json")

    return Logger(write, lambda: client.set_terminated(run), show)


def swanlab(folder: RunFolder, first_step: int | None) -> Logger:
    """Offline in swanlab/ of the run, unless SWANLAB_MODE says otherwise."""
    import swanlab as library

    place = folder.path / "swanlab"
    place.mkdir(exist_ok=True)
    mode: Any = os.environ.get("SWANLAB_MODE", "offline")
    on_interrupt = signal.getsignal(signal.SIGINT)
    run = library.init(project=PROJECT, name=_name(folder, first_step), log_dir=str(place), mode=mode)
    if signal.getsignal(signal.SIGINT) is not on_interrupt:
        signal.signal(signal.SIGINT, on_interrupt)  # SwanLab's handler would end its run before the checkpoint is saved

    def show(kind: str, step: int) -> None:
        table = _generations(folder, kind, step, str)
        rows = zip(*(table[name] for name in COLUMNS), strict=True)
        texts = ["\n\n".join(f"{name}: {value}" for name, value in zip(COLUMNS, row, strict=True)) for row in rows]
        run.log({f"generations/{kind}/answers": [*map(library.Text, texts)]}, step=step)
        for name in [*table][len(COLUMNS) :]:
            files = zip(table["id"], table[name], strict=True)  # rows have different numbers of pictures
            pictures = [library.Image(file, caption=str(id)) for id, file in files if file]
            run.log({f"generations/{kind}/{name}": pictures}, step=step)

    return Logger(lambda row, step: run.log(_numbers(row), step=step), run.finish, show)
