"""Checkpoints of a run, written while its next steps compute.

A save copies everything to main memory; a background thread writes, verifies and renames the copy, one checkpoint at a
time. An error in the thread is raised by the next call here, so that the run ends at its next step.

    checkpointer = Checkpointer(folder.checkpoints, config.save, saved=None)
    checkpointer.begin(trainer, parts={}, first=1, total=100)
    checkpointer.save(progress)
"""

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.filesize import decimal as size

from saccade.config import SaveConfig
from saccade.run import checkpoint
from saccade.run.progress import Progress
from saccade.system import devices
from saccade.system.contents import File, text_file
from saccade.system.disk import free_disk_bytes
from saccade.trainer import Trainer

log = logging.getLogger(__name__)

LARGEST_SHARE = 0.5  # of the free main memory: rollouts and images need some, too


class Checkpointer:
    def __init__(self, folder: Path, options: SaveConfig, *, saved: int | None) -> None:
        self.folder, self.options = folder, options
        self.saved = saved  # the last step that is on disk
        self._total = 0
        self._warned = False
        self._writing: tuple[int, Future[float]] | None = None
        self._took = 0.0  # seconds of the writes that finished since the last call of `times`
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def begin(self, trainer: Trainer, parts: Mapping[str, Any], *, first: int, total: int) -> None:
        """Set what is saved: the trainer, and `parts` that have state of their own. Raises if the disk has no room for
        one checkpoint, provided that the steps `first` to `total` save one.
        """
        self._trainer, self._parts, self._total = trainer, parts, total
        if due := sum(self.due(step) for step in range(first, total + 1)):
            needed, keep = self._bytes(), self.options.keep
            checkpoint.require_room(self.folder, needed)
            # Old ones are deleted only when one more is complete.
            more = min(due, keep + 1 - min(keep, len(checkpoint.complete_steps(self.folder))))
            if more * needed > (free := free_disk_bytes(self.folder)):
                room = f"{more} more checkpoints of up to {size(needed)} do not fit into {size(free)}"
                log.warning(f"{self.folder}: {room}; free some space, or lower save.keep={keep}")

    def changes(self) -> int:
        """How often the weights of what is saved have changed in this process."""
        return sum(getattr(one, "changes", 0) for one in (self._trainer, *self._parts.values()))

    def due(self, step: int) -> bool:
        """Whether this step is saved whatever its validation score."""
        every = self.options.every
        return step == self._total or (every > 0 and step % every == 0)

    def save(self, progress: Progress, *, last: bool = False) -> None:
        """Write a checkpoint, in the background if possible; with `last`, wait until it is on disk."""
        if (self._writing[0] if self._writing else self.saved) != progress.step:
            self.wait()
            copy = not last and self.options.background and self._fits()
            checkpoint.require_room(self.folder, self._bytes())
            files: Iterable[File] = self._files(progress, copy=copy)
            files = list(files) if copy else files
            weights = [(name, shape) for name, shape, _ in self._trainer.weight_shapes()]
            keep, best = self.options.keep, progress.best_step
            write = partial(checkpoint.write, self.folder, progress.step, files, weights, keep=keep, best=best)
            del files  # the writer may free their memory
            if copy:
                self._writing = progress.step, self._thread.submit(_timed, [write])
            else:
                write()
                self.saved = progress.step
        if last:
            self.wait()

    def check(self) -> None:
        """Raise the error of a background write that has ended."""
        if self._writing is not None and self._writing[1].done():
            self.wait()

    def wait(self) -> None:
        """Wait until all is on disk."""
        if self._writing is not None:
            (step, future), self._writing = self._writing, None
            self._took += future.result()
            self.saved = step

    def settle(self) -> None:
        """As `wait`, but log an error instead of raising it, as another error may be ending the run."""
        step = self._writing[0] if self._writing else None
        try:
            self.wait()
        except Exception as error:
            log.info(f"the checkpoint of step {step} could not be written: {error}")

    def close(self) -> None:
        self._thread.shutdown()

    def times(self) -> dict[str, float]:
        """Seconds of the background writes that finished since the last call."""
        took, self._took = self._took, 0.0
        return {"time/background/save": took} if took else {}

    def _files(self, progress: Progress, *, copy: bool) -> Iterator[File]:
        """The files to write: with `copy` from copies in main memory; without, tensors are read while writing."""
        yield from self._trainer.model_files(copy=copy)
        yield "", partial(checkpoint.copy_processor, self._trainer.family)
        states = {"state": self._trainer} | {f"state/{name}": part for name, part in self._parts.items()}
        for place, one in states.items():
            for path, writer in one.state_files(copy=copy):
                yield f"{place}/{path}", writer
        yield "state/progress.json", text_file(json.dumps(asdict(progress), indent=1))

    def _bytes(self) -> int:
        return sum(one.saved_bytes() for one in (self._trainer, *self._parts.values()))

    def _fits(self) -> bool:
        needed = self._bytes()
        free = devices.free_host_bytes() + self._trainer.spare_bytes()
        fits = needed <= LARGEST_SHARE * free
        if not fits and not self._warned:
            self._warned = True
            log.info(
                f"training waits while checkpoints are written: a copy takes {size(needed)} of main memory, "
                f"{size(free)} are free, and half of that may be used"
            )
        return fits


def _timed(box: list[Callable[[], object]]) -> float:
    """Run the function in the box and return its seconds. It is popped first, so that the memory of the copy can be
    reused once it is written.
    """
    began = time.perf_counter()
    box.pop()()
    return time.perf_counter() - began
