"""Threads that send what waits, one job or a few at a time, and counts of what came of it.

Threads wait for the replies, so neither generation nor other rewards do.

    queue = RequestQueue(send, threads=8, batch=32, gather=0.02)
    queue.put(job)
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np

Job = TypeVar("Job")


class RequestQueue(Generic[Job]):
    """`send` gets up to `batch` jobs in a thread of its own and must not raise. A request waits
    `gather` seconds for more jobs.
    """

    def __init__(self, send: Callable[[list[Job]], None], *, threads: int, batch: int = 1, gather: float = 0.0) -> None:
        self._send, self._most, self._batch, self._gather = send, threads, batch, gather
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._idle = 0  # threads without a request
        self._closed = False
        self._counts: Counter[str] = Counter()
        self._seconds: list[float] = []

    def put(self, job: Job) -> bool:
        """From any thread; False where the queue is closed."""
        with self._changed:
            if self._closed:
                return False
            self._waiting.append(job)
            busy = len(self._waiting) > self._idle * self._batch
            if busy and len(self._threads) < self._most:
                # Daemons: what still waits must not keep an interrupted run alive.
                self._threads.append(threading.Thread(target=self._work, daemon=True))
                self._threads[-1].start()
            self._changed.notify()
            return True

    def close(self) -> list[Job]:
        """The jobs that no thread has taken; no thread takes another."""
        with self._changed:
            self._closed = True
            left = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        return left

    def count(self, name: str, added: int = 1) -> int:
        """The sum since `take_counts` was last called."""
        with self._changed:
            self._counts[name] += added
            return self._counts[name]

    def timed(self, seconds: float) -> None:
        with self._changed:
            self._seconds.append(seconds)

    def take_counts(self) -> tuple[Counter[str], dict[str, float]]:
        """Counts and latencies since this was last called."""
        with self._changed:
            counts, self._counts = self._counts, Counter()
            seconds, self._seconds = self._seconds, []
        if not seconds:
            return counts, {}
        middle, slow = np.percentile(seconds, [50, 95])
        return counts, {"latency_p50": float(middle), "latency_p95": float(slow)}

    def _work(self) -> None:
        while not self._closed:
            if jobs := self._take():  # none where another thread was faster
                self._send(jobs)

    def _take(self) -> list[Job]:
        """The next request's worth, after a moment in which it may grow."""
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._gather:
                self._changed.wait_for(lambda: len(self._waiting) >= self._batch or self._closed, self._gather)
            self._idle -= 1
            count = min(self._batch, len(self._waiting))
            return [self._waiting.popleft() for _ in range(count)]
