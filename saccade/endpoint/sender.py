"""Sends requests to an endpoint, or to one of several that do the same: paced, retried, patient.

What may pass (429, 5xx, no connection, no answer in time, an answer that cannot be read) is tried
again with growing, random pauses; what may not (any other 4xx) is raised with the server's own
words. Knows nothing of what is asked. One object serves many threads.

    sender = Sender(["http://127.0.0.1:8000/v1"], section="rollout.http", retries=5, timeout=120)
    sender.send("GET", "/models", None, lambda reply: reply["data"])
"""

from __future__ import annotations

import http.client
import json
import math
import random
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, TypeVar

from saccade.endpoint.opener import opener_for
from saccade.errors import ConfigError, EnvironmentProblem

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before another attempt
LONGEST_HOLD = 300.0  # that an endpoint may ask for
PIECE = 1 << 16  # bytes of a reply between two looks at the clock
PASSING = (408, 409, 425, 429)
BUSY = (429, 503)  # with a Retry-After: it works, and wants no more for now
QUOTED = 500  # characters of what a server says
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


class Sender:
    def __init__(
        self,
        urls: Sequence[str],
        *,
        section: str,
        retries: int,
        timeout: float,
        per_minute: int = 0,
        key: str = "",
        headers: Mapping[str, str] | None = None,
        mends: Mapping[int, tuple[str, str]] = MENDS,
        options: Mapping[str, str] | None = None,
        patient: bool = False,
        on_send: Callable[[bool], None] = lambda again: None,
    ) -> None:
        """`section` is where errors say that the options stand; `key` is kept out of them.
        `options`: where a field that a server names is set here. `patient`: who says when to come
        back uses up no attempt, only the time of a request.
        """
        self.urls, self.section, self.retries, self.timeout = tuple(urls), section, retries, timeout
        self._gap = 60 / per_minute if per_minute else 0.0
        self._key, self._mends, self._patient, self._on_send = key, mends, patient, on_send
        self._options = options or {}
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._openers = {url: opener_for(url) for url in self.urls}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._next = dict.fromkeys(self.urls, 0.0)  # when the next request there may start
        self._under_way = dict.fromkeys(self.urls, 0)

    def stop(self) -> None:
        """Whoever waits for a turn or for another attempt gives up."""
        self._stopped.set()

    def send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | bytes | None,
        read: Callable[[Any], T],
        until: float = math.inf,
    ) -> T:
        """What `read` makes of the reply. All attempts and pauses are over at `until`, on the
        monotonic clock.
        """
        data = json.dumps(body).encode() if isinstance(body, Mapping) else body
        attempt, again = 0, False
        url = self._least_busy(self.urls)
        while True:
            try:
                self._turn(url, until)
                self._on_send(again)
                reply = self._exchange(method, url, path, data, until)
            finally:
                with self._lock:
                    self._under_way[url] -= 1
            problem = f"status {reply.status}" if reply.status else "no reply"
            if reply.status == 200:
                try:
                    return read(json.loads(reply.text))
                except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
                    problem = f"an answer that cannot be read ({error!r})"
            elif 0 < reply.status < 500 and reply.status not in PASSING:
                raise self.refusal(url, reply)
            busy = self._patient and reply.status in BUSY and reply.hold > 0
            if not busy and attempt == self.retries:
                break
            self._pause(url, attempt, reply.hold, until)
            again, attempt = True, attempt + (not busy)
            # Who gave an answer may have begun, so it is asked again; else another may be.
            silent = reply.status in (0, 503)
            url = self._least_busy(self.urls, but=url) if silent else self._least_busy([url])
        raise self._silence(url, problem, reply)

    def reach(self, url: str, until: float) -> Reply:
        """Whatever it replies to a GET; tried again only while nobody is there."""
        for attempt in range(self.retries + 1):
            self._turn(url, until)
            reply = self._exchange("GET", url, "", None, until)
            if reply.status:
                return reply
            if attempt < self.retries:
                self._pause(url, attempt, 0.0, until)
        raise self._silence(url, "no reply", reply)

    def _silence(self, url: str, problem: str, reply: Reply) -> EnvironmentProblem:
        return EnvironmentProblem(
            f"{self.section}.url: {url} gave no answer in {self.retries + 1} "
            f"attempts, at last {problem}: {self._quoted(reply.text)}; see that it runs, or raise "
            f"{self.section}.retries or {self.section}.timeout"
        )

    def _least_busy(self, urls: Sequence[str], but: str = "") -> str:
        with self._lock:
            others = [url for url in urls if url != but]
            url = min(others or urls, key=self._under_way.__getitem__)
            self._under_way[url] += 1
        return url

    def _exchange(
        self, method: str, url: str, path: str, data: bytes | None, until: float
    ) -> Reply:
        request = urllib.request.Request(
            url.rstrip("/") + path, data=data, headers=dict(self._headers), method=method
        )
        now = time.monotonic()
        until = min(until, now + self.timeout)
        try:
            with self._openers[url].open(request, timeout=max(until - now, 0.001)) as response:
                text = _content(response, until).decode("utf-8", "replace")
                hold = _seconds(response.headers.get("Retry-After"))
                return Reply(response.status, text, hold)
        except (OSError, http.client.HTTPException) as error:
            return Reply(0, f"{type(error).__name__}: {error}")

    def refusal(self, url: str, reply: Reply) -> ConfigError:
        words, field = _words(reply.text)
        option, mend = self._mends.get(reply.status, ("url", "change what it names"))
        where = self._options.get(field, f"{self.section}.{option}")
        about = f" about {field!r}" if field else ""
        return ConfigError(
            f"{where}: {url} refuses the request with status "
            f"{reply.status}{about}: {self._quoted(words)}; {mend}"
        )

    def _quoted(self, text: str) -> str:
        """Some servers repeat the key in what they say."""
        return (text.replace(self._key, "***") if self._key else text)[:QUOTED]

    # -- time --

    def _turn(self, url: str, until: float) -> None:
        with self._lock:
            start = max(time.monotonic(), self._next[url])
            if start < until:  # else nothing is sent
                self._next[url] = start + self._gap
        self._wait(url, start - time.monotonic(), until)

    def _pause(self, url: str, attempt: int, hold: float, until: float) -> None:
        with self._lock:  # a hold is asked of everybody, not only of this thread
            hold = time.monotonic() + min(hold, LONGEST_HOLD)
            self._next[url] = max(self._next[url], hold)
        self._wait(url, pause(attempt), until)

    def _wait(self, url: str, seconds: float, until: float) -> None:
        if time.monotonic() + seconds >= until:
            raise EnvironmentProblem(
                f"{self.section}.url: {url} gave no answer in time; see that it runs, or "
                f"raise {self.section}.deadline"
            )
        if self._stopped.wait(max(0.0, seconds)):
            raise EnvironmentProblem(f"{self.section}.url: stopped before it was asked")


def pause(attempt: int) -> float:
    """Seconds, longer each time, and never the same for all who wait."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt * random.uniform(1, 1.5))


def _content(response: Any, until: float) -> bytes:
    """All of a reply. The timeout of a socket starts anew with every byte, this one does not."""
    pieces = []
    while piece := response.read1(PIECE):
        pieces.append(piece)
        if time.monotonic() > until:
            raise TimeoutError("the reply took too long")
    return b"".join(pieces)


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
