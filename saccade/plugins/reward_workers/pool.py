"""Killable worker processes: a verifier that hangs or crashes fails only its own sample.

One thread per process sends it chunks of samples and enforces deadlines. If a sample hangs, its
process group is killed, the sample becomes an error, and the rest of its chunk goes to a new
process. If a process dies, the sample that it was scoring is retried once, alone, because the
process may have been killed from outside.

    >>> from saccade.rewards.reward_sample import RewardSample
    >>> with WorkerPool(workers=1, deadline=10) as pool:
    ...     pool.submit("count", RewardSample(id="a", response="7", answer="7")).result().value
    1.0
"""

from __future__ import annotations

import atexit
import json
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from saccade.plugins.reward_workers.user_functions import late
from saccade.rewards.reward_sample import RewardSample, to_json
from saccade.rewards.verifiers import VERIFIERS
from saccade.system.process import Child, Ended, Process
from saccade.types import Score

WORKER = "saccade.plugins.reward_workers.worker"
START_LIMIT = 120.0  # seconds for a process to start and to import the function
GRACE = 1.0  # seconds after the deadline of several samples at once, whose coroutines the worker itself times out
LARGEST_CHUNK = 32
CRASHED, CLOSED = "crashed", "closed: the pool was closed first"


class _Call(NamedTuple):
    verifier: str
    args: str  # JSON
    deadline: float


@dataclass(kw_only=True, eq=False)
class _Job:
    call: _Call
    future: Future[Score]
    sample: str | None = None  # JSON; None only checks that the function loads
    alone: bool = False  # must be the only job of its chunk
    crashed_once: bool = False  # a process died while scoring it; if a second one does, the job fails


class WorkerPool:
    """`submit` may be called from any thread; futures get scores, never exceptions."""

    def __init__(self, workers: int, deadline: float) -> None:
        self.deadline = deadline
        self._queues: OrderedDict[_Call, deque[_Job]] = OrderedDict()
        self._changed = threading.Condition()
        self._closed, self._workers = False, workers
        self._children: set[Process] = set()
        self._start_process: Callable[[], Process] = start_worker
        self._single_only: set[_Call] = set()  # batch functions that fail on several samples, but not on single ones
        self.replaced = 0  # number of processes that hung or died
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(workers)]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def submit(self, verifier: str, sample: RewardSample, args: Mapping[str, Any] | None = None) -> Future[Score]:
        brief = verifier in VERIFIERS and VERIFIERS[verifier].isolated
        return self._enqueue(verifier, args or {}, to_json(sample, brief=brief))

    def alive(self) -> int:
        """Number of running processes; each is started when there is work for it."""
        return len(self._children)

    def check(self, verifier: str, args: Mapping[str, Any] | None = None) -> str | None:
        """Why a function cannot be loaded or called with these arguments; None if it can."""
        score = self._enqueue(verifier, args or {}, None).result()
        return score.reason if score.kind == "error" else None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            left = [job for jobs in self._queues.values() for job in jobs]
            self._queues.clear()
            for child in self._children:
                child.kill()
            self._changed.notify_all()
        _fail(left, CLOSED)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5)
        atexit.unregister(self.close)

    def _enqueue(self, verifier: str, args: Mapping[str, Any], sample: str | None) -> Future[Score]:
        own = VERIFIERS[verifier].deadline if verifier in VERIFIERS else None
        call = _Call(verifier, json.dumps(args), min(self.deadline, own or self.deadline))
        job = _Job(call=call, future=Future(), sample=sample, alone=sample is None)
        job.future.set_running_or_notify_cancel()  # from now on it cannot be cancelled
        self._put([job])
        return job.future

    def _put(self, jobs: list[_Job]) -> None:
        with self._changed:
            if not self._closed:
                for job in jobs:
                    self._queues.setdefault(job.call, deque()).append(job)
                self._changed.notify_all()
                return
        _fail(jobs, CLOSED)

    def _take(self) -> list[_Job]:
        """The next chunk, small enough that all workers get some; empty if the pool is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queues or self._closed)
            if self._closed:
                return []
            call, jobs = self._queues.popitem(last=False)
            waiting = len(jobs) + sum(map(len, self._queues.values()))
            size = min(LARGEST_CHUNK, max(1, waiting // (2 * self._workers)))
            chunk = [jobs.popleft()]
            while jobs and len(chunk) < size and not (chunk[0].alone or jobs[0].alone):
                chunk.append(jobs.popleft())
            if jobs:
                self._queues[call] = jobs  # at the end: round-robin over calls
            return chunk

    def move(self, begin: Callable[[], Process]) -> None:
        """Start processes with `begin` from now on; running ones are replaced before their next chunk."""
        self._start_process = begin

    def _serve(self) -> None:
        child: Process | None = None
        started_with: Any = None
        while chunk := self._take():
            try:
                if child is not None and started_with is not self._start_process:
                    self._end(child, moved=True)
                    child = None
                started_with = self._start_process
                child = child or self._start()
                usable = self._run(child, chunk)
            except Exception as error:  # every future must get a result
                usable = False
                _fail(chunk, f"worker: {type(error).__name__}: {error}")
            if child is not None and not usable:
                self._end(child)
                child = None
        if child is not None:
            self._end(child)

    def _start(self) -> Process:
        child = self._start_process()
        with self._changed:
            self._children.add(child)
            closed = self._closed
        if closed:
            child.kill()
        return child

    def _end(self, child: Process, *, moved: bool = False) -> None:
        with self._changed:
            self._children.discard(child)
            self.replaced += not self._closed and not moved
        child.close()

    def _run(self, child: Process, chunk: list[_Job]) -> bool:
        """Score a chunk in the process. False if the process can no longer be used."""
        call, proven = chunk[0].call, child.asked > 0
        samples = [job.sample for job in chunk if job.sample is not None]
        request = {**call._asdict(), "apart": call in self._single_only, "samples": samples}
        try:
            reply = child.ask(request, seconds=START_LIMIT).row
        except (Ended, TimeoutError):
            failure = _failure(child, f"not loaded after {START_LIMIT:g} s")
            if proven:  # it has worked before, so it ended while idle: retry this chunk
                self._put(chunk)
            elif failure.startswith(CRASHED):
                self._fail_or_retry(chunk, True, failure)
            else:
                _fail(chunk, f"load: {failure}")
            return False
        if "failed" in reply:
            _fail(chunk, f"load: {reply['failed']}")
        elif not samples:
            chunk[0].future.set_result(Score(kind="value"))
        else:
            return self._collect(child, chunk, call, together=reply["together"])
        return True

    def _collect(self, child: Process, jobs: list[_Job], call: _Call, *, together: bool) -> bool:
        waiting, deadline, apart, failed = dict(enumerate(jobs)), call.deadline, "", False
        end = time.monotonic() + deadline + GRACE * together
        while waiting:
            try:
                reply = child.answer(max(0.0, end - time.monotonic())).row
            except (Ended, TimeoutError):
                failure = _failure(child, late(deadline, own=deadline < self.deadline))
                self._fail_or_retry(list(waiting.values()), together, failure)
                return False
            if "apart" in reply:
                together, apart = False, reply["apart"]
            else:
                score = Score(**reply["score"])
                failed |= score.kind == "error"
                waiting.pop(reply["index"]).future.set_result(score)
            if not together:
                end = time.monotonic() + deadline
        if apart and not failed and call not in self._single_only:
            self._single_only.add(call)
            problem = f"{call.verifier} cannot score several samples at once ({apart}), but each alone"
            logging.getLogger("saccade").warning("%s; from now on it is called with one sample at a time", problem)
        return True

    def _fail_or_retry(self, waiting: list[_Job], together: bool, reason: str) -> None:
        """Fail the sample that was being scored, or retry it once after a crash; retry each alone if `together`."""
        suspects = waiting if together else waiting[:1]
        died = reason.startswith(CRASHED)
        for job in suspects:
            if len(suspects) == 1 and (job.crashed_once or not died):
                _fail([job], reason)
            job.alone, job.crashed_once = True, job.crashed_once or died
        self._put([job for job in waiting if not job.future.done()])


def start_worker() -> Child:
    return Child(WORKER)


def _fail(jobs: Iterable[_Job], reason: str) -> None:
    for job in jobs:
        if not job.future.done():
            job.future.set_result(Score(kind="error", reason=reason))


def _failure(child: Process, late: str) -> str:
    code = child.exit_code()
    return f"timeout: {late}" if code is None else f"{CRASHED}: the worker ended with code {code}"
