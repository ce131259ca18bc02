"""HTTP shared by all our servers: token, size limits, JSON errors (FastAPI and uvicorn).

By default a server listens on loopback and requires a token. Without a token it answers only requests
whose Host header is a loopback name, which blocks DNS rebinding by web pages.

    app = json_app(Gate(token="sesame"), lambda problem: {"error": str(problem)})
    app.get("/health")(lambda: {"status": "ok"})
    with running(app, "127.0.0.1", 8000) as url: ...
"""

import hmac
import json
import logging
import math
import os
import re
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from saccade.errors import ConfigError, EnvironmentProblem
from saccade.plugins.judges.http_client.sender import LOOPBACK

T = TypeVar("T")
TOKEN = "SACCADE_TOKEN"
LOOPBACK_NAME = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?")
MAX_DRAINED = 2**30  # bytes of a refused request's body that are read, so that its client gets the reply
IDLE_TIMEOUT = 60  # seconds without sending or receiving after which a client is disconnected
BACKLOG = 1024  # connections that may wait to be accepted
GRACE = 5  # seconds for open replies when a server stops
QUOTED = 200  # characters of a wrong value that an error message shows
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'"
SAFE = [("X-Content-Type-Options", "nosniff"), ("Content-Security-Policy", POLICY)]


class BadRequest(Exception):
    def __init__(self, field: str | None, reason: str, *, status: int = 400, code: str = "", wait: float = 0.0) -> None:
        """`wait`: seconds after which the client may retry (Retry-After)."""
        super().__init__(f"{field}: {reason}" if field else reason)
        self.field, self.status, self.code, self.wait = field, status, code, wait


@dataclass(kw_only=True)
class Gate:
    """Which requests are admitted, and how large. Not thread-safe: used in the server's thread only."""

    token: str  # empty: none is required
    largest_body: int = 64 * 2**20  # bytes
    public: tuple[str, ...] = ()  # paths that need no token
    memory_left: float = math.inf  # bytes of request bodies that still fit into memory


def make_token(host: str, *, wanted: bool) -> str:
    """SACCADE_TOKEN, or a new token; empty if none is `wanted`, which only a loopback host may ask for."""
    if not wanted and host not in LOOPBACK:
        helps = "leave the option out, or use --host 127.0.0.1"
        raise ConfigError(f"--no-token: {host} can be reached from other machines; {helps}")
    return (os.environ.get(TOKEN) or secrets.token_urlsafe(24)) if wanted else ""


def shown_token(token: str) -> str:
    """The token as it is printed. The user's own shows as $SACCADE_TOKEN, as the output may go to a log."""
    return f"${TOKEN}" if token == os.environ.get(TOKEN) else token


class JsonReply(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()  # escaped to ASCII: a lone surrogate cannot be encoded as UTF-8


# -- an application --------------------------------------------------------------------------------


def json_app(gate: Gate, render: Callable[[BadRequest], Mapping[str, Any]]) -> FastAPI:
    """An application without routes whose requests pass the gate; `render` makes the JSON body of an error."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)

    def refuse(problem: BadRequest) -> Response:
        head = {"Retry-After": str(math.ceil(problem.wait))} if problem.wait else {}
        return JsonReply(render(problem), problem.status, head)

    async def answer(request: Request, error: Exception) -> Response:
        return refuse(_problem(error, request.url.path))

    for kind in (BadRequest, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)
    app.add_middleware(_guard, gate=gate, refuse=refuse)
    return app


def _guard(app: ASGIApp, gate: Gate, refuse: Callable[[BadRequest], Response]) -> ASGIApp:
    """ASGI middleware: refuses requests by their headers, and reads the whole body of the others before the app."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].rstrip("/") or "/"
        method, headers = scope["method"], Headers(scope=scope)
        read: list[Message] = []

        async def send_in_time(message: Message) -> None:
            await _in_time(send(message))

        async def replay() -> Message:
            return read.pop() if read else await receive()

        with suppress(ClientDisconnect):
            try:
                length = _admitted(gate, method, path, headers)
            except BadRequest as problem:
                return await _refuse_and_drain(refuse(problem), receive, send_in_time)
            gate.memory_left -= length
            try:
                read.append({"type": "http.request", "body": b"".join([piece async for piece in _pieces(receive)])})
                # HEAD is routed as GET; uvicorn drops the body of the reply.
                inner = {**scope, "path": path, "method": "GET" if method == "HEAD" else method}
                await app(inner, replay, send_in_time)
            finally:
                gate.memory_left += length

    return guarded


def _admitted(gate: Gate, method: str, path: str, headers: Headers) -> int:
    """Returns the length of a request's body; raises BadRequest if the request is refused."""
    if not gate.token:
        if not LOOPBACK_NAME.fullmatch(headers.get("Host", "")):
            raise BadRequest(None, "this server answers its own machine only", status=403)
    elif path not in gate.public:
        given = headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(given.encode(), gate.token.encode()):
            raise BadRequest(None, "wrong or missing token", status=401, code="invalid_api_key")
    if "Transfer-Encoding" in headers:
        raise BadRequest(None, "send a Content-Length", status=411)
    length = int(headers.get("Content-Length", 0))  # h11 has checked that it is a short string of digits
    if length > gate.largest_body:
        raise BadRequest(None, f"more than {gate.largest_body >> 20} MiB", status=413)
    # A page of another origin cannot send this type without a CORS preflight, which fails here.
    kind = headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if method == "POST" and kind != "application/json":
        raise BadRequest(None, "send Content-Type: application/json", status=415)
    if length > gate.memory_left:
        raise BadRequest(None, "come back later: memory is full", status=429, wait=1.0)
    return length


async def _in_time(step: Awaitable[T]) -> T:
    """Await `step`; a client that is silent for IDLE_TIMEOUT seconds counts as disconnected."""
    try:
        with anyio.fail_after(IDLE_TIMEOUT):
            return await step
    except TimeoutError:
        raise ClientDisconnect from None


async def _pieces(receive: Receive) -> AsyncIterator[bytes]:
    """The pieces of a request's body, as they arrive."""
    more = True
    while more:
        message = await _in_time(receive())
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        yield message.get("body", b"")
        more = message.get("more_body", False)


async def _refuse_and_drain(response: Response, receive: Receive, send: Send) -> None:
    """Send a refusal, then read and drop the body: many clients read the reply only after sending all of it."""
    head = [*response.raw_headers, (b"connection", b"close")]
    await send({"type": "http.response.start", "status": response.status_code, "headers": head})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    taken = 0
    async for piece in _pieces(receive):
        taken += len(piece)
        if taken > MAX_DRAINED:
            break
    await send({"type": "http.response.body"})


def _problem(error: Exception, path: str) -> BadRequest:
    """The error as shown to a client, with the path of the wrong field, such as `messages[0].content`."""
    if isinstance(error, BadRequest):
        return error
    if isinstance(error, HTTPException):
        reasons = {400: "the body is not JSON", 404: f"{path} is not served here"}
        return BadRequest(None, reasons.get(error.status_code, str(error.detail)), status=error.status_code)
    if not isinstance(error, RequestValidationError):
        logging.getLogger("saccade").error("%s failed", path, exc_info=error)
        return BadRequest(None, f"{type(error).__name__}: {error}", status=500)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return BadRequest(None, f"the body is not JSON: {first['ctx']['error']}")
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"][1:])
    if not field:
        return BadRequest(None, "the body must be a record")
    reason = first["msg"][:1].lower() + first["msg"][1:]
    if isinstance(value := first["input"], str | int | float):
        reason += f", not {str(value)[:QUOTED]!r}"
    return BadRequest(field[1:], reason)


# -- a server --------------------------------------------------------------------------------------


class _Protocol(H11Protocol):
    """Adds a timeout while a request is incomplete, for which uvicorn has none."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._watch()

    def _watch(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)


@contextmanager
def running(app: FastAPI, host: str, port: int) -> Iterator[str]:
    """Context manager: serve in a background thread; yields the URL. Port 0 picks a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        why = f"{host} cannot be listened on there: {error.strerror}; try --port 0 for any free port"
        raise EnvironmentProblem(f"--port {port}: {why}") from None
    # `critical` hides lost connections; errors of the app are logged in json_app.
    quiet: Any = {"log_config": None, "log_level": "critical", "access_log": False}
    sent: Any = {"http": _Protocol, "ws": "none", "lifespan": "off", "server_header": False, "headers": SAFE}
    times: Any = {"timeout_keep_alive": IDLE_TIMEOUT, "timeout_graceful_shutdown": GRACE}
    server = uvicorn.Server(uvicorn.Config(app, loop="asyncio", **quiet, **sent, **times))
    thread = threading.Thread(target=server.run, args=([listener],), name="clients", daemon=True)
    thread.start()
    try:
        name = f"[{host}]" if ":" in host else host
        yield f"http://{name}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
