"""Checkpoints of a run, written while its next steps compute.

At a save everything is copied to main memory; a thread writes, verifies and renames it. One is
written at a time. What goes wrong in the thread is raised by the next call here, so that the run
ends at its next step.

    saver = Saver(run.folder.checkpoints, config.save, saved=None)
    saver.save(step, backend, family, progress=progress, parts={}, background=True)
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from saccade import checkpoint, devices
from saccade.backends import Backend
from saccade.config import SaveConfig
from saccade.contents import kept_bytes
from saccade.disk import free_bytes, size
from saccade.models.families import Family

log = logging.getLogger(__name__)

LARGEST_SHARE = 0.5  # of the free main memory: rollouts and pictures need some, too


class Saver:
    def __init__(
        self,
        folder: Path,
        config: SaveConfig,
        *,
        saved: int | None,
    ) -> None:
        self.folder, self.config = folder, config
        self.saved = saved  # the last step that is on disk
        self._told = False
        self._writing: tuple[int, Future[None]] | None = None
        self._took: deque[float] = deque()  # seconds of those that are finished
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    @property
    def newest(self) -> int | None:
        """The step that is being written, or the last one that was."""
        return self.saved if self._writing is None else self._writing[0]

    def save(
        self,
        step: int,
        backend: Backend,
        family: Family,
        *,
        progress: Mapping[str, Any],
        parts: Mapping[str, checkpoint.Stateful],
        background: bool,
    ) -> None:
        """Without `background` it is on disk when this returns."""
        self.wait()
        copy = background and self.config.background and self._fits(backend, parts)
        write = checkpoint.prepare(
            self.folder,
            step,
            backend,
            family,
            progress=progress,
            keep=self.config.keep,
            parts=parts,
            best=progress["best_step"],
            copy=copy,
        )
        if copy:
            self._writing = step, self._thread.submit(self._timed, [write])
        else:
            write()
            self.saved = step

    def require_room(self, needed: int, due: int) -> None:
        """On the disk, before the first step: for one checkpoint of `needed` bytes at least. With
        `due` to come, the newest are kept until one more is whole.
        """
        if not due:
            return
        checkpoint.require_room(self.folder, needed)
        keep = self.config.keep
        more = min(due, keep + 1 - min(keep, len(checkpoint.complete_steps(self.folder))))
        free = free_bytes(self.folder)
        if more * needed > free:
            log.warning(
                f"with save.keep={keep} there will be {more} checkpoints more in "
                f"{self.folder}, of up to {size(needed)} each, and {size(free)} are free; free "
                "some space or lower save.keep, or the run stops when the disk is full"
            )

    def check(self) -> None:
        """Raise what went wrong by now."""
        if self._writing is not None and self._writing[1].done():
            self.wait()

    def wait(self) -> None:
        """Until all is on disk."""
        if self._writing is not None:
            (step, future), self._writing = self._writing, None
            future.result()
            self.saved = step

    def settle(self) -> None:
        """As `wait`, where another error ends the run: that one is raised, this one is told."""
        step = self.newest
        try:
            self.wait()
        except Exception as error:
            log.warning(f"the checkpoint of step {step} could not be written: {error}")

    def close(self) -> None:
        self._thread.shutdown()

    def times(self) -> dict[str, float]:
        """Seconds that the thread took for checkpoints which were finished since the last call."""
        took = [self._took.popleft() for _ in range(len(self._took))]
        return {"time/background/save": sum(took)} if took else {}

    def _timed(self, box: list[Callable[[], object]]) -> None:
        """`box` is emptied: when this is done the memory of the copy is free for the next one."""
        began = time.perf_counter()
        box.pop()()
        self._took.append(time.perf_counter() - began)

    def _fits(self, backend: Backend, parts: Mapping[str, checkpoint.Stateful]) -> bool:
        needed = checkpoint.saved_bytes(backend, parts)
        free = devices.free_host_bytes() + kept_bytes()
        fits = needed <= LARGEST_SHARE * free
        if not fits and not self._told:
            self._told = True
            log.info(
                f"training waits while checkpoints are written: a copy takes {size(needed)} of "
                f"main memory, {size(free)} are free, and half of that may be used"
            )
        return fits
