"""The protocol of an engine: it takes requests and returns what it sampled, with the log-probs of
the distribution it sampled from.

Requests go in with `submit` and completions come out of `poll`, in whatever order they finish;
`key` identifies them, and no result depends on that order. A queue of
completions instead of a future per request keeps the embedded engine in the caller's own thread:
breakpoints work and hundreds of episodes need no thread switches.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from saccade.errors import ConfigError, TrainingError
from saccade.types import Completion, Request


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an engine can do, as reported by the engine, never derived from a version number."""

    logprobs: bool = True  # of the sampling distribution, temperature included
    support: bool = False  # returns the kept ids of truncated sampling
    shares_weights: bool = False  # uses the trainer's tensors: update_weights copies nothing
    separate_memory: bool = False  # has its own device memory, so it can generate while the trainer trains
    live_updates: bool = False  # weights may change while sequences run: these continue with their cached keys


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a process needs to build an engine; plain data that can be sent as JSON."""

    engine: str
    folder: str  # of the model
    dtype: str  # float32 | bfloat16
    device: str = "cpu"  # cpu | cuda | cuda:1 …
    family: str | None = None  # instead of the model_type of the folder
    chat_template: str | None = None  # the text, not a path
    trust_remote_code: bool = False
    max_sequences: int = 512
    max_length: int = 32_768  # tokens of prompt and response
    max_images: int = 64  # of one prompt
    max_pixels: int = 1_003_520  # of one image
    check_nan: bool = False  # raise if log-probs are not finite; off while training, which skips the step
    first_tokens: bool = False  # some requests have other settings for their first token
    tensor_parallel: int = 1
    memory_share: float = 0.6
    seed: int = 0
    args: Mapping[str, Any] = field(default_factory=dict)
    http: Any = None  # HttpConfig of an endpoint


class WeightSource(Protocol):
    """Source of weights to sample with, such as a trainer."""

    def weights(self) -> Iterator[tuple[str, Any]]:
        """Names, as in a saved folder, and tensors; adapters are merged in, tied weights occur once."""


class Engine(Protocol):
    """Engines that have nothing to release or to close inherit these no-ops."""

    version: int
    weights_move: bool = False  # the trainer is changing its weights: an engine may not read them now

    def submit(self, request: Request) -> None:
        """Queue one sequence. Requests with a common prefix may share its cache; it is found by content."""

    def poll(self) -> list[Completion]:
        """Advance (or wait), then return the completions that have finished; the list may be empty."""

    @property
    def pending(self) -> int: ...

    def abort(self, key: str) -> None:
        """End a request early: its completion has finish = aborted and the tokens so far."""

    def progress(self, key: str) -> np.ndarray:
        """Ids sampled so far; empty for an engine that returns only finished requests."""
        return np.zeros(0, np.int64)

    def release(self, episode: str) -> None:
        """Drop the cache that is kept for the next turn of an episode."""
        return

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Sample with these weights from now on; drop older caches. With `live_updates`, running sequences keep
        their keys and values, and all their further tokens have the version of their first key.
        """

    def sleep(self) -> None:
        """Free the memory of the cache until the next request."""
        return

    def wake(self) -> None:
        """Take back the memory that `sleep` freed."""
        return

    def capabilities(self) -> Capabilities:
        return Capabilities()

    def close(self) -> None:
        """End the processes, sockets and files that the engine started."""
        return


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


# -- shared by several engines --


def require_room(request: Request, longest: int) -> None:
    """Refuse a request that may exceed `longest` tokens of prompt and response."""
    asked, new = len(request.ids), request.sampling.max_tokens
    if asked + new > longest:
        raise ConfigError(
            f"request {request.key}: {asked} prompt tokens + {new} new ones exceed the {longest} "
            "that the engine holds; lower rollout.max_tokens, or raise data.max_prompt_tokens and "
            "env.max_total_tokens as far as the model's positions allow"
        )


def nonfinite_error(weights: Iterable[tuple[str, Any]]) -> TrainingError:
    """The error for log-probs that are not finite, naming the weight that they come from."""
    broken = (name for name, tensor in weights if not tensor.isfinite().all())
    if name := next(broken, None):
        fix = "copy or download the files of model.path again, or use an earlier checkpoint"
        return TrainingError(f"log-probs are not finite, because {name} holds NaN or infinity; {fix}")
    return TrainingError("log-probs are not finite, although all weights are: use model.dtype=float32")


def prompt_key(request: Request, length: int | None = None) -> Any:
    """Key that is equal for requests whose first `length` tokens (None: all) are: ids, media and their positions."""
    ids = request.ids[:length]
    return (ids.tobytes(), tuple((span.start, span.media.key) for span in request.media if span.start < len(ids)))


def empty_completion(key: str) -> Completion:
    """The completion of a request that was aborted before it was computed."""
    ids, logprobs, versions = (np.zeros(0, kind) for kind in (np.int64, np.float32, np.int32))
    return Completion(key=key, ids=ids, logprobs=logprobs, versions=versions, finish="aborted")
