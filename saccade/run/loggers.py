"""Metrics of a run: one JSON line per step always, TensorBoard and other loggers when asked for.

A logger that fails is reported once and skipped from then on; training continues. Metrics are not
interpreted here.

    loggers = Loggers(folder, config.track)
    loggers.log({"reward/mean": 0.5}, step=1)
"""

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from saccade.config import TrackConfig
from saccade.registry import Table
from saccade.run.folder import METRICS, RunFolder, write_whole

log = logging.getLogger(__name__)

Row = Mapping[str, float | str]


class Logger(NamedTuple):
    write: Callable[[Row, int], object]  # a row of a step
    close: Callable[[], object]
    show: Callable[[str, int], object] | None = None  # (kind, step): show the rollouts stored for them


# Functions that open a logger: (folder, first step of a resumed run) → Logger.
LOGGERS: Table[Any] = Table("loggers", {})


class Loggers:
    """All loggers of one run behind one call."""

    def __init__(self, folder: RunFolder, track: TrackConfig) -> None:
        self._folder = folder
        self._first_step: int | None = None  # of a resumed run
        self._unwritten: list[str] = []
        self._waiting = [*(["tensorboard"] if track.tensorboard else []), *track.loggers]
        self._open: dict[str, Logger] = {}
        self.stored: list[tuple[str, int]] = []  # (kind, step) of stored rollouts that are not shown yet
        with folder.metrics.open("ab") as file:  # a kill may have cut the last line short
            file.truncate(folder.metrics.read_bytes().rfind(b"\n") + 1)

    def log(self, metrics: Row, step: int) -> None:
        """Write one row. Errors of a logger are not raised."""
        numbers = {n: float(v) if math.isfinite(v) else None for n, v in metrics.items() if not isinstance(v, str)}
        row = {"step": step, "time": round(time.time(), 3), **metrics, **numbers}
        self._unwritten.append(json.dumps(row, ensure_ascii=False) + "\n")
        self._append()
        while self._waiting:
            name = self._waiting.pop()
            if (opened := self._guard(name, LOGGERS[name], self._folder, self._first_step)) is not None:
                self._open[name] = Logger(*opened)
        for name, logger in list(self._open.items()):
            self._guard(name, logger.write, metrics, step)

    @property
    def shows(self) -> bool:
        return any(logger.show for logger in self._open.values())

    def show(self) -> None:
        """Let loggers show the rollouts that were stored since the last call."""
        stored, self.stored = self.stored, []
        for name, logger in list(self._open.items()):
            for kind, step in stored if logger.show else ():
                self._guard(name, logger.show, kind, step)

    def truncate_after(self, step: int) -> None:
        """Remove the rows that a killed run logged after the checkpoint that is resumed from."""
        path = self._folder.metrics
        kept = [row for row in read_metrics(path) if row["step"] <= step]
        write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))
        self._first_step = step + 1

    def close(self) -> None:
        self.show()
        for name, logger in list(self._open.items()):
            self._guard(name, logger.close)
        self._open.clear()
        if self._unwritten:
            self._append()

    def _append(self) -> None:
        """Append the unwritten rows; if the disk is full, they stay for the next call."""
        try:
            append_whole(self._folder.metrics, "".join(self._unwritten).encode())
        except OSError as error:
            if len(self._unwritten) == 1:
                log.warning(f"{self._folder.metrics} cannot be written ({error}); rows are kept for later")
        else:
            self._unwritten.clear()

    def _guard(self, name: str, action: Any, *arguments: object) -> Any:
        try:
            return action(*arguments)
        except ImportError:
            log.warning(f"{name} is not installed: pip install {name}, or take it out of track.loggers")
        except Exception as error:
            log.warning(f"{name} failed and is left out from here: {type(error).__name__}: {error}")
        self._open.pop(name, None)
        return None


def read_metrics(path: Path, say: Callable[[str], object] = log.warning) -> list[dict[str, Any]]:
    """Returns the rows of a metrics file or run folder. A last line that a kill cut short is skipped; other invalid
    lines are skipped and reported with `say`.
    """
    file = path / METRICS if path.is_dir() else path
    *whole, _torn = file.read_bytes().split(b"\n") if file.exists() else [b""]
    rows = []
    for number, line in enumerate(whole, 1):
        try:
            row = json.loads(line)
            rows.append(row | {"step": int(row["step"])})
        except (ValueError, TypeError, LookupError) as error:
            say(f"{file}, line {number} is no row of metrics and is left out ({type(error).__name__}: {error})")
    return rows


def append_whole(path: Path, data: bytes) -> None:
    """Append all of the data or none of it."""
    with path.open("ab", buffering=0) as file:
        start, written = file.tell(), 0
        try:
            while written < len(data):
                written += file.write(data[written:]) or 0
        except OSError:
            file.truncate(start)
            raise
