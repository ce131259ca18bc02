"""An engine that asks an endpoint over HTTP: for evaluation, for generating, never for training.

It gives no log-probs and takes no weights. Requests wait in one queue for `concurrency` threads. An
endpoint that refuses one, or stays away after all retries, is an error of that request: whoever
polls decides whether to go on without it.

    engine = HttpEngine(ChatClient(config.rollout.http), endpoint_family(config.rollout.http.url))
"""

from __future__ import annotations

import itertools
import queue
import threading
from typing import Any, Literal

import numpy as np

from saccade.engines import Capabilities, Engine, Settings
from saccade.errors import ConfigError, SaccadeError
from saccade.models.families import Family
from saccade.plugins.judges.http_client.chat_client import Answer, ChatClient
from saccade.types import Completion, Request

SEED_BITS = 31  # what every server takes
GLANCE = 0.05  # seconds that poll waits for an answer


def from_settings(settings: Settings, family: Family, *, beside_trainer: bool = False) -> HttpEngine:
    return HttpEngine(ChatClient(settings.http, fields=settings.args), family)


class HttpEngine(Engine):
    version = 0

    def __init__(self, client: ChatClient, family: Family) -> None:
        self.client, self._texts = client, family.chat.tokenizer
        self._waiting: queue.SimpleQueue[tuple[int, Request] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[int, str, Answer | BaseException]]
        self._answers = queue.SimpleQueue()
        # A key may be used again while an answer that nobody wants any more is under way.
        self._numbers = itertools.count()
        self._open: dict[str, int] = {}
        self._done: list[Completion] = []
        self._closed = False
        # Daemons: what still waits must not keep an interrupted run alive.
        self._workers = [
            threading.Thread(target=self._work, name=f"http-{i}", daemon=True) for i in range(client.http.concurrency)
        ]
        for worker in self._workers:
            worker.start()

    def _work(self) -> None:
        while (task := self._waiting.get()) is not None:
            number, request = task
            if self._open.get(request.key) != number:
                continue
            answer: Answer | BaseException
            try:
                seed = request.noise & ((1 << SEED_BITS) - 1)
                answer = self.client.ask(request.messages, request.sampling, seed)
            except BaseException as error:  # raised again where the engine is polled
                answer = _about(request, error)
            self._answers.put((number, request.key, answer))

    @property
    def model_name(self) -> str:
        return self.client.model

    def expenses(self) -> str:
        """What was asked and what that cost."""
        return self.client.counters.describe(self.client.http.price)

    # -- the protocol --

    def submit(self, request: Request) -> None:
        assert request.messages, f"request {request.key} has no messages to send"
        assert not self._closed, f"request {request.key}: the engine is closed"
        self._open[request.key] = next(self._numbers)
        self._waiting.put((self._open[request.key], request))

    def poll(self) -> list[Completion]:
        """Raises what became of a request instead of an answer; others come with the next call."""
        wait = bool(self._open) and not self._done
        while not self._answers.empty() or wait:
            try:
                number, key, answer = self._answers.get(timeout=GLANCE)
            except queue.Empty:
                break
            wait = False
            if self._open.get(key) != number:  # it was aborted
                continue
            del self._open[key]
            if isinstance(answer, BaseException):
                raise answer
            ids = self._texts.record(answer.text, tokens=answer.usage.response)
            self._done.append(_completion(key, ids, answer.finish))
        done, self._done = self._done, []
        return done

    @property
    def pending(self) -> int:
        return len(self._open) + len(self._done)

    def abort(self, key: str) -> None:
        if self._open.pop(key, None) is not None:
            self._done.append(_completion(key, np.zeros(0, np.int64), "aborted"))

    def update_weights(self, source: Any, version: int) -> None:
        raise ConfigError(
            "rollout.engine: an endpoint takes no weights, so http only evaluates; try rollout.engine=embedded"
        )

    def capabilities(self) -> Capabilities:
        return Capabilities(logprobs=False, support=False, shares_weights=False, live_episodes=False)

    def close(self) -> None:
        """Sends nothing more, but waits for answers under way: they are paid for and are cached."""
        self._closed = True
        self._open.clear()
        self.client.stop()
        for _ in self._workers:
            self._waiting.put(None)
        for worker in self._workers:
            worker.join(self.client.http.timeout)


def _completion(key: str, ids: np.ndarray, finish: Literal["stop", "length", "aborted"]) -> Completion:
    return Completion(
        key=key,
        ids=ids,
        logprobs=np.full(len(ids), np.nan, np.float32),
        versions=np.zeros(len(ids), np.int32),
        finish=finish,
    )


def _about(request: Request, error: BaseException) -> BaseException:
    if not isinstance(error, SaccadeError):
        return error
    told = type(error)(f"{request.key}: {error}")
    told.request = request.key
    return told
