"""Ends a run that makes no progress: names the phase, and writes the stacks of all its processes.

Progress is a change of what the console shows (step, phase, count of done items), or CPU or disk use of its processes.
So a step may take as long as it needs, and a process that waits for ever is found. If only other threads or children
work, and the main thread waits or spins in one place (such as for a GPU that hangs), the limit is BUSY times as long.
The main thread then gets an error, which saves the last step; if that does not help, the process is ended.

    with Watchdog(console, folder, seconds=1200): ...
"""

import faulthandler
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from saccade.errors import TrainingError
from saccade.plugins.watchdog.signs_of_life import children, children_cpu, disk_use
from saccade.run.console import Console
from saccade.system.process import STACKS

log = logging.getLogger(__name__)

FILE = "stalled.txt"  # in the folder of the run
LOOKS = 20  # checks per time limit
BUSY = 6  # factor of the limit while only other threads or children work
MOVES = 0.03  # mean share of a core that counts as work; threads that only wait use less
WRITING = 0.3  # seconds for a process to write its stacks


class Watchdog:
    """Context manager for the main thread; in another thread it does nothing, as only the main thread gets signals."""

    def __init__(self, console: Console, folder: Path, seconds: float) -> None:
        self.console, self.file, self.seconds = console, folder / FILE, seconds
        self._over = threading.Event()
        self._main = threading.main_thread()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._message = ""

    def __enter__(self) -> "Watchdog":
        if self.seconds and threading.current_thread() is self._main:
            self._stacks = tempfile.NamedTemporaryFile(prefix="saccade-stacks-", suffix=".txt")
            os.environ[STACKS] = self._stacks.name  # processes started from here on write their stacks there on SIGUSR1
            self._before = signal.signal(signal.SIGUSR2, self._raise)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
            signal.signal(signal.SIGUSR2, self._before)
            os.environ.pop(STACKS, None)
            self._stacks.close()

    def _raise(self, number: int, frame: FrameType | None) -> None:
        raise TrainingError(self._message)

    def _watch(self) -> None:
        # `moved`, `before`: time of the last progress and CPU seconds then: [by any sign, of the main thread alone].
        shown: Any = None
        disk: list[str] = []
        place = 0  # hash of the main thread's stack
        moved = [0.0, 0.0]
        before = [0.0, 0.0]
        last, every = time.monotonic(), self.seconds / LOOKS
        while not self._over.wait(every):
            now, state, used = time.monotonic(), self._state(), disk_use()
            main = time.clock_gettime(time.pthread_getcpuclockid(self._main.ident or 0))
            own = time.process_time() - time.thread_time()  # without this watching thread
            cpu = [own + sum(os.times()[2:4]) + children_cpu("self"), main]
            spans = zip(cpu, before, moved, strict=True)
            works = [spent - then > MOVES * (now - since) for spent, then, since in spans]
            mark = hash(tuple((frame.f_code, frame.f_lasti) for frame in _frames(self._main)))
            halted = now - last > 5 * every  # this process or the machine was suspended
            for kind, moves in enumerate((works[0] or used != disk, works[1] and mark != place)):
                if state != shown or halted or moves:
                    moved[kind], before[kind] = now, cpu[kind]
            shown, disk, place, last = state, used, mark, now
            still, alone = now - moved[0], now - moved[1]
            if (still > self.seconds or alone > BUSY * self.seconds) and not _at_a_prompt(self._main):
                self._end(still if still > self.seconds else alone)
                moved = [now, now]

    def _state(self) -> tuple[Any, ...]:
        return self.console.last, tuple(self.console.clock.open), self.console.done

    def _end(self, still: float) -> None:
        if self._message:  # the error was raised before and did not end the run
            log.error(f"{self._message}\nthe process did not react, and is ended; nothing more is saved")
            logging.shutdown()
            os._exit(TrainingError.exit_code)
        step, phases, done = self._state()
        phase = " in ".join(reversed(phases)) or self.console.idle
        shown = f" with {done[0]} of {done[1]} done" if done else ""
        self._message = (
            f"stalled: nothing has moved for {still:.0f} s in phase {phase} of step {step + 1}{shown}; {self.file} has "
            f"the stacks of all processes. If this wait is right, raise run.stop.stalled={self.seconds:g} (0: no limit)"
        )
        with suppress(OSError):  # end the run even if the disk is full
            self._write_stacks()
        signal.pthread_kill(self._main.ident or 0, signal.SIGUSR2)

    def _write_stacks(self) -> None:
        """Stacks of this process and of descendants that opened STACKS; of others the command and kernel wait state."""
        with self.file.open("w", encoding="utf-8") as file:
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            print(f"{when} {self._message}\n\n-- process {os.getpid()}, this run", file=file)
            file.flush()
            faulthandler.dump_traceback(file)
            for child in children("self"):
                with suppress(OSError):  # it may have ended
                    folder = Path(f"/proc/{child}")
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    print(f"\n-- process {child}: {command}", file=file)
                    if any(os.readlink(one) == self._stacks.name for one in (folder / "fd").iterdir()):
                        self._stacks.seek(0, os.SEEK_END)
                        os.kill(child, signal.SIGUSR1)
                        time.sleep(WRITING)
                        file.write(self._stacks.read().decode(errors="replace"))
                    else:
                        print(f"  waits in {(folder / 'wchan').read_text()}", file=file)


def _at_a_prompt(thread: threading.Thread) -> bool:
    """Whether the thread is in pdb, where no progress is expected."""
    return any(frame.f_code.co_filename.endswith("pdb.py") for frame in _frames(thread))


def _frames(thread: threading.Thread) -> Iterator[FrameType]:
    return (frame for frame, _ in traceback.walk_stack(sys._current_frames().get(thread.ident or 0)))
