"""An engine that asks an endpoint over HTTP: for evaluation, for generating, never for training.

It gives no log-probs and takes no weights; `concurrency` threads ask. Where the endpoint refuses a
request, or stays away after all retries, that is an error of this request: the caller of `poll` decides
whether to go on without it.

    engine = HttpEngine(ChatClient(config.rollout.http), endpoint_family(config.rollout.http.url))
"""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from saccade.engines import Capabilities, Engine, Settings, nothing_sampled
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
        self._threads = ThreadPoolExecutor(client.http.concurrency, thread_name_prefix="http")
        self._open: dict[str, Future[Answer]] = {}
        self._done: list[Completion] = []

    @property
    def model_name(self) -> str:
        return self.client.model

    def expenses(self) -> str:
        """What was asked and what that cost."""
        return self.client.expenses()

    # -- the protocol --

    def submit(self, request: Request) -> None:
        assert request.messages, f"request {request.key} has no messages to send"
        seed = request.noise & ((1 << SEED_BITS) - 1)
        self._open[request.key] = self._threads.submit(self.client.ask, request.messages, request.sampling, seed)

    def poll(self) -> list[Completion]:
        """Raises what became of a request instead of an answer; others come with the next call."""
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
            self._done.append(nothing_sampled(key))

    def update_weights(self, source: Any, version: int) -> None:
        why = "an endpoint takes no weights, so http only evaluates"
        raise ConfigError(f"rollout.engine: {why}; try rollout.engine=embedded")

    def capabilities(self) -> Capabilities:
        return Capabilities(logprobs=False)

    def close(self) -> None:
        """Sends nothing more, but waits for answers under way: they are paid for and are cached."""
        self._open.clear()
        self.client.stop()
        self._threads.shutdown(cancel_futures=True)
