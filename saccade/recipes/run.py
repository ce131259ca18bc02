"""A training run around its loop: folder, display, loggers, checkpoints, signals, limits.

with Run(config, "rl", manifest) as run:
    run.begin(100, backend, family, [data])
    for step in run.steps(): ...
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from traceback import format_exception
from types import FrameType
from typing import Any, Protocol

import torch

from saccade import checkpoint, devices
from saccade.backends import Backend
from saccade.backends.schedule import rate
from saccade.checks import not_counted
from saccade.config import Config
from saccade.data.datasets import Dataset, Stream
from saccade.errors import EnvironmentProblem, Interrupted, SaccadeError
from saccade.media.pixel_cache import DECODED, drop_background
from saccade.models.families import Family
from saccade.models.load import gpu_peak_gb
from saccade.recipes import best
from saccade.recipes.quarantine import Quarantine
from saccade.recipes.saving import Saver
from saccade.recipes.work import shares, speeds
from saccade.tracking.console import Console
from saccade.tracking.diagnosis import diagnose
from saccade.tracking.folder import RunFolder
from saccade.tracking.loggers import Loggers, read_metrics
from saccade.tracking.metrics import host_memory
from saccade.tracking.trace import named_range, traced
from saccade.tracking.trajectories import TrajectoryWriter
from saccade.types import Group, Sample

log = logging.getLogger(__name__)

NOTED_EVERY = 25  # steps between two equal diagnoses
TRACED_STEP = 3  # the first ones load kernels and lay out memory


class Stopping(Exception):
    """A signal asked the run to end while it was validating."""


class Validates(Protocol):
    def due(self, step: int) -> bool: ...

    def metrics(self, *, step: int) -> dict[str, float]: ...


class Run:
    """Holds what outlives a step: progress (plain data that a checkpoint stores) and the services
    around the loop.
    """

    def __init__(self, config: Config, command: str, manifest: Mapping[str, Any]) -> None:
        self.config, self.command, self.manifest = config, command, manifest
        self.progress: dict[str, Any] = {
            "step": 0,
            "updates": 0,
            "best_step": None,
            "best_score": None,
        }
        self.total = 0
        self._services = ExitStack()
        self._began = time.monotonic()
        self._signal: int | None = None
        self._history: deque[Mapping[str, Any]] = deque(maxlen=32)
        self._noted: dict[str, int] = {}  # what a diagnosis is about → the step that said it last
        self._rss_at_start = host_memory()["mem/host_rss_gb"]
        self._peaks: dict[str, float] = {}
        self._missed = False  # whether the lack of save.best_metric was told
        self._updating = False  # between the first weight that moves and the end of the step
        self._range: Callable[[str], AbstractContextManager[object]] = nullcontext

    def __enter__(self) -> Run:
        """Take the folder, find the checkpoint to go on from, open the display."""
        with ExitStack() as stack:
            self.folder = stack.enter_context(
                RunFolder.open(self.config, command=self.command, manifest=self.manifest)
            )
            self.start = checkpoint.find(self.folder.checkpoints, self.config.run.resume)
            if self.start is not None:
                self.progress = checkpoint.read_progress(self.start)
            saved = self.folder.checkpoints
            passed = checkpoint.not_whole(saved, after=self.step) if self.start else {}
            self.console = stack.enter_context(
                Console(None, self.command, name=self.folder.path.name, log=self.folder.log)
            )
            self.quarantine = Quarantine(self.folder.path, self.config.data)
            self._saver = Saver(
                self.folder.checkpoints,
                self.config.save,
                saved=self.step if self.start else None,
            )
            stack.callback(self._saver.close)
            if others := not_counted(self.config, self.command):
                log.info(others)
            config = self.config.run
            if unlimited := devices.no_limit(config.memory, devices.unoccupied(config.device)):
                log.info(unlimited)
            if self.start is not None:
                log.info(f"goes on from {self.start}, after step {self.step}")
            elif config.resume == "auto" and not self.folder.resumed:
                log.info(f"run.resume=auto: {self.folder.path} is new, step 1 is next")
            for path in self.folder.changed:
                log.warning(
                    f"{path} is not what it was when this run was last started; what it "
                    "computes may differ from the steps before"
                )
            for broken, lacking in passed.items():
                log.warning(f"{broken} is passed over, it is not whole: {lacking}")
            if self.folder.resumed and self.start is None:
                self._begin_again()
            self.loggers = Loggers(self.folder, self.config.track)
            stack.callback(self.loggers.close)
            self.trajectories = TrajectoryWriter(self.folder)
            stack.callback(self.trajectories.close)
            if self.folder.resumed:
                last = self.step or -1  # validation before step 1 is made again
                self.loggers.truncate_after(last)
                self.trajectories.truncate_after(last)
            stack.callback(drop_background)
            self._services = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self._end(error)
        finally:  # also where the last checkpoint cannot be written
            self._services.__exit__(kind, error, trace)

    def _end(self, error: BaseException | None) -> None:
        """Write what is not on disk yet, and say how to go on."""
        if isinstance(error, Exception):  # of a refusal that has no cause its text says all
            told = isinstance(error, SaccadeError) and error.__cause__ is None
            self.console.log(str(error) if told else "".join(format_exception(error)).rstrip())
        self._saver.settle()
        saved = self._saver.saved
        if isinstance(error, Exception) and self.step > (saved or 0) and not self._updating:
            try:
                self.save(last=True)  # what failed had not touched the weights of the last step
            except Exception as another:
                if str(another) != str(error):  # a disk that is full says so twice
                    log.info(f"step {self.step} could not be saved: {another}")
        if isinstance(error, Exception) and not isinstance(error, Interrupted):
            self._say_how_to_go_on(error, self._saver.saved)
        if isinstance(error, torch.OutOfMemoryError):
            asked = str(error).partition(". GPU")[0]
            message = (
                f"{asked} after step {self.step}; `saccade estimate` shows what takes the memory "
                "and which option lifts it: try train.optimizer=adamw_bf16, or model.train=lora"
            )
            log.info(message)
            raise EnvironmentProblem(message) from error

    def _begin_again(self) -> None:
        """A folder with steps and without a checkpoint; one that was killed early has neither."""
        steps = [row["step"] for row in read_metrics(self.folder.metrics) if row["step"]]
        if steps:
            there = sorted(entry.name for entry in self.folder.checkpoints.iterdir())
            log.warning(
                f"{self.folder.path} records steps up to {steps[-1]} and has no complete "
                f"checkpoint to go on from (checkpoints/ holds {', '.join(there) or 'nothing'}): "
                "training begins again with step 1. What was recorded is kept as "
                f"{' and '.join(self.folder.set_aside_records())}"
            )

    def _say_how_to_go_on(self, error: Exception, saved: int | None) -> None:
        kept = self.folder.checkpoints / f"step-{saved}"
        if not saved or not kept.is_dir():  # begun from that of another run, and nothing saved yet
            return
        text = (
            f"step {saved} is kept in {kept}; once the cause is mended, the same command "
            "with run.resume=auto goes on from there"
        )
        if isinstance(error, SaccadeError):
            error.args = (f"{error}\n{text}",)
        else:
            log.info(text)

    def stream(self, data: Dataset, backend: Backend) -> Stream:
        """The rows in order. From a checkpoint both go on where they were."""
        stream = Stream(data, seed=self.config.run.seed, config=self.config.data)
        self.progress.setdefault("stream", stream.state())
        if self.start is not None:
            backend.load_state(self.start / "state")
            stream.restore(self.progress["stream"])
        return stream

    def close_at_end(self, part: Any) -> None:
        if part is not None:
            self._services.callback(part.close)

    def begin(
        self,
        total: int,
        backend: Backend,
        family: Family,
        sets: Iterable[Dataset],
        parts: Mapping[str, checkpoint.Stateful] | None = None,
    ) -> None:
        """Everything is loaded: from here on a signal writes a checkpoint first. What is not used
        of the `sets` is listed. `parts` have state of their own beside the backend's.
        """
        self.total, self._backend, self._family = total, backend, family
        self._parts = dict(parts or {})
        due = sum(self.saves(step) for step in range(self.step + 1, total + 1))
        self._saver.require_room(checkpoint.saved_bytes(backend, self._parts), due)
        device = devices.present(self.config.run.device)
        self._device = devices.in_precision(device, self.config.model.dtype)
        self.console.expect(total)
        for dataset in sets:
            self.quarantine.record(dataset.aside)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                if signal.getsignal(number) != signal.SIG_IGN:  # as nohup wants it
                    before = signal.signal(number, self._on_signal)
                    self._services.callback(signal.signal, number, before)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the step and note the most GPU memory it took."""
        self._updating |= name == "update"
        with self.console.phase(name), self._range(name):
            yield
            if name == "update" and torch.cuda.is_initialized():
                torch.cuda.synchronize()  # the optimizer's kernels are only queued by then
        peak = gpu_peak_gb()
        if peak is not None:
            key = f"mem/gpu_peak_gb/{name}"
            self._peaks[key] = max(peak, self._peaks.get(key, 0.0))  # a phase may come again

    @property
    def step(self) -> int:
        """The last finished step."""
        return self.progress["step"]

    def steps(self) -> Iterator[int]:
        """The steps that are left. A limit or a signal ends them early, after a checkpoint."""
        if self.step >= self.total:
            log.info(f"step {self.step} is reached already; raise run.max_steps to go on")
        third = min(self.step + TRACED_STEP, self.total) if self.config.run.trace else None
        self.console.lap()  # loading and the start of an engine belong to no step
        while self.step < self.total:
            with self._traced() if self.step + 1 == third else nullcontext():
                yield self.step + 1
            self._saver.check()
            if self._signal is not None:
                self._stop()
            hours = self.config.run.max_hours
            if hours is not None and time.monotonic() - self._began > hours * 3600:
                log.info(f"run.max_hours={hours:g} is over after step {self.step}")
                break
        self.save(last=True)
        log.info(
            f"checkpoint {self.folder.checkpoints / f'step-{self.step}'}; "
            f"`saccade report {self.folder.path}` writes a page about this run"
        )

    def learning_rate(self) -> float:
        """Of the step under way, where a step is one update."""
        train = self.config.train
        assert train.lr is not None, "the defaults of the command are filled in"
        return rate(
            self.step,
            total=self.total,
            lr=train.lr,
            schedule=train.schedule,
            warmup=train.warmup,
            min_lr=train.min_lr,
        )

    @contextmanager
    def _traced(self) -> Iterator[None]:
        path = self.folder.path / f"trace-step-{self.step + 1}.json.gz"
        self._range = named_range
        with ExitStack() as stack:
            stack.enter_context(traced(path))
            yield
            with self.console.phase("trace"):  # of the next step, and not a part of what it does
                stack.close()
        self._range = nullcontext
        log.info(f"trace {path}; ui.perfetto.dev shows it, and that step took longer")

    def _gpu_memory(self) -> dict[str, float]:
        """Peaks of the phases and of the step, and what the allocator keeps; none without a GPU."""
        peaks, self._peaks = self._peaks, {}
        if not peaks:
            return {}
        kept = torch.cuda.memory_reserved() / 2**30
        return peaks | {"mem/gpu_peak_gb": max(peaks.values()), "mem/gpu_reserved_gb": kept}

    def finish_step(
        self, metrics: Mapping[str, float], validation: Validates, unread: str = ""
    ) -> dict[str, Any]:
        """Count the step, validate, log it, say so when little is being learned, save when it is
        time. An error in a validation ends the run, but the step is made: it is logged and saved.
        `unread`: where the verifier looked in vain for an answer.
        """
        self.progress["step"] += 1
        self._updating = False
        measured: dict[str, float] = {}
        try:
            if validation.due(self.step):
                measured = validation.metrics(step=self.step)
        finally:
            row = self._log({**metrics, **measured})
        self._history.append(row)
        for about, line in diagnose(self._history, unread).items():
            self.advise(about, line)
        is_best = self.config.save.every and self.progress["best_step"] == self.step
        if self.saves(self.step) or is_best:
            self.save(last=self.step == self.total)
        return row

    def _log(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        times = self.console.lap()
        row = {
            **metrics,
            **speeds(metrics, times),
            **shares(metrics, times, self._device),
            **self._gpu_memory(),
            **host_memory(self._rss_at_start),
            **times,
            **self._saver.times(),
        }
        with self.console.phase("log"):  # of the step that begins here
            self.loggers.log(row, self.step)
        self.console.step(self.step, row)
        return row

    def advise(self, about: str, line: str) -> None:
        """Say it, but not again and again."""
        if self.step - self._noted.get(about, -NOTED_EVERY) >= NOTED_EVERY:
            log.info(line)
            self._noted[about] = self.step

    def saves(self, step: int) -> bool:
        """Whether a checkpoint of this step is due, however well it does."""
        every = self.config.save.every
        return step == self.total or (every > 0 and step % every == 0)

    def compare_sets(self, sets: Mapping[str, Dataset]) -> None:
        """Scores of a validation set that changed do not continue those of the steps before."""
        now = {name: data.hash for name, data in sets.items()}
        before = self.progress.get("val", now)
        self.progress["val"] = now
        changed = [name for name in now if before.get(name, now[name]) != now[name]]
        if changed:
            log.warning(
                f"data.val: {', '.join(changed)} has other rows or pictures than up to "
                f"step {self.step}: its scores from here on are not comparable with those before"
            )
        if (self.progress.get("best_metric") or "").startswith(tuple(f"val/{n}/" for n in changed)):
            self.progress |= {"best_score": None, "best_step": None}

    def note_validation(self, metrics: Mapping[str, float], step: int) -> None:
        """Remember which step was best by `save.best_metric`; its checkpoint is kept."""
        missed = best.remember(self.progress, metrics, step, self.config.save.best_metric)
        if missed and not self._missed:
            self._missed = True
            log.warning(missed)

    def save(self, *, last: bool = False) -> None:
        """The last one is on disk when this returns; others are being written."""
        with self.console.phase("save"):
            if self._saver.newest != self.step:
                self._saver.save(
                    self.step,
                    self._backend,
                    self._family,
                    progress=self.progress,
                    parts=self._parts,
                    background=not last,
                )
            if last:
                self._saver.wait()

    def store(self, groups: Sequence[Group], *, step: int, kind: str = "train") -> None:
        self.trajectories.write(
            step,
            groups,
            decode_text=self._family.decode,
            image_bytes=DECODED.get,
            version=step - (kind == "train"),  # its samples are older than its update
            kind=kind,
            unit=self._family.size_unit,
            scores=self.progress.get("scores", ()),
        )

    def watch(self, done: int, total: int) -> None:
        """For the rollout: shows progress, and lets a signal end it at the next token."""
        self.console.progress(done, total)
        if self._signal is not None:
            self._stop()

    def watch_validation(self, done: int, total: int) -> None:
        """As `watch`, but the step is finished first: its update has been made."""
        self.console.progress(done, total)
        if self._signal is not None:
            raise Stopping

    def take(self, stream: Stream, count: int) -> list[Sample]:
        """The next rows that can be shown; in the place of one that cannot the next row comes."""
        taken: list[Sample] = []
        while len(taken) < count:
            samples = stream.take(count - len(taken))
            taken += self.quarantine.sound(samples, stream.dataset, self._family)
        return taken

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        log.info("stopping: a checkpoint is written first; interrupt again to stop at once")
        signal.signal(number, signal.SIG_DFL)

    def _stop(self) -> None:
        """The state is that of the last finished step: a signal is heard before an update or after
        a step, never between.
        """
        self.save(last=True)
        raise Interrupted(
            f"stopped after step {self.step}; go on with run.resume=auto ({self.folder.path})"
        )
