"""An engine that calls an HTTP endpoint: for evaluation and `generate`, never for training.

It returns no log-probs and takes no weights; `concurrency` threads send requests. If the endpoint refuses
a request, or does not answer after all retries, `poll` raises an error for this request, and its caller
decides whether to go on without it.

    engine = HttpEngine(ChatClient(config.rollout.http), endpoint_family(config.rollout.http.url))
"""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from saccade.engines import Capabilities, Engine, Settings, empty_completion
from saccade.errors import ConfigError, SaccadeError
from saccade.models.families import Family
from saccade.plugins.judges.http_client.chat_client import Answer, ChatClient
from saccade.types import Completion, Request

SEED_BITS = 31  # of a seed that every server accepts
GLANCE = 0.05  # seconds that poll waits for an answer


def from_settings(settings: Settings, family: Family, *, beside_trainer: bool = False) -> HttpEngine:
    return HttpEngine(ChatClient(settings.http, fields=settings.args), family)


class HttpEngine(Engine):
    version = 0

    def __init__(self, client: ChatClient, family: Family) -> None:
        self.client, self._texts = client, family.chat.tokenizer
        self._threads = ThreadPoolExecutor(client.http.concurrency, thread_name_prefix="http")
        self._open: dict[str, Future[Answer]] = {}
        self._done: list[Completion] = []

    @property
    def model_name(self) -> str:
        return self.client.model

    def expenses(self) -> str:
        """The numbers of requests, cached answers and tokens, and their cost, as text."""
        return self.client.expenses()

    # -- the protocol --

    def submit(self, request: Request) -> None:
        assert request.messages, f"request {request.key} has no messages to send"
        seed = request.noise & ((1 << SEED_BITS) - 1)
        self._open[request.key] = self._threads.submit(self.client.ask, request.messages, request.sampling, seed)

    def poll(self) -> list[Completion]:
        """Raises the error of a request that failed; the next call returns the others."""
        if self._open and not self._done:
            wait(self._open.values(), timeout=GLANCE, return_when=FIRST_COMPLETED)
        for key in [key for key, asked in self._open.items() if asked.done()]:
            try:
                answer = self._open.pop(key).result()
            except SaccadeError as error:
                wrapped = type(error)(f"{key}: {error}")
                wrapped.request = key
                raise wrapped from error
            ids = self._texts.record(answer.text, tokens=answer.usage["response"])
            unknown, zeros = np.full(len(ids), np.nan, np.float32), np.zeros(len(ids), np.int32)
            self._done.append(Completion(key=key, ids=ids, logprobs=unknown, versions=zeros, finish=answer.finish))
        finished, self._done = self._done, []
        return finished

    @property
    def pending(self) -> int:
        return len(self._open) + len(self._done)

    def abort(self, key: str) -> None:
        if asked := self._open.pop(key, None):
            asked.cancel()
            self._done.append(empty_completion(key))

    def update_weights(self, source: Any, version: int) -> None:
        why = "an endpoint takes no weights, so http only evaluates"
        raise ConfigError(f"rollout.engine: {why}; try rollout.engine=embedded")

    def capabilities(self) -> Capabilities:
        return Capabilities(logprobs=False)

    def close(self) -> None:
        """Send nothing more, but wait for answers in flight: they are paid for and will be cached."""
        self._open.clear()
        self.client.stop()
        self._threads.shutdown(cancel_futures=True)
