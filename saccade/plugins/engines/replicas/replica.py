"""An engine in a separate process.

A background thread starts the process, receives what it sends, and notices when it dies; everything
else runs in the caller's thread. Orders are sent together, by `flush`.

    replica = Replica(settings, log=path, events=queue.SimpleQueue())
    replica.unsent.append(("submit", request))
    replica.flush()
    replica.events.get()    # (replica, (completion,))
"""

import itertools
import queue
import subprocess
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateAnswer
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from saccade import errors
from saccade.errors import SaccadeError
from saccade.system.codec import FILES, Arrays, decode, encode
from saccade.system.process import LOOK_EVERY, LOST, Block, Child
from saccade.types import Completion, Request

START_LIMIT = 1800.0  # seconds without a word of a process that starts: it imports libraries
LOAD_SILENCE = 120.0  # seconds without a word of a process that loads: one call may hold up its reports
REPORT_EVERY = 1.0  # seconds between two signs of life
ANSWER_LIMIT = 60.0  # seconds for the process to read what it is sent
STEP_LIMIT = 1800.0  # seconds of one step of the engine, including the first, which may compile kernels
GRACE = 10.0  # seconds for a clean shutdown
LARGEST_BATCH = 256  # requests that are sent together
KEPT_FILES = 1 << 30  # bytes of media files that the process caches
SHOWN_LINES = 20  # of a log, in an error

READY = "ready"
Events = queue.SimpleQueue[tuple["Replica", "str | tuple[Completion, ...] | Exception"]]


class Died(Exception):
    """The process has ended or does not respond; the message says how that was noticed."""


class Replica:
    """An engine in a separate process. `events`, a queue that several replicas share, receives READY
    once it has started, then completions, and the error if it ends.
    """

    module = "saccade.plugins.engines.replicas.replica_process"
    silence_limit = 60.0  # seconds that a report may be late before the process counts as dead

    def __init__(
        self,
        settings: Any,
        *,
        log: Path,
        events: Events,
        environment: Mapping[str, str] | None = None,
        beside_trainer: bool = True,
        place: Callable[["Replica"], Any] | None = None,
    ) -> None:
        """`place` starts the process elsewhere and returns the link to it."""
        self.settings, self.log, self.events = settings, log, events
        self.environment, self.beside_trainer, self.place = environment, beside_trainer, place
        self.direct = getattr(settings, "engine", None) == "embedded"  # reads the trainer's GPU tensors in place
        self.child: Any = None  # a Child, or the link to a process that was started elsewhere
        self.unsent: list[tuple[str, Any]] = []  # submit, abort or release with its argument, in order
        self._files: dict[str, int] = {}  # hash → bytes of the media files that the process has, oldest first
        self._numbers = itertools.count()
        self._answers: dict[int, Future[Block]] = {}
        self._ready = self._closing = False
        self._death: Exception | None = None
        threading.Thread(target=self._keep, name=f"engine {log.stem}", daemon=True).start()

    # -- in the background thread --

    def start(self) -> Any:
        if self.place is not None:
            return self.place(self)
        return Child(self.module, log=self.log, environment=self.environment, largest=None, tied=True)

    def _keep(self) -> None:
        try:
            self.child = self.start()
            if self._closing:
                self.child.kill()
            self.child.channel.send({"settings": asdict(self.settings)}, seconds=START_LIMIT)
            self._hear(self.child)
        except Exception as error:
            code = self.child.exit_code() if self.child else None
            how = {None: "", LOST: "", -9: " (killed: main memory may have run out)"}.get(code, f" (exit code {code})")
            self._death = Died(f"{error}{how}")
            self.events.put((self, self._death))
        for answer in list(self._answers.values()):
            with suppress(Exception):  # the answer may have arrived
                answer.set_exception(Died(str(self._death)))
        if self.child is not None:
            self.child.close()

    def _hear(self, child: Child) -> None:
        silent, reports = 0.0, False  # seconds, counted in looks: time in which this process is halted does not count
        while True:
            before = child.channel.received
            block = child.receive(LOOK_EVERY)
            if block is None:
                silent = silent + LOOK_EVERY if child.channel.received == before else 0.0
                quiet = self.silence_limit if self._ready else LOAD_SILENCE
                limit = REPORT_EVERY + quiet if reports else START_LIMIT
                if silent > limit:
                    raise Died(f"timed out: it said nothing for {limit:g} s")
                continue
            silent, reports, row = 0.0, True, block.row
            if "id" in row:
                answer = self._answers.pop(row["id"])
                if "failed" in row:
                    answer.set_exception(rebuild_error(row["failed"]))
                else:
                    answer.set_result(block)
            elif "failed" in row:
                self.events.put((self, rebuild_error(row["failed"])))
            elif "completions" in row:
                self.events.put((self, decode(tuple[Completion, ...], row["completions"], block.arrays)))
            elif "ready" in row:
                self._ready = True
                self.events.put((self, READY))
            elif row["busy_s"] > STEP_LIMIT:
                raise Died(f"its engine has not moved for {row['busy_s']:.0f} s")

    # -- for the caller's thread --

    def _send(self, row: Mapping[str, Any], arrays: Arrays | None = None) -> None:
        """Send a row. The process caches media files in `arrays`; the oldest beyond KEPT_FILES bytes are dropped."""
        if self._death is not None or self.child is None:
            raise Died(str(self._death))
        arrays, forget = arrays or {}, []
        if arrays:  # else no file is new; other threads send no arrays, so they never change `_files`
            self._files |= {n.removeprefix(FILES): a.nbytes for n, a in arrays.items() if n.startswith(FILES)}
            while sum(self._files.values()) > KEPT_FILES:
                forget.append(FILES + (oldest := next(iter(self._files))))
                del self._files[oldest]
        try:
            self.child.channel.send({**row, "forget": forget}, arrays, seconds=ANSWER_LIMIT)
        except (OSError, ValueError) as error:  # the process does not read or has ended, or the socket is closed
            raise Died(f"{type(error).__name__}: {error}") from error

    def ask(self, call: str, *arguments: Any, limit: float = STEP_LIMIT) -> Any:
        """Make a call and wait for its result. `call`: load, shutdown or a method of the engine."""
        try:
            return self.begin(call, arguments).result(timeout=limit).row["result"]
        except LateAnswer:
            raise Died(f"{call}: timed out after {limit:g} s") from None

    def load(self, offer: Mapping[str, Any], checksums: Mapping[str, int], version: int) -> None:
        """Load weights. If the trainer's GPU tensors cannot be opened there, they are not offered again."""
        self.direct = self.ask("load", offer, checksums, version) and self.direct

    def begin(self, call: str, arguments: Any, arrays: Arrays | None = None) -> Future[Block]:
        """Send a call; returns its future answer. Arrays may go both ways, as ranks need."""
        number = next(self._numbers)
        answer = self._answers[number] = Future()
        self._send({"call": call, "arguments": arguments, "id": number}, arrays)
        return answer

    def flush(self) -> None:
        """Send what is in `unsent`. Media files are sent once; prompt texts are not sent, because the
        engine there reads ids.
        """
        unsent, self.unsent = self.unsent, []
        for start in range(0, len(unsent), LARGEST_BATCH):
            arrays: Arrays = {}
            orders = [
                (call, encode(replace(item, messages=()), arrays, shared=self._files, name=str(n)))
                if isinstance(item, Request)
                else (call, item)
                for n, (call, item) in enumerate(unsent[start : start + LARGEST_BATCH])
            ]
            self._send({"orders": orders}, arrays)

    def close(self) -> None:
        """Shut down cleanly if possible, then kill."""
        self._closing = True
        if self._ready and self.child is not None:
            with suppress(Died, SaccadeError, subprocess.TimeoutExpired):
                self.ask("shutdown", limit=GRACE)
                self.child.wait(GRACE)
        self.kill()

    def kill(self) -> None:
        self._closing = True
        if self.child is not None:
            self.child.kill()


def rebuild_error(described: Mapping[str, str]) -> SaccadeError:
    """The exception that `describe_error` described in the process."""
    return getattr(errors, described["kind"])(described["message"])


def tail(log: Path) -> str:
    if not log.is_file() or not log.stat().st_size:  # its machine may have another disk
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join([f"-- {log}:", *lines[-SHOWN_LINES:]])
