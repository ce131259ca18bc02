"""An engine that lives in a process of its own.

A thread starts the process, takes what it sends, and sees when it dies; all else is asked for by
the caller's thread. What it is told to do is sent together, by `flush`.

    replica = Replica(settings, log=path, events=queue.SimpleQueue())
    replica.unsent.append(("submit", request))
    replica.flush()
    replica.events.get()    # (replica, [completion])
"""

from __future__ import annotations

import itertools
import queue
import subprocess
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateAnswer
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from saccade import errors
from saccade.engines import Capabilities, Settings
from saccade.errors import SaccadeError
from saccade.system.codec import FILES, Arrays, decode, encode
from saccade.system.process import LOOK_EVERY, Block, Child, Ended
from saccade.types import Completion, Request

START_LIMIT = 1800.0  # seconds: a large model is read and its kernels are compiled
REPORT_EVERY = 1.0  # seconds between two signs of life
ANSWER_LIMIT = 60.0  # seconds beyond that without one, then the process counts as dead
STEP_LIMIT = 1800.0  # seconds of one step of the engine, a first one with kernels to compile too
GRACE = 10.0  # seconds to end in good order
LARGEST_SUBMISSION = 256
KEPT_FILES = 1 << 30  # bytes of media in the memory of the process
SHOWN_LINES = 20  # of a log, in an error

READY = "ready"
Event = tuple["Replica", "str | list[Completion] | Exception"]
Events = queue.SimpleQueue[Event]


class Died(Exception):
    """The process is gone, or as good as gone; the message says how that showed."""


class Replica:
    """`events`, shared by several, tell when this one is ready, what has finished and why it ended.
    It is ready after the event READY.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        log: Path,
        events: Events,
        environment: Mapping[str, str] | None = None,
        answer_limit: float = ANSWER_LIMIT,
        beside_trainer: bool = True,
    ) -> None:
        self.settings, self.log, self.answer_limit = settings, log, answer_limit
        self.environment, self.beside_trainer = environment, beside_trainer
        self.events = events
        self.child: Child | None = None
        self.unsent: list[tuple[str, Any]] = []  # submit, abort or release with its argument, in order
        self._files: dict[str, int] = {}  # hash → bytes of what the process has, oldest first
        self._numbers = itertools.count()
        self._answers: dict[int, Future[Block]] = {}
        self._ready = self._closing = False
        self._death: Exception | None = None
        self._keeper = threading.Thread(target=self._keep, name=f"engine {log.stem}", daemon=True)
        self._keeper.start()

    # -- for the thread that keeps the process --

    def _keep(self) -> None:
        try:
            self.child = Child(
                "saccade.plugins.engines.replicas.replica_process",
                log=self.log,
                environment=self.environment,
                largest=None,
            )
            if self._closing:
                self.child.kill()
            self._start(self.child)
            self._ready = True
            self.events.put((self, READY))
            self._hear(self.child)
        except Exception as error:
            self._death = error
            self.events.put((self, error))
        for answer in list(self._answers.values()):
            with suppress(Exception):  # it may have come
                answer.set_exception(Died(str(self._death)))
        if self.child is not None:
            self.child.close()

    def _start(self, child: Child) -> None:
        try:
            child.channel.send({"settings": asdict(self.settings)}, seconds=START_LIMIT)
            first = child.receive(START_LIMIT)
        except Ended:
            raise Died(f"it did not start: exit code {child.popen.wait()}") from None
        if first is None:
            raise Died(f"it did not start in {START_LIMIT:g} s")
        if "failed" in first.row:
            raise rebuild_error(first.row["failed"])

    def _hear(self, child: Child) -> None:
        heard = time.monotonic()
        while True:
            block = child.receive(LOOK_EVERY)
            if block is None:
                if time.monotonic() - heard > REPORT_EVERY + self.answer_limit:
                    raise Died(f"timed out: it said nothing for {self.answer_limit:g} s")
                continue
            heard, row = time.monotonic(), block.row
            if "id" in row:
                self._answers.pop(row["id"]).set_result(block)
            elif "failed" in row:
                self.events.put((self, rebuild_error(row["failed"])))
            elif "completions" in row:
                done = decode(tuple[Completion, ...], row["completions"], block.arrays)
                self.events.put((self, list(done)))
            elif row["busy_s"] > STEP_LIMIT:
                raise Died(f"its engine has not moved for {row['busy_s']:.0f} s")

    # -- for the caller's thread --

    def _send(self, call: str, arrays: Arrays | None = None, **row: Any) -> None:
        if self._death is not None or self.child is None:
            raise Died(f"{call}: {self._death}")
        try:
            self.child.channel.send({"call": call, **row}, arrays or {}, seconds=self.answer_limit)
        except (OSError, ValueError) as error:  # it does not read, it ended, it was closed
            raise Died(f"{call}: {type(error).__name__}: {error}") from error

    def _ask(self, call: str, *, limit: float | None = None, **row: Any) -> Any:
        number, limit = next(self._numbers), limit or self.answer_limit
        answer = self._answers[number] = Future()
        self._send(call, id=number, **row)
        try:
            reply = answer.result(timeout=limit).row
        except LateAnswer:
            raise Died(f"{call}: timed out after {limit:g} s") from None
        if "failed" in reply:
            raise rebuild_error(reply["failed"])
        return reply["result"]

    def flush(self) -> None:
        """Send what is in `unsent`."""
        unsent, self.unsent = self.unsent, []
        for call, group in itertools.groupby(unsent, key=lambda each: each[0]):
            items = [item for _, item in group]
            if call != "submit":
                self._send(call, names=items)
                continue
            for start in range(0, len(items), LARGEST_SUBMISSION):
                self._submit(items[start : start + LARGEST_SUBMISSION])

    def _submit(self, batch: list[Request]) -> None:
        """Files of media travel once, texts of prompts do not: an engine there reads ids."""
        arrays: Arrays = {}
        requests = tuple(replace(request, messages=()) for request in batch)
        rows = encode(requests, arrays, known=self._files)
        for name, array in arrays.items():
            if name.startswith(FILES):
                self._files[name.removeprefix(FILES)] = array.nbytes
        forget = []
        while sum(self._files.values()) > KEPT_FILES:
            forget.append(next(iter(self._files)))
            del self._files[forget[-1]]
        self._send("submit", arrays, requests=rows, forget=[FILES + name for name in forget])

    def load(self, copy: Any, version: int) -> None:
        """From the shared copy, which others may read as well."""
        self._ask("weights", limit=STEP_LIMIT, arguments=[copy.paths, copy.checksums, version])

    def sleep(self) -> None:
        self._ask("sleep", limit=STEP_LIMIT)

    def wake(self) -> None:
        self._ask("wake", limit=STEP_LIMIT)

    def capabilities(self) -> Capabilities:
        # Whatever an engine shares with a model of its own process, it is not the trainer's.
        return replace(Capabilities(**self._ask("capabilities")), shares_weights=False)

    def close(self) -> None:
        """In good order where that is possible."""
        self._closing = True
        try:
            if not self._ready:
                raise Died("it is still starting")
            self._ask("shutdown", limit=GRACE)
            assert self.child is not None
            self.child.popen.wait(timeout=GRACE)
        except (Died, SaccadeError, subprocess.TimeoutExpired):
            self.kill()

    def kill(self) -> None:
        self._closing = True
        if self.child is not None:
            self.child.kill()


def rebuild_error(described: Mapping[str, str]) -> SaccadeError:
    """An error of the process as it was there."""
    return getattr(errors, described["kind"])(described["message"])


def tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join([f"-- {log}:", *lines[-SHOWN_LINES:]])
