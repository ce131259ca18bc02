"""Sends HTTP requests to a server, or to one of several equivalent servers, with rate limits and retries; and a queue
whose threads send one job or a batch at a time.

Temporary failures (429, 5xx, no connection, a timeout, an unreadable answer) are retried with growing, random pauses;
permanent ones (any other 4xx) are raised with the server's message. Knows nothing of the content of requests. One
object serves many threads.

    sender = Sender(Target(urls=["http://127.0.0.1:8000/v1"], section="rollout.http"))
    sender.send("GET", "/models", None, lambda reply: reply["data"])
"""

from __future__ import annotations

import json
import math
import os
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import numpy as np

from saccade.errors import ConfigError, EnvironmentProblem

if TYPE_CHECKING:
    import httpx2  # imported on use: a run without HTTP services does not need it


FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before another attempt
MAX_RETRY_AFTER = 300.0  # seconds of a Retry-After that are respected
RETRYABLE = (408, 409, 425, 429)  # temporary failures below 500
BUSY = (429, 503)  # with a Retry-After: the server works, but accepts no more requests now
QUOTED = 500  # characters of a server's message in errors
LOOPBACK = ("127.0.0.1", "localhost", "::1")
T = TypeVar("T")
Body = Mapping[str, Any] | bytes | None  # of a request

# By status: the option that is likely wrong, and what would help.
HINTS: Mapping[int, tuple[str, str]] = {
    401: ("key", "let it name an environment variable that holds a valid key"),
    403: ("key", "let it name an environment variable whose key may use this model"),
    404: ("url", "give the address up to /v1, and in model a name that the endpoint lists"),
    413: ("url", "the request is too large there; lower data.max_pixels"),
}


class Reply(NamedTuple):
    status: int  # 0: no reply
    text: str
    retry_after: float = 0.0  # seconds of its Retry-After


class Target(NamedTuple):
    """Servers, limits, and what error messages need."""

    urls: Sequence[str]
    section: str  # config section of the options, for errors
    retries: int = 5
    timeout: float = 120.0
    per_minute: int = 0
    key: str = ""  # never shown in errors
    hints: Mapping[int, tuple[str, str]] = HINTS
    options: Mapping[str, str] = {}  # by request field: the option that sets it, for errors that name the field
    waits_if_busy: bool = False  # a BUSY reply with Retry-After does not count as an attempt, only against the deadline


def http_client(url: str, key: str = "") -> httpx2.Client:
    """A client that follows no redirects, which would send the key to another server, and that uses no
    proxy for servers on this machine."""
    import httpx2

    parts = urlsplit(url)
    head = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx2.Client(
        headers={"Content-Type": "application/json", **head},
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=20),
        trust_env=parts.hostname not in LOOPBACK,
        verify=parts.scheme == "https",  # http loads no certificates
    )


class Sender:
    def __init__(self, target: Target, on_send: Callable[[bool], None] = lambda again: None) -> None:
        """`on_send(again)` is called for every request; `again`: whether it is a retry."""
        self.target, self._on_send = target, on_send
        self._gap = 60 / target.per_minute if target.per_minute else 0.0
        self._clients = {url: http_client(url, target.key) for url in target.urls}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._next = dict.fromkeys(target.urls, 0.0)  # time at which the next request to it may start
        self._under_way = dict.fromkeys(target.urls, 0)

    def stop(self) -> None:
        """Calls that wait to send or to retry raise an error."""
        self._stopped.set()

    def send(self, method: str, path: str, body: Body, read: Callable[[Any], T], until: float = math.inf) -> T:
        """Send a request and return read(reply). `until`: deadline of all attempts and pauses, on the
        monotonic clock.
        """
        data = json.dumps(body).encode() if isinstance(body, Mapping) else body
        attempt, again = 0, False
        url = self._least_busy(self.target.urls)
        while True:
            try:
                self._wait_for_slot(url, until)
                self._on_send(again)
                reply = self._exchange(method, url, path, data, until)
            finally:
                with self._lock:
                    self._under_way[url] -= 1
            problem = f"status {reply.status}" if reply.status else "no reply"
            if reply.status == 200:
                try:
                    return read(json.loads(reply.text))
                except (ValueError, LookupError, TypeError, AttributeError) as error:
                    problem = f"an answer that cannot be read ({error!r})"
            elif 0 < reply.status < 500 and reply.status not in RETRYABLE:
                raise self.refusal(url, reply)
            busy = self.target.waits_if_busy and reply.status in BUSY and reply.retry_after > 0
            if not busy and attempt == self.target.retries:
                raise self._no_reply_error(url, problem, reply)
            self._pause(url, attempt, reply.retry_after, until)
            again, attempt = True, attempt + (not busy)
            # A server that replied may have begun the work, so it is asked again; otherwise ask another.
            others = [other for other in self.target.urls if other != url]
            url = self._least_busy(others if others and reply.status in (0, 503) else [url])

    def reach(self, url: str, until: float) -> Reply:
        """The reply to a GET, whatever its status; retried only while there is no reply."""
        for attempt in range(self.target.retries + 1):
            self._wait_for_slot(url, until)
            reply = self._exchange("GET", url, "", None, until)
            if reply.status:
                return reply
            if attempt < self.target.retries:
                self._pause(url, attempt, 0.0, until)
        raise self._no_reply_error(url, "no reply", reply)

    def refusal(self, url: str, reply: Reply) -> ConfigError:
        words, named = _error_of(reply.text)
        option, hint = self.target.hints.get(reply.status, ("url", "change what it names"))
        where = self.target.options.get(named, f"{self.target.section}.{option}")
        status = f"status {reply.status} about {named!r}" if named else f"status {reply.status}"
        return ConfigError(f"{where}: {url} refuses the request with {status}: {self._quoted(words)}; {hint}")

    def _no_reply_error(self, url: str, problem: str, reply: Reply) -> EnvironmentProblem:
        section, tried = self.target.section, self.target.retries + 1
        return EnvironmentProblem(
            f"{section}.url: {url} gave no answer in {tried} attempts, at last {problem}: {self._quoted(reply.text)}; "
            f"see that it runs, or raise {section}.retries or {section}.timeout"
        )

    def _quoted(self, text: str) -> str:
        """Truncate a server's message and remove the key, which some servers repeat."""
        key = self.target.key
        return (text.replace(key, "***") if key else text)[:QUOTED]

    def _least_busy(self, urls: Sequence[str]) -> str:
        with self._lock:
            url = min(urls, key=self._under_way.__getitem__)
            self._under_way[url] += 1
        return url

    def _exchange(self, method: str, url: str, path: str, data: bytes | None, until: float) -> Reply:
        import httpx2

        until = min(until, time.monotonic() + self.target.timeout)
        timeout = max(until - time.monotonic(), 0.001)
        try:
            with self._clients[url].stream(method, url.rstrip("/") + path, content=data, timeout=timeout) as response:
                content = bytearray()
                for piece in response.iter_bytes():
                    content += piece
                    if time.monotonic() > until:  # the client's own timeout restarts with each chunk
                        raise httpx2.ReadTimeout("the reply took too long")
                text = content.decode("utf-8", "replace")
                return Reply(response.status_code, text, seconds_of(response.headers.get("Retry-After", "0")))
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            return Reply(0, f"{type(error).__name__}: {error}")

    # -- time --

    def _wait_for_slot(self, url: str, until: float) -> None:
        with self._lock:
            start = max(time.monotonic(), self._next[url])
            if start < until:  # otherwise `_wait` raises and nothing is sent
                self._next[url] = start + self._gap
        self._wait(url, start - time.monotonic(), until)

    def _pause(self, url: str, attempt: int, retry_after: float, until: float) -> None:
        with self._lock:  # a Retry-After applies to all threads
            start = time.monotonic() + min(retry_after, MAX_RETRY_AFTER)
            self._next[url] = max(self._next[url], start)
        growing = FIRST_PAUSE * 2**attempt * random.uniform(1, 1.5)  # jitter, so that threads do not retry together
        self._wait(url, min(LONGEST_PAUSE, growing), until)

    def _wait(self, url: str, seconds: float, until: float) -> None:
        section = self.target.section
        if time.monotonic() + seconds >= until:
            helps = f"see that it runs, or raise {section}.deadline"
            raise EnvironmentProblem(f"{section}.url: {url} gave no answer in time; {helps}")
        if self._stopped.wait(max(0.0, seconds)):
            raise EnvironmentProblem(f"{section}.url: stopped before it was asked")


def key_from(variable: str, option: str, *, example: str) -> str:
    """The key in an environment variable; empty if none is named."""
    if not variable:
        return ""
    if not os.environ.get(variable):  # not quoted in the error: the user may have given the key itself
        helps = f"give the name of one that holds the key, such as {option}={example}"
        raise ConfigError(f"{option}: no environment variable of that name is set; {helps}")
    return os.environ[variable].strip()


def _error_of(text: str) -> tuple[str, str]:
    """The message of an error reply, and the request field that it names; accepts several formats."""
    try:
        said: Any = json.loads(text)
    except ValueError:
        said = text
    error = said.get("error", said) if isinstance(said, dict) else said
    if not isinstance(error, dict):
        return str(error), ""
    return str(error.get("message") or error.get("detail") or error), str(error.get("param") or "")


class RequestQueue:
    """A queue whose threads call `send` with up to `batch` jobs; it must not raise. A thread waits up to
    `gather` seconds for more jobs.
    """

    def __init__(self, send: Callable[[list[Any]], None], *, threads: int, batch: int = 1, gather: float = 0.0) -> None:
        self._send, self._batch, self._gather = send, batch, gather
        self._left = threads  # number that may still be started
        self._waiting: deque[Any] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._counts: Counter[str] = Counter()
        self._seconds: list[float] = []

    def put(self, job: Any) -> bool:
        """Add a job, from any thread; False if the queue is closed."""
        with self._changed:
            if self._closed:
                return False
            self._waiting.append(job)
            if self._left:  # daemon threads: pending jobs must not keep an interrupted run alive
                self._left -= 1
                threading.Thread(target=self._work, daemon=True).start()
            self._changed.notify()
            return True

    def close(self) -> list[Any]:
        """Close the queue and return the jobs that no thread has taken."""
        with self._changed:
            self._closed = True
            left, self._waiting = list(self._waiting), deque()
            self._changed.notify_all()
        return left

    def count(self, name: str, added: int = 1) -> int:
        """Add to a counter; returns its sum since the last `take_counts`."""
        with self._changed:
            self._counts[name] += added
            return self._counts[name]

    def timed(self, seconds: float) -> None:
        with self._changed:
            self._seconds.append(seconds)

    def take_counts(self) -> tuple[Counter[str], dict[str, float]]:
        """Counts, and median and 95th percentile of latencies (seconds), since the last call."""
        with self._changed:
            counts, self._counts = self._counts, Counter()
            seconds, self._seconds = self._seconds, []
        if not seconds:
            return counts, {}
        middle, slow = np.percentile(seconds, [50, 95])
        return counts, {"latency_p50": float(middle), "latency_p95": float(slow)}

    def _work(self) -> None:
        while not self._closed:
            if jobs := self._take():  # empty if another thread took them
                self._send(jobs)

    def _take(self) -> list[Any]:
        """The jobs of the next request, after up to `gather` seconds in which more may arrive."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._gather:
                self._changed.wait_for(lambda: len(self._waiting) >= self._batch or self._closed, self._gather)
            return [self._waiting.popleft() for _ in range(min(self._batch, len(self._waiting)))]


def seconds_of(header: str) -> float:
    """The seconds that a Retry-After header asks for, as a number or a date."""
    with suppress(ValueError):
        return max(0.0, float(header))
    with suppress(ValueError):
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    return 0.0
