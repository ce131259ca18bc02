"""The protocol of an engine: it takes requests and returns what it sampled, with the log-probs of
the distribution it sampled from.

Requests go in with `submit` and completions come out of `poll`, in whatever order they finish;
`key` says which is which, and nothing that is computed depends on that order. A queue of
completions instead of a future per request keeps the embedded engine in the caller's own thread:
breakpoints work and hundreds of episodes cost no hand-over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from saccade.types import Completion, Request


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an engine can do: asked of the engine, never derived from a version number."""

    logprobs: bool  # of the sampling distribution, temperature included
    support: bool  # returns the kept ids of truncated sampling
    shares_weights: bool  # update_weights moves nothing
    live_episodes: bool  # continues a turn from its cache


class WeightSource(Protocol):
    """Where weights to sample with come from, such as a backend."""

    def weights(self) -> Iterator[tuple[str, Any]]:
        """Name and tensor under the names of a saved folder; adapters merged in, tied weights
        once.
        """
        ...


class Engine(Protocol):
    version: int

    def submit(self, request: Request) -> None:
        """Queue one sequence. Requests that begin alike share their prefix by content."""
        ...

    def poll(self) -> list[Completion]:
        """Advance (or wait), then return what has finished; empty only when there was nothing to
        finish yet.
        """
        ...

    @property
    def pending(self) -> int: ...

    def abort(self, key: str) -> None:
        """Its completion comes back with finish = aborted and the tokens so far."""
        ...

    def release(self, episode: str) -> None: ...

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Sample with these weights from now on; drop whatever was cached under others."""
        ...

    def sleep(self) -> None:
        """Free the memory of the cache until the next request."""
        ...

    def wake(self) -> None: ...

    def capabilities(self) -> Capabilities: ...

    def close(self) -> None:
        """End the processes, sockets and files that the engine started."""
        ...


def progress(engine: Engine, key: str) -> np.ndarray:
    """Ids sampled so far; none from an engine that returns only finished requests."""
    shown = getattr(engine, "progress", None)
    return shown(key) if shown is not None else np.zeros(0, np.int64)


def generate(engine: Engine, requests: Iterable[Request]) -> list[Completion]:
    """Return all completions, in the order of the requests."""
    order: dict[str, int] = {}
    for request in requests:
        order[request.key] = len(order)
        engine.submit(request)
    done: list[Completion] = []
    while len(done) < len(order):
        done += engine.poll()
    return sorted(done, key=lambda completion: order[completion.key])
