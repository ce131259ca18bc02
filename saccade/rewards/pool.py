"""Killable worker processes: a verifier that hangs or crashes costs its sample only.

One thread per process hands it chunks of samples and watches the clock. JSON lines travel both
ways, never pickle. When a sample hangs, its process group is ended, the sample becomes an error,
and the rest of its chunk goes to a new process. When a process dies, the sample at work is tried
once more, alone: who died may have been ended from outside.

    >>> from saccade.rewards.reward_sample import RewardSample
    >>> with WorkerPool(workers=1, deadline=10) as pool:
    ...     pool.submit("count", RewardSample(id="a", response="7", answer="7")).result().value
    1.0
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.own import show_output
from saccade.rewards.reward_sample import RewardSample, to_json
from saccade.rewards.user_functions import late
from saccade.rewards.verifiers import VERIFIERS
from saccade.types import Score

START_LIMIT = 120.0  # seconds for a process to start and to import the function
GRACE = 1.0  # beyond the deadline, where the worker keeps it itself
LARGEST_CHUNK = 32
CRASHED = "crashed"


@dataclass(frozen=True, kw_only=True)
class _Call:
    verifier: str
    args: str  # JSON
    deadline: float


@dataclass(kw_only=True, eq=False)
class _Job:
    call: _Call
    future: Future[Score]
    sample: str | None = None  # JSON; None only asks whether the function loads
    alone: bool = False
    survived: bool = False  # the end of a process; a second one is its own fault

    def fail(self, reason: str) -> None:
        self.future.set_result(Score(kind="error", reason=reason))


class WorkerPool:
    """`submit` from any thread; results arrive in the futures, never as exceptions."""

    def __init__(self, workers: int, deadline: float) -> None:
        self.deadline = deadline
        self._queues: OrderedDict[_Call, deque[_Job]] = OrderedDict()
        self._changed = threading.Condition()
        self._closed = False
        self._workers = workers
        self._processes: set[_Process] = set()
        self._apart: set[_Call] = set()  # take lists and fail on them, but not on one sample
        self.replaced = 0  # processes that hung or died
        self._threads = [
            threading.Thread(target=self._serve, name=f"reward-worker-{index}", daemon=True)
            for index in range(workers)
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def submit(
        self, verifier: str, sample: RewardSample, args: Mapping[str, Any] | None = None
    ) -> Future[Score]:
        brief = verifier in VERIFIERS and VERIFIERS[verifier].isolated
        return self._enqueue(verifier, args or {}, to_json(sample, brief=brief))

    def alive(self) -> int:
        """Processes that run; they are started when there is work for them."""
        with self._changed:
            return len(self._processes)

    def check(self, verifier: str, args: Mapping[str, Any] | None = None) -> str | None:
        """Why a function cannot be loaded or called with these arguments; None when it can."""
        score = self._enqueue(verifier, args or {}, None).result()
        return score.reason if score.kind == "error" else None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            left = [job for jobs in self._queues.values() for job in jobs]
            self._queues.clear()
            for process in self._processes:
                process.kill()
            self._changed.notify_all()
        for job in left:
            job.fail("closed: the pool was closed first")
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5)
        atexit.unregister(self.close)

    def _enqueue(self, verifier: str, args: Mapping[str, Any], sample: str | None) -> Future[Score]:
        own = VERIFIERS[verifier].deadline if verifier in VERIFIERS else None
        deadline = min(self.deadline, own or self.deadline)
        call = _Call(verifier=verifier, args=json.dumps(args), deadline=deadline)
        job = _Job(call=call, future=Future(), sample=sample)
        job.future.set_running_or_notify_cancel()  # a reward that was asked for is not cancelled
        self._put([job])
        return job.future

    def _put(self, jobs: list[_Job]) -> None:
        with self._changed:
            if not self._closed:
                for job in jobs:
                    self._queues.setdefault(job.call, deque()).append(job)
                self._changed.notify_all()
                return
        for job in jobs:
            job.fail("closed: the pool was closed first")

    def _take(self) -> list[_Job]:
        """The next chunk, small enough that all workers get a share; empty when closed."""
        with self._changed:
            while not self._queues and not self._closed:
                self._changed.wait()
            if self._closed:
                return []
            call, jobs = self._queues.popitem(last=False)
            waiting = len(jobs) + sum(map(len, self._queues.values()))
            size = min(LARGEST_CHUNK, max(1, waiting // (2 * self._workers)))
            chunk = [jobs.popleft()]
            while jobs and len(chunk) < size and not (chunk[0].alone or jobs[0].alone):
                chunk.append(jobs.popleft())
            if jobs:
                self._queues[call] = jobs  # at the end: calls take turns
            return chunk

    def _serve(self) -> None:
        process: _Process | None = None
        while chunk := self._take():
            try:
                process = process or self._start()
                usable = self._run(process, chunk)
            except Exception as error:  # whatever happens here, nobody may wait for ever
                usable = False
                for job in chunk:
                    if not job.future.done():
                        job.fail(f"worker: {type(error).__name__}: {error}")
            if process is not None and not usable:
                self._end(process)
                process = None
        if process is not None:
            self._end(process)

    def _start(self) -> _Process:
        process = _Process()
        with self._changed:
            self._processes.add(process)
            closed = self._closed
        if closed:
            process.kill()
        return process

    def _end(self, process: _Process) -> None:
        with self._changed:
            self._processes.discard(process)
            self.replaced += not self._closed
        process.dispose()

    def _run(self, process: _Process, chunk: list[_Job]) -> bool:
        """Have a chunk scored. False when the process can no longer be used."""
        call = chunk[0].call
        asked = [job for job in chunk if job.sample is not None]
        samples = ",".join(job.sample for job in asked if job.sample is not None)
        request = (
            f'"verifier": {json.dumps(call.verifier)}, "args": {call.args}, '
            f'"deadline": {call.deadline}, "apart": {json.dumps(call in self._apart)}, '
            f'"samples": [{samples}]'
        )
        reply = process.ask(request, START_LIMIT)
        if not reply and process.proven:  # it ended while idle: not the fault of this chunk
            self._put(chunk)
            return False
        if "ready" not in reply:
            trouble = reply.get("failed") or process.trouble(f"not loaded after {START_LIMIT:g} s")
            if not reply and trouble.startswith(CRASHED):
                self._blame(chunk, True, trouble)
                return False
            for job in chunk:
                job.fail(f"load: {trouble}")
            return "failed" in reply
        process.proven = True
        for job in chunk:
            if job.sample is None:
                job.future.set_result(Score(kind="value"))
        return self._collect(process, asked, bool(reply["together"]), call)

    def _collect(self, process: _Process, jobs: list[_Job], together: bool, call: _Call) -> bool:
        waiting, deadline, apart, failed = dict(enumerate(jobs)), call.deadline, "", False
        end = time.monotonic() + deadline + GRACE * together
        while waiting:
            reply = process.receive(end)
            if not reply:
                trouble = process.trouble(late(deadline, own=deadline < self.deadline))
                self._blame(list(waiting.values()), together, trouble)
                return False
            if "index" in reply:
                score = Score(**reply["score"])
                failed |= score.kind == "error"
                waiting.pop(reply["index"]).future.set_result(score)
            together, apart = reply.get("together", together), reply.get("apart", apart)
            if not together:
                end = time.monotonic() + deadline
        if apart and not failed:
            self._score_apart(call, apart)
        return True

    def _score_apart(self, call: _Call, trouble: str) -> None:
        with self._changed:
            known = call in self._apart
            self._apart.add(call)
        if not known:
            logging.getLogger("saccade").warning(
                "%s cannot score several samples at once (%s), but each alone; from now on it is "
                "called with one sample at a time",
                call.verifier,
                trouble,
            )

    def _blame(self, waiting: list[_Job], together: bool, reason: str) -> None:
        """The sample at work is at fault. Several at work at once: each is tried again alone."""
        suspects = waiting if together else waiting[:1]
        died = reason.startswith(CRASHED)
        for job in suspects:
            if len(suspects) == 1 and (job.survived or not died):
                job.fail(reason)
            job.alone, job.survived = True, job.survived or died
        self._put([job for job in waiting if not job.future.done()])


class _Process:
    """A worker and its pipes. Its own process group, so that what it started ends with it."""

    def __init__(self) -> None:
        package_root = str(Path(__file__).resolve().parents[2])
        search = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "saccade.rewards.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the parent only
            env={**os.environ, "PYTHONPATH": search},
            bufsize=0,
        )
        assert self.process.stdout is not None
        self.shown = show_output(self.process, "a reward")
        self.proven = False  # has answered before
        self.request = 0  # the one that is being answered
        self.lines: deque[bytes] = deque()
        self.rest = b""
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.process.stdout, selectors.EVENT_READ)

    def ask(self, request: str, limit: float) -> Mapping[str, Any]:
        assert self.process.stdin is not None
        self.request += 1
        try:
            data = memoryview(f'{{"id": {self.request}, {request}}}\n'.encode())
            while data:
                data = data[self.process.stdin.write(data) :]
        except BrokenPipeError:
            return {}
        return self.receive(time.monotonic() + limit)

    def receive(self, end: float) -> Mapping[str, Any]:
        """The next reply to the request; nothing when the time is over or the process has ended.
        What answers an earlier one is passed over.
        """
        assert self.process.stdout is not None
        while True:
            while self.lines:
                reply = json.loads(self.lines.popleft())
                if reply["id"] == self.request:
                    return reply
            if not self.selector.select(max(0.0, end - time.monotonic())):
                return {}
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            if not data:
                return {}
            *lines, self.rest = (self.rest + data).split(b"\n")
            self.lines.extend(lines)

    def trouble(self, what: str) -> str:
        try:
            code = self.process.wait(timeout=0.05)
        except subprocess.TimeoutExpired:
            return f"timeout: {what}"
        return f"{CRASHED}: the worker ended with code {code}"

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def dispose(self) -> None:
        """For the thread that reads from it: also give the pipes back."""
        self.kill()
        self.selector.close()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.shown.join(timeout=1)
