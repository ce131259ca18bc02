"""What every server here does with HTTP: token, limits, routes, JSON in and out, refusals.

Listens on loopback unless told otherwise, and asks for a token. Without one it answers requests
that name a loopback host only, so a page from elsewhere that points its own name here gets nothing.
Knows nothing of what is served.

    server = open_server(partial(Handler, service), "127.0.0.1", 8000, token=service.gate.token)
"""

from __future__ import annotations

import hmac
import json
import logging
import math
import os
import re
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from saccade.errors import ConfigError, EnvironmentProblem

TOKEN = "SACCADE_TOKEN"
LOOPBACK = ("127.0.0.1", "localhost")
LOOPBACK_NAME = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?")
METHODS = "GET, HEAD, POST, OPTIONS"
PIECE = 2**16
DIGITS = 15  # of a Content-Length
DRAINED = 2**30  # bytes of a refused request that are taken, so that its client reads why
SILENCE = 60  # seconds that a client may take to send its request
BACKLOG = 1024  # connections that wait to be accepted
SAFE = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data:; connect-src 'self'",
}


class BadRequest(Exception):
    def __init__(
        self,
        field: str | None,
        reason: str,
        *,
        status: int = 400,
        code: str = "",
        hold: float = 0.0,
    ) -> None:
        """`hold`: seconds after which the client may come back."""
        super().__init__(f"{field}: {reason}" if field else reason)
        self.field, self.status, self.code, self.hold = field, status, code, hold


class Room:
    """Bytes of requests that may be in memory at once."""

    def __init__(self, size: int) -> None:
        self._free, self._lock = size, threading.Lock()

    def take(self, size: int) -> bool:
        with self._lock:
            fits = size <= self._free
            self._free -= size * fits
        return fits

    def give(self, size: int) -> None:
        with self._lock:
            self._free += size


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Who may ask, and how much."""

    token: str  # empty: none is asked for
    largest_body: int = 64 * 2**20
    public: tuple[str, ...] = ()  # paths that hold no secret
    room: Room | None = None  # None: as much as comes


def make_token(host: str, *, wanted: bool) -> str:
    """SACCADE_TOKEN, or a new one; empty where none is wanted and only this machine can ask."""
    if not wanted and host not in LOOPBACK:
        raise ConfigError(
            f"--no-token: {host} can be reached from other machines; leave the option out, or use "
            "--host 127.0.0.1"
        )
    return (os.environ.get(TOKEN) or secrets.token_urlsafe(24)) if wanted else ""


def shown_token(token: str) -> str:
    """For the screen, which may be a log: who chose a token knows it."""
    return f"${TOKEN}" if token == os.environ.get(TOKEN) else token


class Server(ThreadingHTTPServer):
    """A thread for each client; one that leaves is no news."""

    daemon_threads = True
    request_queue_size = BACKLOG

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            logging.getLogger("saccade").exception("a request of %s failed", client_address)


def open_server(handler: Callable[..., Any], host: str, port: int, *, token: str) -> Server:
    """Bound to the address; port 0 takes a free one."""
    assert token or host in LOOPBACK, "without a token only loopback is served"
    try:
        return Server((host, port), handler)
    except OSError as error:
        raise EnvironmentProblem(
            f"--port {port}: {host} cannot be listened on there: {error.strerror}; try --port 0 "
            "for any free port"
        ) from None


class JsonHandler(BaseHTTPRequestHandler):
    """The library's own way to write a handler is a class to build on; this is ours."""

    protocol_version = "HTTP/1.1"
    timeout = SILENCE
    gate: Gate
    body: bytes
    replied: bool  # whether a reply has begun

    def log_message(self, *args: Any) -> None:
        pass

    @property
    def asked(self) -> str:
        """The path, without what would follow it."""
        return self.path.partition("?")[0].rstrip("/") or "/"

    def do_HEAD(self) -> None:
        """As GET, whose body is left out in `send_data`."""
        self.do_GET()  # type: ignore[attr-defined]

    def do_OPTIONS(self) -> None:
        """For whoever may ask, without a word that would let pages from elsewhere in."""
        self.close_connection = True  # what else it sends is not read
        problem = None if self.gate.token else self._against(self.asked)
        if problem is not None:
            self.fail(problem)
        else:
            self.send_head(204, {"Allow": METHODS, "Connection": "close"})

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the library refuses by itself: it would answer in HTML."""
        self.close_connection = True
        self.fail(BadRequest(None, message or HTTPStatus(code).phrase, status=code))

    def route(self, routes: Mapping[str, Callable[[], None]]) -> None:
        path = self.asked
        self.replied = False
        try:
            try:
                length = self._length()
                self._admit(path, length)
                with self._room(length):
                    # In any case, or the next request would begin inside this one.
                    self.body = self.rfile.read(length)
                    if path not in routes:
                        raise BadRequest(None, f"{path} is not served here", status=404)
                    routes[path]()
            except BadRequest as problem:
                self.fail(problem)
        except (ConnectionError, TimeoutError):  # the client has left
            self.close_connection = True
        except Exception as error:  # no fault of the client, who is told in any case
            logging.getLogger("saccade").exception("%s failed", path)
            self.close_connection = True
            if not self.replied:
                self.send_json(500, {"error": f"{type(error).__name__}: {error}"})

    def read_json(self) -> dict[str, Any]:
        # A page from elsewhere cannot send this type without being allowed to.
        if self.headers.get_content_type() != "application/json":
            raise BadRequest(None, "send Content-Type: application/json", status=415)
        try:
            body = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise BadRequest(None, f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise BadRequest(None, "the body must be a record")
        return body

    def fail(self, problem: BadRequest) -> None:
        self.send_json(problem.status, {"error": str(problem)}, hold=problem.hold)

    def send_json(self, status: int, value: Mapping[str, Any], *, hold: float = 0.0) -> None:
        more = {"Retry-After": str(math.ceil(hold))} if hold else {}
        self.send_data(status, json.dumps(value).encode(), "application/json", more)

    def send_data(
        self, status: int, data: bytes, kind: str, more: Mapping[str, str] | None = None
    ) -> None:
        head = {"Content-Type": kind, "Content-Length": str(len(data))}
        self.send_head(status, {**head, **(more or {})})
        if self.command != "HEAD":
            self.wfile.write(data)

    def send_head(self, status: int, head: Mapping[str, str]) -> None:
        self.replied = True
        self.send_response(status)
        for name, value in {**head, **SAFE}.items():
            self.send_header(name, value)
        self.end_headers()

    def _admit(self, path: str, length: int) -> None:
        problem = self._against(path)
        if problem is None and length > self.gate.largest_body:
            most = self.gate.largest_body >> 20
            problem = BadRequest(None, f"more than {most} MiB", status=413)
        if problem is not None:
            self._turn_away(problem, length)

    @contextmanager
    def _room(self, length: int) -> Iterator[None]:
        room = self.gate.room
        if room is not None and not room.take(length):
            busy = BadRequest(None, "come back later: memory is full", status=429, hold=1.0)
            self._turn_away(busy, length)
        try:
            yield
        finally:
            self.body = b""
            if room is not None:
                room.give(length)

    def _turn_away(self, problem: BadRequest, length: int) -> None:
        self.close_connection = True
        self.fail(problem)
        # A client reads why only when it has sent all; nothing of it is kept.
        length = min(length, DRAINED)
        while length > 0 and (piece := self.rfile.read(min(length, PIECE))):
            length -= len(piece)
        raise ConnectionAbortedError

    def _against(self, path: str) -> BadRequest | None:
        token = self.gate.token
        if not token:
            if not LOOPBACK_NAME.fullmatch(self.headers.get("Host", "")):
                return BadRequest(None, "this server speaks to its own machine only", status=403)
        elif path not in self.gate.public:
            given = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
            if not hmac.compare_digest(given.encode(), token.encode()):
                return BadRequest(
                    None, "wrong or missing token", status=401, code="invalid_api_key"
                )
        return None

    def _length(self) -> int:
        length = self.headers.get("Content-Length", "0")
        if not length.isdecimal() or self.headers.get("Transfer-Encoding"):
            self.close_connection = True
            raise BadRequest(None, "send a Content-Length", status=411)
        if len(length) > DIGITS:  # before it is made a number, which takes its time
            self.close_connection = True
            raise BadRequest(None, f"Content-Length: more than {DIGITS} digits")
        return int(length)
