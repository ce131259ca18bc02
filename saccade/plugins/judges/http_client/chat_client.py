"""Asks an endpoint and waits for its answer, from any thread: sent and retried by a `Sender`,
cached, counted. Knows nothing of engines or episodes, so a judge can use it as it is.

    client = ChatClient(HttpConfig(url="http://127.0.0.1:8000/v1"))
    client.ask([Message(role="user", parts=("2 + 2?",))], Sampling(temperature=0), seed=0).text
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saccade.config.schema import HttpConfig
from saccade.errors import ConfigError
from saccade.plugins.judges.http_client.answer_cache import AnswerCache, key_of
from saccade.plugins.judges.http_client.chat_api import APIS, Answer, Picture, read_answer, settings
from saccade.plugins.judges.http_client.pictures import Pictures
from saccade.plugins.judges.http_client.sender import Sender, Target, key_from
from saccade.types import Media, Message, Sampling

OFF = "off"  # in the place of a cache's folder
LIMITED_BY = {"rollout.http": "rollout"}  # where answers have their limit, if elsewhere


@dataclass(kw_only=True)
class Counters:
    sent: int = 0
    repeated: int = 0
    cached: int = 0
    prompt_tokens: int = 0  # of answers that were sent for, as are those below
    response_tokens: int = 0
    estimated: int = 0  # answers without a count of their tokens

    def describe(self, price: tuple[float, float] | None) -> str:
        text = f"{self.sent} requests sent ({self.repeated} of them again), {self.cached} answers "
        text += f"from the cache; {self.prompt_tokens} prompt and {self.response_tokens} "
        text += "response tokens"
        if price is not None:
            cost = (self.prompt_tokens * price[0] + self.response_tokens * price[1]) / 1e6
            text += f", cost {cost:.4f}"
        if self.estimated:
            text += f"; the endpoint counted no tokens of {self.estimated} answers: estimated"
        return text


class ChatClient:
    def __init__(
        self, http: HttpConfig, *, fields: Mapping[str, Any] | None = None, section: str = "rollout.http"
    ) -> None:
        """`fields` go into every request as they are, null removes one; `section` is where errors
        say that the options stand.
        """
        self.http, self.section, self._fields = http, section, dict(fields or {})
        self.counters = Counters()
        self._api = APIS[http.api]
        self._pictures = Pictures()
        self._cache = AnswerCache(http.cache) if http.cache not in (None, "", OFF) else None
        self._lock = threading.Lock()
        target = Target(
            urls=[http.url],
            section=section,
            retries=http.retries,
            timeout=http.timeout,
            per_minute=http.per_minute,
            key=key_from(http.key, f"{section}.key", example="OPENAI_API_KEY"),
            options={"model": f"{section}.model", "max_tokens": f"{LIMITED_BY.get(section, section)}.max_tokens"},
        )
        self._sender = Sender(target, lambda again: self._count(sent=1, repeated=int(again)))
        self.model = http.model or self._only_model()

    def ask(self, messages: Sequence[Message], sampling: Sampling, seed: int, *, until: float = math.inf) -> Answer:
        """`until` is when all attempts and pauses must be over, on the monotonic clock."""
        asked = self._body(messages, sampling, seed, _named)
        asked = {"url": self.http.url, "api": self.http.api, "seed": seed, "body": asked}
        key = key_of(asked)
        answer = self._cache.get(key) if self._cache else None
        if answer is not None:
            self._count(cached=1)
            return answer
        body = self._body(messages, sampling, seed, self._pictures)
        answer = self._sender.send(
            "POST", self._api.path, body, lambda reply: read_answer(self._api, reply, sampling), until
        )
        usage = answer.usage
        self._count(prompt_tokens=usage.prompt, response_tokens=usage.response, estimated=int(usage.estimated))
        if self._cache:
            self._cache.put(key, asked, answer)
        return answer

    def stop(self) -> None:
        """Whoever waits for a turn or for another attempt gives up."""
        self._sender.stop()

    def _body(self, messages: Sequence[Message], sampling: Sampling, seed: int, picture: Picture) -> dict[str, Any]:
        body = {"model": self.model, **self._api.body(messages, picture)}
        body |= settings(sampling, seed) | self._fields
        return {name: value for name, value in body.items() if value is not None}

    def models(self) -> list[str]:
        return self._sender.send("GET", "/models", None, lambda r: [m["id"] for m in r["data"]])

    def _only_model(self) -> str:
        names = self.models()
        if len(names) != 1:
            raise ConfigError(
                f"{self.section}.model: {self.http.url} has {', '.join(names) or 'no model'}; name one of them"
            )
        return names[0]

    def _count(self, **added: int) -> None:
        with self._lock:
            for name, value in added.items():
                setattr(self.counters, name, getattr(self.counters, name) + value)


def _named(media: Media) -> tuple[str, str]:
    return "image", "/".join(map(str, media.key))
