"""An engine that asks an endpoint over HTTP: for evaluation, for generating, never for training.

It gives no log-probs and takes no weights. Requests wait in one queue for `concurrency` threads;
an endpoint that refuses one, or stays away after all retries, stops the run, and what was answered
by then is in the cache.

    engine = HttpEngine(ChatClient(config.rollout.http), endpoint_family(config.rollout.http.url))
"""

from __future__ import annotations

import queue
import threading
from typing import Any, Literal

import numpy as np

from saccade.endpoint.apis import Answer
from saccade.endpoint.client import ChatClient
from saccade.engines import Capabilities
from saccade.errors import ConfigError, SaccadeError
from saccade.models.families import Family
from saccade.types import Completion, Request

SEED_BITS = 31  # what every server takes
GLANCE = 0.05  # seconds that poll waits for an answer


class HttpEngine:
    version = 0

    def __init__(self, client: ChatClient, family: Family) -> None:
        self.client, self._texts = client, family.chat.tokenizer
        self._waiting: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[str, Answer | BaseException]] = queue.SimpleQueue()
        self._open: set[str] = set()
        self._aborted: list[Completion] = []
        # Daemons: what still waits must not keep an interrupted run alive.
        self._workers = [
            threading.Thread(target=self._work, name=f"http-{i}", daemon=True)
            for i in range(client.http.concurrency)
        ]
        for worker in self._workers:
            worker.start()

    def _work(self) -> None:
        while (request := self._waiting.get()) is not None:
            if request.key not in self._open:
                continue
            try:
                seed = request.noise & ((1 << SEED_BITS) - 1)
                answer = self.client.ask(request.messages, request.sampling, seed)
            except BaseException as error:  # raised again where the engine is polled
                self._answers.put((request.key, _about(request, error)))
            else:
                self._answers.put((request.key, answer))

    # -- the protocol --

    def submit(self, request: Request) -> None:
        assert request.messages, f"request {request.key} has no messages to send"
        self._open.add(request.key)
        self._waiting.put(request)

    def poll(self) -> list[Completion]:
        done, self._aborted = self._aborted, []
        wait = bool(self._open) and not done
        while not self._answers.empty() or wait:
            try:
                key, answer = self._answers.get(timeout=GLANCE)
            except queue.Empty:
                break
            wait = False
            if key not in self._open:  # it was aborted
                continue
            if isinstance(answer, BaseException):
                self.close()
                raise answer
            self._open.remove(key)
            ids = self._texts.record(answer.text, tokens=answer.usage.response)
            done.append(_completion(key, ids, answer.finish))
        return done

    @property
    def pending(self) -> int:
        return len(self._open) + len(self._aborted)

    def abort(self, key: str) -> None:
        if key in self._open:
            self._open.remove(key)
            self._aborted.append(_completion(key, np.zeros(0, np.int64), "aborted"))

    def release(self, episode: str) -> None:
        pass

    def update_weights(self, source: Any, version: int) -> None:
        raise ConfigError(
            "rollout.engine: an endpoint takes no weights, so http only evaluates; "
            "try rollout.engine=embedded"
        )

    def sleep(self) -> None:
        pass

    def wake(self) -> None:
        pass

    def capabilities(self) -> Capabilities:
        return Capabilities(
            logprobs=False, support=False, shares_weights=False, live_episodes=False
        )

    def close(self) -> None:
        """Sends nothing more, but waits for answers under way: they are paid for and are cached."""
        self._open.clear()
        self.client.stop()
        for _ in self._workers:
            self._waiting.put(None)
        for worker in self._workers:
            worker.join(self.client.http.timeout)


def _completion(
    key: str, ids: np.ndarray, finish: Literal["stop", "length", "aborted"]
) -> Completion:
    return Completion(
        key=key,
        ids=ids,
        logprobs=np.full(len(ids), np.nan, np.float32),
        versions=np.zeros(len(ids), np.int32),
        finish=finish,
    )


def _about(request: Request, error: BaseException) -> BaseException:
    return type(error)(f"{request.key}: {error}") if isinstance(error, SaccadeError) else error
