"""Asks an endpoint and waits for its answer, from any thread: paced, retried, cached, counted.

What may pass (429, 5xx, no connection, no answer in time, an answer that cannot be read) is tried
again with growing, random pauses; what may not (any other 4xx) is raised with the server's own
words. Knows nothing of engines or episodes, so a judge can use it as it is.

    client = ChatClient(HttpConfig(url="http://127.0.0.1:8000/v1"))
    client.ask([Message(role="user", parts=("2 + 2?",))], Sampling(temperature=0), seed=0).text
"""

from __future__ import annotations

import http.client
import json
import math
import os
import random
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, TypeVar

from saccade.endpoint.apis import APIS, Answer
from saccade.endpoint.cache import AnswerCache, key_of
from saccade.endpoint.opener import opener_for
from saccade.endpoint.pictures import Pictures
from saccade.errors import ConfigError, EnvironmentProblem
from saccade.schema import HttpConfig
from saccade.types import Media, Message, Sampling

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0  # seconds before another attempt
LONGEST_HOLD = 300.0  # that an endpoint may ask for
PIECE = 1 << 16  # bytes of a reply between two looks at the clock
PASSING = (408, 409, 425, 429)
QUOTED = 500  # characters of what a server says
OFF = "off"  # in the place of a cache's folder
T = TypeVar("T")

# What a refusal tells of our own options, and what would help.
MENDS: Mapping[int, tuple[str, str]] = {
    401: ("key", "let it name an environment variable that holds a valid key"),
    403: ("key", "let it name an environment variable whose key may use this model"),
    404: ("url", "give the address up to /v1, and in model a name that the endpoint lists"),
    413: ("url", "the request is too large there; lower data.max_pixels"),
}


class Reply(NamedTuple):
    status: int  # 0: there was none
    text: str
    hold: float = 0.0  # seconds that the endpoint wants to be left alone


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
        self,
        http: HttpConfig,
        *,
        fields: Mapping[str, Any] | None = None,
        section: str = "rollout.http",
    ) -> None:
        """`fields` go into every request as they are, null removes one; `section` is where errors
        say that the options stand.
        """
        self.http, self.section, self._fields = http, section, dict(fields or {})
        self.counters = Counters()
        self._api = APIS[http.api]
        self._key = key_from(http, section)
        self._pictures = Pictures()
        self._cache = AnswerCache(http.cache) if http.cache not in (None, "", OFF) else None
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._next = 0.0  # when the next request may start
        self._opener = opener_for(http.url)
        self.model = http.model or self._only_model()

    def ask(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        seed: int,
        *,
        until: float = math.inf,
    ) -> Answer:
        """`until` is when all attempts and pauses must be over, on the monotonic clock."""
        asked = self._body(messages, sampling, seed, _named)
        asked = {"url": self.http.url, "api": self.http.api, "seed": seed, "body": asked}
        key = key_of(asked)
        answer = self._cache.get(key) if self._cache else None
        if answer is not None:
            self._count(cached=1)
            return answer
        body = self._body(messages, sampling, seed, self._pictures)
        answer = self._send(
            "POST", self._api.path, body, lambda r: self._api.answer(r, sampling), until
        )
        usage = answer.usage
        self._count(
            prompt_tokens=usage.prompt,
            response_tokens=usage.response,
            estimated=int(usage.estimated),
        )
        if self._cache:
            self._cache.put(key, asked, answer)
        return answer

    def stop(self) -> None:
        """Whoever waits for a turn or for another attempt gives up."""
        self._stopped.set()

    def _body(self, messages: Any, sampling: Sampling, seed: int, picture: Any) -> dict[str, Any]:
        body = {"model": self.model, **self._api.body(messages, sampling, seed, picture)}
        return {name: v for name, v in (body | self._fields).items() if v is not None}

    def models(self) -> list[str]:
        return self._send("GET", "/models", None, lambda r: [m["id"] for m in r["data"]])

    def _only_model(self) -> str:
        names = self.models()
        if len(names) != 1:
            raise ConfigError(
                f"{self.section}.model: {self.http.url} has {', '.join(names) or 'no model'}; "
                "name one of them"
            )
        return names[0]

    # -- sending --

    def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        read: Callable[[Any], T],
        until: float = math.inf,
    ) -> T:
        data = None if body is None else json.dumps(body).encode()
        for attempt in range(self.http.retries + 1):
            self._turn(until)
            self._count(sent=1, repeated=int(attempt > 0))
            reply = self._exchange(method, path, data, until)
            problem = f"status {reply.status}" if reply.status else "no reply"
            if reply.status == 200:
                try:
                    return read(json.loads(reply.text))
                except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
                    problem = f"an answer that cannot be read ({error!r})"
            elif 0 < reply.status < 500 and reply.status not in PASSING:
                raise self._refusal(reply)
            if attempt < self.http.retries:
                self._pause(attempt, reply.hold, until)
        raise EnvironmentProblem(
            f"{self.section}.url: {self.http.url} gave no answer in {self.http.retries + 1} "
            f"attempts, at last {problem}: {self._quoted(reply.text)}; see that it runs, or raise "
            f"{self.section}.retries or {self.section}.timeout"
        )

    def _exchange(self, method: str, path: str, data: bytes | None, until: float) -> Reply:
        headers = {"Content-Type": "application/json", **self._api.headers(self._key)}
        request = urllib.request.Request(
            self.http.url.rstrip("/") + path, data=data, headers=headers, method=method
        )
        now = time.monotonic()
        until = min(until, now + self.http.timeout)
        try:
            with self._opener.open(request, timeout=max(until - now, 0.001)) as response:
                text = _content(response, until).decode("utf-8", "replace")
                hold = _seconds(response.headers.get("Retry-After"))
                return Reply(response.status, text, hold)
        except (OSError, http.client.HTTPException) as error:
            return Reply(0, f"{type(error).__name__}: {error}")

    def _refusal(self, reply: Reply) -> ConfigError:
        words, field = _words(reply.text)
        option, mend = MENDS.get(reply.status, ("url", "change what it names"))
        about = f" about {field!r}" if field else ""
        return ConfigError(
            f"{self.section}.{option}: {self.http.url} refuses the request with status "
            f"{reply.status}{about}: {self._quoted(words)}; {mend}"
        )

    def _quoted(self, text: str) -> str:
        """Some servers repeat the key in what they say."""
        return (text.replace(self._key, "***") if self._key else text)[:QUOTED]

    # -- time --

    def _turn(self, until: float) -> None:
        gap = 60 / self.http.per_minute if self.http.per_minute else 0.0
        with self._lock:
            start = max(time.monotonic(), self._next)
            if start < until:  # else nothing is sent
                self._next = start + gap
        self._wait(start - time.monotonic(), until)

    def _pause(self, attempt: int, hold: float, until: float) -> None:
        with self._lock:  # a hold is asked of everybody, not only of this thread
            self._next = max(self._next, time.monotonic() + min(hold, LONGEST_HOLD))
        longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt)
        self._wait(longest * random.uniform(0.5, 1), until)

    def _wait(self, seconds: float, until: float) -> None:
        if time.monotonic() + seconds >= until:
            raise EnvironmentProblem(
                f"{self.section}.url: {self.http.url} gave no answer in time; see that it runs, or "
                f"raise {self.section}.deadline"
            )
        if self._stopped.wait(max(0.0, seconds)):
            raise EnvironmentProblem(f"{self.section}.url: stopped before it was asked")

    def _count(self, **added: int) -> None:
        with self._lock:
            for name, value in added.items():
                setattr(self.counters, name, getattr(self.counters, name) + value)


def key_from(http: HttpConfig, section: str = "rollout.http") -> str:
    if not http.key:
        return ""
    if not os.environ.get(http.key):  # its value may be a key by mistake, so it is not repeated
        raise ConfigError(
            f"{section}.key: no environment variable of that name is set; give the name of one "
            f"that holds the key, such as {section}.key=OPENAI_API_KEY"
        )
    return os.environ[http.key].strip()


def _content(response: Any, until: float) -> bytes:
    """All of a reply. The timeout of a socket starts anew with every byte, this one does not."""
    pieces = []
    while piece := response.read1(PIECE):
        pieces.append(piece)
        if time.monotonic() > until:
            raise TimeoutError("the reply took too long")
    return b"".join(pieces)


def _named(media: Media) -> tuple[str, str]:
    return "image", "/".join(map(str, media.key))


def _words(text: str) -> tuple[str, str]:
    """What a server says and the field that it names, whatever form it gives them."""
    try:
        said: Any = json.loads(text)
    except ValueError:
        return text, ""
    error = said.get("error", said) if isinstance(said, dict) else said
    if not isinstance(error, dict):
        return str(error), ""
    words = error.get("message") or error.get("detail") or error
    return str(words), str(error.get("param") or "")


def _seconds(header: str | None) -> float:
    """Of Retry-After: a number of seconds, or a date."""
    if not header:
        return 0.0
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        moment = parsedate_to_datetime(header)
    except ValueError:
        return 0.0
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return max(0.0, (moment - datetime.now(timezone.utc)).total_seconds())
