"""One engine for many clients: one thread drives the engine, coroutines in the server's thread await its events.

hub = Hub(engine)
async for event in hub.ask(requests): ...    # in the event loop of a server
hub.run()                                    # in this thread, until hub.close()
"""

import asyncio
import itertools
import queue
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from saccade.engines import Engine
from saccade.errors import SaccadeError
from saccade.types import Completion, Request

CHECK_INTERVAL = 1.0  # seconds between a waiting client's checks that the engine still runs


class Closed(SaccadeError):
    """The engine has ended."""


class Event(NamedTuple):
    """The ids of one choice so far; the last event of a choice has its completion."""

    choice: int
    ids: np.ndarray
    completion: Completion | None = None


@dataclass(kw_only=True)
class _Client:
    index: int
    send: Callable[[Event | SaccadeError], None]
    stream: bool
    seen: int = 0


class Hub:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.closed = False
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._clients: dict[str, _Client] = {}
        self._numbers = itertools.count()

    async def ask(self, requests: Sequence[Request], *, stream: bool = False) -> AsyncGenerator[Event, None]:
        """Events of all requests until each is complete; closing the generator aborts the rest.
        Raises the engine's error if it rejects or fails one of them.
        """
        events: asyncio.Queue[Event | SaccadeError] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def send(event: Event | SaccadeError) -> None:
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(events.put_nowait, event)

        keys = [f"{request.key}#{next(self._numbers)}" for request in requests]
        for index, (key, request) in enumerate(zip(keys, requests, strict=True)):
            client = _Client(index=index, send=send, stream=stream)
            self._inbox.put(partial(self._submit, replace(request, key=key), client))
        left = set(range(len(keys)))
        try:
            while left:
                try:
                    event = await asyncio.wait_for(events.get(), CHECK_INTERVAL)
                except asyncio.TimeoutError:
                    if self.closed:
                        raise Closed("the engine has ended") from None
                    continue
                if isinstance(event, SaccadeError):
                    raise event
                if event.completion is not None:
                    left.remove(event.choice)
                yield event
        finally:
            for index in left:
                self._inbox.put(partial(self._abort, keys[index]))

    def run(self) -> None:
        """Drive the engine in this thread until the hub is closed."""
        try:
            while not self.closed:
                self._take()
                for completion in self._poll():
                    if client := self._clients.pop(completion.key, None):
                        client.send(Event(client.index, completion.ids, completion))
                for key, client in self._clients.items():
                    if client.stream and len(ids := self.engine.progress(key)) > client.seen:
                        client.seen = len(ids)
                        client.send(Event(client.index, ids))
        finally:
            self.closed = True

    def close(self) -> None:
        self._inbox.put(partial(setattr, self, "closed", True))

    def _take(self) -> None:
        """Run the clients' submits and aborts; block while the engine has no pending requests."""
        while not self.closed and not (self._inbox.empty() and self.engine.pending):
            self._inbox.get()()

    def _poll(self) -> list[Completion]:
        try:
            return self.engine.poll() if self.engine.pending else []
        except SaccadeError as problem:
            if problem.request is None:
                raise
            if (client := self._clients.pop(problem.request, None)) is not None:
                client.send(problem)
            return []

    def _submit(self, request: Request, client: _Client) -> None:
        try:
            self.engine.submit(request)
        except SaccadeError as problem:
            client.send(problem)
        else:
            self._clients[request.key] = client

    def _abort(self, key: str) -> None:
        if self._clients.pop(key, None) is not None:
            self.engine.abort(key)
