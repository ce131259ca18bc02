"""One engine for many clients: one thread drives the engine, the others queue and wait.

hub = Hub(engine)
threading.Thread(target=serve_clients).start()      # they call hub.ask
hub.run()                                           # here, until hub.close()
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from saccade.engines import Engine, progress
from saccade.errors import SaccadeError
from saccade.types import Completion, Request

GLANCE = 1.0  # seconds after which a client looks whether the engine still runs
NOTHING = np.zeros(0, np.int64)


class Closed(Exception):
    """The engine has ended."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """What one of the asked sequences has so far; at the end its completion, or why it has none."""

    index: int
    ids: np.ndarray
    completion: Completion | None = None
    problem: SaccadeError | None = None


@dataclass(kw_only=True)
class _Client:
    index: int
    events: queue.SimpleQueue[Event]
    stream: bool
    seen: int = 0

    def refuse(self, problem: SaccadeError) -> None:
        self.events.put(Event(index=self.index, ids=NOTHING, problem=problem))


class Hub:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.closed = False
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._clients: dict[str, _Client] = {}
        self._numbers = itertools.count()

    def ask(
        self, requests: Sequence[Request], *, stream: bool = False
    ) -> Generator[Event, None, None]:
        """Events of all requests until each is complete; whoever stops reading aborts the rest.
        Raises what the engine says against one of them.
        """
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        keys = [f"{request.key}#{next(self._numbers)}" for request in requests]
        for index, (key, request) in enumerate(zip(keys, requests, strict=True)):
            client = _Client(index=index, events=events, stream=stream)
            self._inbox.put(partial(self._submit, replace(request, key=key), client))
        left = set(range(len(keys)))
        try:
            while left:
                try:
                    event = events.get(timeout=GLANCE)
                except queue.Empty:
                    if self.closed:
                        raise Closed from None
                    continue
                if event.completion is not None or event.problem is not None:
                    left.remove(event.index)
                if event.problem is not None:
                    raise event.problem
                yield event
        finally:
            for index in left:
                self._inbox.put(partial(self._abort, keys[index]))

    def run(self) -> None:
        """Drives the engine in this thread until the hub is closed."""
        try:
            while not self.closed:
                self._take()
                for completion in self._poll():
                    client = self._clients.pop(completion.key, None)
                    if client is not None:
                        client.events.put(
                            Event(index=client.index, ids=completion.ids, completion=completion)
                        )
                for key, client in self._clients.items():
                    if client.stream and len(ids := progress(self.engine, key)) > client.seen:
                        client.seen = len(ids)
                        client.events.put(Event(index=client.index, ids=ids))
        finally:
            self.closed = True

    def close(self) -> None:
        self._inbox.put(self._end)

    def _take(self) -> None:
        """What clients want; waits when there is nothing else to do."""
        while not self.closed and not (self._inbox.empty() and self.engine.pending):
            self._inbox.get()()

    def _poll(self) -> list[Completion]:
        try:
            return self.engine.poll() if self.engine.pending else []
        except SaccadeError as problem:
            if problem.request is None:
                raise
            if (client := self._clients.pop(problem.request, None)) is not None:
                client.refuse(problem)
            return []

    def _submit(self, request: Request, client: _Client) -> None:
        try:
            self.engine.submit(request)
        except SaccadeError as problem:
            client.refuse(problem)
        else:
            self._clients[request.key] = client

    def _abort(self, key: str) -> None:
        if self._clients.pop(key, None) is not None:
            self.engine.abort(key)

    def _end(self) -> None:
        self.closed = True
