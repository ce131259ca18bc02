"""What a run shows and records of its steps: console, loggers, stored rollouts, memory, traces.

with Display(folder, "rl", config.track) as display:
    with display.phase("rollout"): ...
    row = display.finish_step(1, {"reward/mean": 0.4}, unread="")
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.profiler import profile, record_function

from saccade.config import TrackConfig
from saccade.models.families import Family
from saccade.models.load import gpu_memory
from saccade.registry import HOOKS
from saccade.run.console import Console
from saccade.run.folder import RunFolder
from saccade.run.loggers import Loggers
from saccade.run.metrics import host_memory
from saccade.system.devices import Device
from saccade.types import Group

log = logging.getLogger(__name__)

NOTED_EVERY = 25  # steps between two messages on the same topic


class Display:
    def __init__(self, folder: RunFolder, command: str, track: TrackConfig) -> None:
        self.folder = folder
        self.console = Console(command, folder.path.name, log=folder.log)
        self.loggers = Loggers(folder, track)
        self.trajectories = HOOKS["trajectories"](folder.path)
        self._open = ExitStack()
        self._history: deque[Mapping[str, Any]] = deque(maxlen=32)
        self._noted: dict[str, int] = {}  # topic → step of its last message
        self._rss_at_start = host_memory()["mem/host_rss_gb"]
        self._peaks: dict[str, float] = {}
        self._range: Callable[[str], AbstractContextManager[object]] = nullcontext

    def __enter__(self) -> Display:
        self._open.enter_context(self.console)
        self._open.callback(self.loggers.close)
        self._open.callback(self.trajectories.close)
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def begin(self, total: int, device: Device, family: Family) -> None:
        """`total`: number of steps; `device`: utilisation is relative to its peak rates."""
        self.console.total = total
        self._device, self._family = device, family

    def truncate_after(self, step: int) -> None:
        """Remove what a killed run recorded after the checkpoint that is resumed from."""
        last = step or -1  # if the run starts again, so does its validation before step 1
        self.loggers.truncate_after(last)
        self.trajectories.truncate_after(last)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the step and note the most GPU memory it took."""
        with self.console.phase(name), self._range(name):
            yield
            if name == "update" and torch.cuda.is_initialized():
                torch.cuda.synchronize()  # the optimizer's kernels are only queued so far
        for kind, found in gpu_memory().items():
            for key in (kind, f"{kind}/{name}"):
                self._peaks[key] = max(found, self._peaks.get(key, 0.0))  # a phase may occur again in a step

    @contextmanager
    def traced(self, step: int) -> Iterator[None]:
        """Run the step under torch's profiler; its phases appear as ranges. Nothing is written when the body fails."""
        path = self.folder.path / f"trace-step-{step}.json.gz"
        self._range = record_function
        with profile() as profiler:
            yield
        self._range = nullcontext
        with self.console.phase("trace"):  # counted in the next step, as a phase of its own
            profiler.export_chrome_trace(str(path))
        log.info(f"trace {path}; ui.perfetto.dev shows it, and that step took longer")

    def finish_step(self, step: int, metrics: Mapping[str, float], unread: str) -> dict[str, Any]:
        """Log and show the metrics of a step with its times and memory, and log advice if little is being learned;
        returns the row. `unread`: a text on where the verifier found no answer.
        """
        times, peaks, self._peaks = self.console.clock.lap(), self._peaks, {}
        reserved = peaks and {"mem/gpu_reserved_gb": torch.cuda.memory_reserved() / 2**30}
        row = {
            **peaks,  # replaced by `metrics` of several GPUs
            **reserved,
            **metrics,
            **HOOKS["rates"](metrics, times, self._device),
            **host_memory(self._rss_at_start),
            **times,
        }
        with self.console.phase("log"):  # counted in the next step
            self.loggers.log(row, step)
            if self.loggers.shows:
                self.trajectories.flush()
                self.loggers.show()
        self.console.step(step, row)
        self._history.append(row)
        for about, line in HOOKS["diagnose"](self._history, unread).items():
            self.advise(about, line, step)
        return row

    def advise(self, about: str, line: str, step: int) -> None:
        """Log a message on a topic, at most once in NOTED_EVERY steps."""
        if step - self._noted.get(about, -NOTED_EVERY) >= NOTED_EVERY:
            log.warning(line)
            self._noted[about] = step

    def store(self, groups: Sequence[Group], *, step: int, scores: Sequence[str], kind: str = "train") -> None:
        """Write rollouts to disk; `scores`: data sources whose outcome is a score."""
        version = step - (kind == "train")  # rollouts are sampled before the update
        self.trajectories.write(step, groups, self._family, version=version, kind=kind, scores=scores)
        self.loggers.stored.append((kind, step))
