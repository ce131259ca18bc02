"""Everything around a training loop: run folder, display, checkpoints, signals, and when the run ends.

with Run(config, "rl", manifest) as run:
    run.begin(100, trainer, [data], parts={})
    for step in run.steps():
        ...
        run.finish_step(replace(run.progress, step=step, stream=stream.state()), values, validation)
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from shlex import quote
from traceback import format_exception
from types import FrameType
from typing import Any

import torch

from saccade.checks import idle_gpus, ignored_options
from saccade.config import AlgorithmConfig, Config, load, to_yaml
from saccade.data.datasets import Dataset, Stream
from saccade.errors import EnvironmentProblem, Interrupted, RankLost, SaccadeError
from saccade.media.pixel_cache import drop_background
from saccade.registry import HOOKS
from saccade.run import checkpoint
from saccade.run.checkpointer import Checkpointer
from saccade.run.display import Display
from saccade.run.folder import CHOSEN, CONFIG, RunFolder
from saccade.run.loggers import read_metrics
from saccade.run.progress import Progress, from_json
from saccade.run.quarantine import Quarantine
from saccade.system import devices
from saccade.trainer import Trainer
from saccade.types import Group

log = logging.getLogger(__name__)

PLAIN = (int, float, str, tuple, list, dict)  # option values of user functions that YAML can hold; others become text
TRACED_STEP = 3  # earlier steps load kernels and allocate memory


class Stopping(Exception):
    """A signal asked the run to end while it was validating."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The result of a validation: what its `measure` returns to `Run`, or the function that its `begin` returns."""

    metrics: Mapping[str, float]
    scores: Sequence[str] = ()  # data sources whose outcome is a score
    stored: Mapping[str, Sequence[Group]] = field(default_factory=dict)  # rollouts to store, by kind (val/SET)
    advice: Mapping[str, str] = field(default_factory=dict)  # topic → message


def open_folder(
    config: Config, command: str, manifest: Mapping[str, Any], algorithm: AlgorithmConfig
) -> AbstractContextManager[RunFolder]:
    """Open the run folder with two config files: one has the options that were given, to start the run again (without
    run.resume); the other has all options, with defaults, and those of the algorithm's functions.
    """
    args = {n: v if isinstance(v, PLAIN) else str(v) for n, v in algorithm.args.items()}
    own = config.algorithm.model_copy(update={"args": args, "correct": algorithm.correct})
    whole = config.model_copy(update={"algorithm": own})
    again = config if config.run.resume == "none" else load(config, ["run.resume=none"])
    texts = {CONFIG: to_yaml(whole), CHOSEN: to_yaml(again, full=False)}
    return RunFolder.open(whole.model_dump(mode="json"), texts, command=command, manifest=manifest)


class Run:
    """The only writer of a run's progress."""

    def __init__(
        self, config: Config, command: str, manifest: Mapping[str, Any], algorithm: AlgorithmConfig | None = None
    ) -> None:
        self.config, self.command, self.manifest = config, command, manifest
        self.algorithm = algorithm or config.algorithm
        self.progress = Progress()
        self.total = 0
        self._services = ExitStack()
        self._began = time.monotonic()
        self._signal: int | None = None
        self._changes = 0  # of weights, up to the end of the last step
        self._out_of_time = False
        self._pending_validation: Callable[[], Measured] | None = None  # a validation that has begun

    def __enter__(self) -> Run:
        """Take the folder, find the checkpoint to resume from, open the display."""
        config = self.config
        with ExitStack() as stack:
            self.folder = stack.enter_context(open_folder(config, self.command, self.manifest, self.algorithm))
            saved = self.folder.checkpoints
            self.start = checkpoint.find(saved, config.run.resume)
            if self.start is not None:
                self.progress = from_json(checkpoint.read_progress(self.start))
                if self.start.parent.resolve() != saved.resolve():  # its best checkpoint is none of this folder
                    self.progress = replace(self.progress, best_step=None, best_score=None, since_best=0)
            newest = [saved / f"step-{n}" for n in checkpoint.complete_steps(saved)[-1:]]
            broken = checkpoint.not_whole(saved, after=self.step) if self.start else {}
            self.display = stack.enter_context(Display(self.folder, self.command, config.track))
            if config.run.gpus == 1:  # a run on several GPUs is watched by its team of ranks
                stack.enter_context(HOOKS["watchdog"](self.display.console, self.folder.path, config.run.stop.stalled))
            self.quarantine = Quarantine(self.folder.path, config.data)
            self.checkpointer = Checkpointer(saved, config.save, saved=self.step if self.start in newest else None)
            stack.callback(self.checkpointer.close)
            self._say_how_it_starts(broken)
            if self.folder.resumed:
                self.display.truncate_after(self.step)
            stack.callback(drop_background)
            self._services = stack.pop_all()
        return self

    def _say_how_it_starts(self, broken: Mapping[Any, str]) -> None:
        config, folder = self.config.run, self.folder
        unlimited = None
        if config.gpus == 1:  # else the ranks take the memory, not this process
            unlimited = devices.limit_problem(config.gpu_memory_gib, devices.device_with_free_memory(config.device))
        idle = idle_gpus(self.config, self.command, devices.count(config.device))
        for text in filter(None, [ignored_options(self.config, self.command), unlimited, idle]):
            log.info(text)
        if self.start is not None:
            log.info(f"resuming from {self.start}, after step {self.step}")
        elif config.resume == "auto" and not folder.resumed:
            log.info(f"run.resume=auto: {folder.path} is new; starting with step 1")
        for path in folder.changed:
            log.warning(f"{path} has changed since this run was last started; results may differ from here on")
        for path, lacking in broken.items():
            log.warning(f"skipping {path}, which is incomplete: {lacking}")
        recorded = [row["step"] for row in read_metrics(folder.metrics) if row["step"]]
        if folder.resumed and self.start is None and recorded:
            aside = " and ".join(folder.set_aside_records())
            begun = f"{folder.path} records steps up to {recorded[-1]} and has no complete checkpoint"
            log.warning(f"{begun}: starting again with step 1; the records so far are saved as {aside}")

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self._end(error)
        finally:  # also where the last checkpoint cannot be written
            self._services.__exit__(kind, error, trace)

    def _end(self, error: BaseException | None) -> None:
        """Write what is not on disk yet, and say how to continue."""
        if isinstance(error, Exception):  # a SaccadeError without a cause needs no traceback
            plain = isinstance(error, SaccadeError) and error.__cause__ is None
            text = str(error) if plain else "".join(format_exception(error)).rstrip()
            self.display.console.log(text)
        self.checkpointer.settle()
        unsaved = self.total > 0 and self.step > (self.checkpointer.saved or 0)
        lost = isinstance(error, RankLost)  # the weights are gone with the ranks
        if isinstance(error, Exception) and unsaved and not lost and self._changes == self.checkpointer.changes():
            try:
                self.save(last=True)  # the error came before any update, so weights are those of the last step
            except Exception as another:
                if str(another) != str(error):  # a full disk raises twice
                    log.info(f"step {self.step} could not be saved: {another}")
        saved = self.folder.checkpoints / f"step-{self.checkpointer.saved}"
        # It is missing if the run started from another run's checkpoint and has saved nothing yet.
        if isinstance(error, Exception) and not isinstance(error, Interrupted) and (lost or saved.is_dir()):
            text = f"step {self.checkpointer.saved} is saved in {saved}; fix this, then continue with run.resume=auto"
            if lost:  # repeat which rank it was after the stacks of the others
                state = f"{text.partition(';')[0]}, and run.resume=auto continues"
                state = state if saved.is_dir() else "nothing is saved, and run.resume=auto starts again"
                itself = "" if self.config.run.restarts else "; run.restarts=3 does so by itself"
                text = f"{str(error).partition(chr(10))[0]}; {state}{itself}"
            if isinstance(error, SaccadeError):
                error.args = (f"{error}\n{text}",)
            else:
                log.info(text)
        if isinstance(error, torch.OutOfMemoryError):
            asked = str(error).partition(". GPU")[0]
            message = f"{asked} after step {self.step}; `saccade estimate` shows which options make room"
            log.info(message)
            raise EnvironmentProblem(message) from error

    # -- before the first step --

    def restore(self, trainer: Trainer, streams: Mapping[str, Stream], parts: Mapping[str, Any]) -> None:
        """Load the state of trainer, streams and parts, if the run starts from a checkpoint. Streams and parts are
        given by their names in it.
        """
        if self.start is not None:
            trainer.load_state(self.start / "state")
            for name, stream in streams.items():
                stream.restore(getattr(self.progress, name))
            for name, part in parts.items():
                part.load_state(self.start / "state" / name)
        places: dict[str, Any] = {name: stream.state() for name, stream in streams.items()}
        self.progress = replace(self.progress, **places)

    def close_at_end(self, part: Any) -> None:
        if part is not None:
            self._services.callback(part.close)

    def compare_sets(self, sets: Mapping[str, Dataset]) -> None:
        """Scores of a validation set that changed do not continue those of the steps before."""
        self.progress, changed = self.progress.with_sets({name: data.hash for name, data in sets.items()})
        if changed:
            names = ", ".join(changed)
            log.warning(f"data.val: {names} is not what it was up to step {self.step}; do not compare its scores")

    def begin(self, total: int, trainer: Trainer, sets: Iterable[Dataset], parts: Mapping[str, Any]) -> None:
        """Everything is loaded: from here on, a signal saves a checkpoint before the run ends. Rows of `sets` that are
        not used are listed in a file. `parts` have state that checkpoints save besides the trainer's.
        """
        self.total = total
        self.checkpointer.begin(trainer, parts, first=self.step + 1, total=total)
        device = replace(devices.current_device(self.config.run.device), count=self.config.run.gpus)
        self.display.begin(total, devices.in_precision(device, self.config.model.dtype), trainer.family)
        for dataset in sets:
            self.quarantine.record(dataset.excluded_rows)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                if signal.getsignal(number) != signal.SIG_IGN:  # ignored under nohup
                    before = signal.signal(number, self._on_signal)
                    self._services.callback(signal.signal, number, before)

    def log_start(self, metrics: Mapping[str, float]) -> None:
        """Log metrics of the model before step 1."""
        if metrics and self.step == 0:
            self.display.loggers.log(metrics, 0)

    def validate_start(self, validation: Any) -> None:
        """Validate before step 1, for comparison, or the last step of a run that ended before its validation."""
        again = self.progress.unvalidated
        if not validation.sets or not (again or (self.config.val.before and self.step == 0)):
            return
        if found := self._validate(partial(validation.measure, self.step, self.progress.scores)):
            self.display.loggers.log(found, self.step)
            if again:
                self.checkpointer.saved = None  # so that the step is saved again, with this validation
                self.save(last=True)

    # -- the steps --

    @property
    def step(self) -> int:
        """The last finished step."""
        return self.progress.step

    def steps(self) -> Iterator[int]:
        """Iterate over the remaining steps. A limit or a signal ends them early, after a checkpoint."""
        if self.step >= self.total:
            log.info(f"step {self.step} is already reached; raise run.max_steps to continue")
        third = min(self.step + TRACED_STEP, self.total) if self.config.run.trace else None
        self.display.console.clock.lap()  # discard the time for loading and the start of an engine
        stop = self.config.run.stop
        while self.step < self.total:
            if enough := self.progress.enough(stop.patience, stop.target):
                log.info(enough)
                break
            step = self.step + 1
            with self.display.traced(step) if step == third else nullcontext():
                yield step
            self.checkpointer.check()
            if self._signal is not None:
                self._stop()
            if self._out_of_time:
                log.info(f"run.max_hours={self.config.run.max_hours:g} is reached after step {self.step}")
                break
        self.finish_validation()
        self.save(last=True)
        saved = self.folder.checkpoints / f"step-{self.step}"
        log.info(f"checkpoint {saved}; `saccade report {quote(str(self.folder.path))}` writes a page about this run")

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time a phase of the step and note the most GPU memory it took."""
        return self.display.phase(name)

    def finish_step(
        self, progress: Progress, metrics: Mapping[str, float], validation: Any, unread: str = ""
    ) -> dict[str, Any]:
        """Record a finished step: validate, log, give advice if little is being learned, save if it is due; returns the
        logged row. An error in the validation ends the run, but the step is logged and saved. A validation beside
        rollouts only starts here. `unread`: a text on where the verifier found no answer.
        """
        hours = self.config.run.max_hours
        self._out_of_time = hours is not None and time.monotonic() - self._began > hours * 3600
        last = progress.step if self._out_of_time else self.total  # the last step is always validated
        self.progress = replace(progress, unvalidated=validation.due(progress.step, last))
        self._changes = self.checkpointer.changes()
        measured: Mapping[str, float] = {}
        try:
            if self.progress.unvalidated and validation.rollout_pool is not None and self.step < self.total:
                self._pending_validation = validation.begin(self.step, progress.scores)
            elif self.progress.unvalidated:
                measured = self._validate(partial(validation.measure, self.step, progress.scores))
        finally:
            row = self.display.finish_step(self.step, {**metrics, **measured, **self.checkpointer.times()}, unread)
        if self._pending_validation is None:
            self._save_if_due()
        return row

    def finish_validation(self) -> None:
        """Wait for a validation that was started at the end of the last step, before its weights change. It is logged
        in a separate row, and the step's checkpoint is saved now if due. If the run ends before that, the resumed run
        validates.
        """
        if self._pending_validation is None:
            return
        found = self._validate(self._pending_validation)
        if self.progress.unvalidated:
            self._stop()
        self._pending_validation = None
        self.display.loggers.log(found, self.step)
        self._save_if_due()

    def _validate(self, measure: Callable[[], Measured]) -> Mapping[str, float]:
        step = self.step
        try:
            with self.phase("validation"):
                found = measure()
        except Stopping:  # the result of an interrupted validation is not used
            return {}
        self.progress = replace(self.progress.with_scores(found.scores), unvalidated=False)
        for kind, groups in found.stored.items():
            self.display.store(groups, step=step, scores=self.progress.scores, kind=kind)
        for about, line in found.advice.items():
            self.display.advise(about, line, step)
        self.progress, missed = self.progress.with_best(found.metrics, step, self.config.save.best_metric)
        if missed:
            self.display.advise("save.best_metric", missed, step)
        return found.metrics

    def _save_if_due(self) -> None:
        is_best = self.config.save.every and self.progress.best_step == self.step
        if self.checkpointer.due(self.step) or is_best:
            self.save(last=self.step == self.total)

    def save(self, *, last: bool = False) -> None:
        with self.display.console.phase("save"):
            self.checkpointer.save(self.progress, last=last)

    # -- signals --

    def watch(self, done: int, total: int) -> None:
        """Progress callback of rollouts; after a signal, it raises to end the run at the next token."""
        self.display.console.progress(done, total)
        if self._signal is not None:
            self._stop()

    def watch_validation(self, done: int, total: int) -> None:
        """As `watch`, but `Stopping` only ends the validation: its step has been trained and is finished first."""
        self.display.console.progress(done, total)
        if self._signal is not None:
            raise Stopping

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        log.info("stopping: a checkpoint is written first; interrupt again to stop at once")
        signal.signal(number, signal.SIG_DFL)

    def _stop(self) -> None:
        """Save and raise `Interrupted`. Signals are handled before an update or after a step, never between, so the
        state is that of the last finished step.
        """
        self.save(last=True)
        raise Interrupted(f"stopped after step {self.step}; continue with run.resume=auto ({self.folder.path})")
