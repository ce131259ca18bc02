"""The HTTP side of a served engine: routes, token, streams. Reads JSON, writes JSON, nothing else.

Listens on loopback unless told otherwise, and asks for a token. Without one it answers requests
that name a loopback host only, so a page from elsewhere that points its own name here gets nothing.

    server = open_server(service, "127.0.0.1", 8000)
    threading.Thread(target=server.serve_forever).start(); service.hub.run()
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from saccade.errors import ConfigError, EnvironmentProblem, SaccadeError
from saccade.serving import replies
from saccade.serving.fields import Asked, BadRequest, Served, read_chat, read_completion
from saccade.serving.hub import Closed, Event, Hub
from saccade.serving.replies import CHAT, TEXT, Json, Style
from saccade.serving.text import TextStream
from saccade.types import Completion

PAGE = Path(__file__).with_name("page.html")
LARGEST_BODY, PIECE = 64 * 2**20, 2**16
LOOPBACK = ("127.0.0.1", "localhost")
LOOPBACK_NAME = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?")
SILENCE = 60  # seconds that a client may take to send its request
SAFE = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data:; connect-src 'self'",
}


@dataclass(frozen=True, kw_only=True)
class Service:
    hub: Hub
    served: Served
    token: str  # empty: none is asked for
    started: int = field(default_factory=lambda: int(time.time()))
    # Tokenizers are not made for several threads.
    rendering: threading.Lock = field(default_factory=threading.Lock)


def open_server(service: Service, host: str, port: int) -> ThreadingHTTPServer:
    """Bound to the address; port 0 takes a free one."""
    assert service.token or host in LOOPBACK, "without a token only loopback is served"
    try:
        server = ThreadingHTTPServer((host, port), partial(Handler, service))
    except OSError as error:
        raise EnvironmentProblem(
            f"--port {port}: {host} cannot be listened on there: {error.strerror}; try --port 0 "
            "for any free port"
        ) from None
    server.daemon_threads = True
    return server


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = SILENCE
    streaming = False

    def __init__(self, service: Service, *args: Any) -> None:
        self.service = service
        super().__init__(*args)

    def do_GET(self) -> None:
        self._route({"/": self._page, "/v1/models": self._models})

    def do_POST(self) -> None:
        self._route(
            {
                "/v1/chat/completions": partial(self._complete, CHAT, read_chat),
                "/v1/completions": partial(self._complete, TEXT, read_completion),
            }
        )

    def log_message(self, *args: Any) -> None:
        pass

    def _route(self, routes: Mapping[str, Callable[[], None]]) -> None:
        try:
            self._answer(routes)
        except (ConnectionError, TimeoutError):  # the client has left
            self.close_connection = True

    def _answer(self, routes: Mapping[str, Callable[[], None]]) -> None:
        path = self.path.partition("?")[0].rstrip("/") or "/"
        try:
            length = self._length()
            self._admit(path, length)
            # In any case, or the next request would begin inside this one.
            self.body = self.rfile.read(length)
            if path not in routes:
                raise BadRequest(None, f"{path} is not served here", status=404)
            routes[path]()
        except BadRequest as problem:
            self._fail(problem)
        except SaccadeError as problem:  # the engine's own
            status = 400 if isinstance(problem, ConfigError) else 502
            self._fail(BadRequest(None, str(problem), status=status))
        except Closed:
            if not self.streaming:  # a stream just ends, without its last mark
                self._fail(BadRequest(None, "the engine has ended", status=503))

    def _admit(self, path: str, length: int) -> None:
        problem = self._against(path)
        if problem is not None:
            self.close_connection = True
            self._fail(problem)
            # A client reads why only when it has sent all; nothing of it is kept.
            while length > 0 and (piece := self.rfile.read(min(length, PIECE))):
                length -= len(piece)
            raise ConnectionAbortedError

    def _against(self, path: str) -> BadRequest | None:
        token = self.service.token
        if not token:
            if not LOOPBACK_NAME.fullmatch(self.headers.get("Host", "")):
                return BadRequest(None, "this server speaks to its own machine only", status=403)
        elif path != "/":  # the page holds no secret, and asks for the token
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
        if int(length) > LARGEST_BODY:
            self.close_connection = True
            raise BadRequest(None, f"more than {LARGEST_BODY >> 20} MiB", status=413)
        return int(length)

    # -- answers --

    def _page(self) -> None:
        self._reply(200, PAGE.read_bytes(), "text/html; charset=utf-8")

    def _models(self) -> None:
        model = {"id": self.service.served.model, "object": "model", "owned_by": "saccade"}
        listed = [{**model, "created": self.service.started}]
        self._json(200, {"object": "list", "data": listed})

    def _complete(self, style: Style, read: Callable[[Any, Served], Asked]) -> None:
        # A page from elsewhere cannot send this type without being allowed to.
        if self.headers.get_content_type() != "application/json":
            raise BadRequest(None, "send Content-Type: application/json", status=415)
        try:
            body = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise BadRequest(None, f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise BadRequest(None, "the body must be a record")
        with self.service.rendering:
            asked = read(body, self.service.served)
        if asked.stream:
            self._stream(style, asked)
        else:
            self._whole(style, asked)

    def _whole(self, style: Style, asked: Asked) -> None:
        family = self.service.served.family
        completions: list[Completion | None] = [None] * len(asked.requests)
        with closing(self._events(asked)) as events:
            for event in events:
                completions[event.index] = event.completion
        choices = []
        done = [completion for completion in completions if completion is not None]
        for index, completion in enumerate(done):
            stream = TextStream(family.decode, asked.stop)
            text = stream.finish(completion.ids)
            logprobs = replies.logprobs_of(style, family, completion) if asked.logprobs else None
            choice = {"index": index, **style.text(text), "logprobs": logprobs}
            choices.append(choice | replies.ending(completion.finish, stream.stopped_by))
        head = self._head(style, style.whole)
        usage = replies.usage(len(asked.requests[0].ids), done)
        self._json(200, {**head, "choices": choices, "usage": usage})

    def _stream(self, style: Style, asked: Asked) -> None:
        self.streaming = self.close_connection = True  # its end is the end of the stream
        self._headers(
            200, "text/event-stream", {"Cache-Control": "no-store", "Connection": "close"}
        )
        with closing(self._pieces(style, asked)) as pieces:
            for piece in pieces:
                self._event(json.dumps(piece))
        self._event("[DONE]")

    def _pieces(self, style: Style, asked: Asked) -> Generator[Json, None, None]:
        head = self._head(style, style.piece)
        decode = self.service.served.family.decode
        streams = [TextStream(decode, asked.stop) for _ in asked.requests]
        done: list[Completion] = []

        def piece(index: int, text: str, end: Json) -> Json:
            choice = {"index": index, **style.delta(text), "logprobs": None, **end}
            return {**head, "choices": [choice]}

        if style.opening:
            for index in range(len(streams)):
                choice = {"index": index, **style.opening, "finish_reason": None}
                yield {**head, "choices": [choice]}
        for event in self._events(asked):
            stream, completion = streams[event.index], event.completion
            text = stream.add(event.ids) if completion is None else stream.finish(event.ids)
            if text:
                yield piece(event.index, text, replies.ending(None, None))
            if completion is not None:
                done.append(completion)
                end = replies.ending(completion.finish, stream.stopped_by)
                yield piece(event.index, "", end)
        if asked.stream_usage:
            usage = replies.usage(len(asked.requests[0].ids), done)
            yield {**head, "choices": [], "usage": usage}

    def _events(self, asked: Asked) -> Generator[Event, None, None]:
        return self.service.hub.ask(asked.requests, stream=asked.stream)

    def _head(self, style: Style, kind: str) -> Json:
        return {
            "id": f"{style.prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": self.service.served.model,
        }

    # -- writing --

    def _fail(self, problem: BadRequest) -> None:
        error = replies.error(str(problem), problem.field, problem.code, problem.status)
        if self.streaming:  # it ends with this, without its last mark
            self._event(json.dumps(error))
        else:
            self._json(problem.status, error)

    def _json(self, status: int, value: Mapping[str, Any]) -> None:
        self._reply(status, json.dumps(value).encode(), "application/json")

    def _reply(self, status: int, data: bytes, kind: str) -> None:
        self._headers(status, kind, {"Content-Length": str(len(data))})
        self.wfile.write(data)

    def _headers(self, status: int, kind: str, more: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **more, **SAFE}.items():
            self.send_header(name, value)
        self.end_headers()

    def _event(self, text: str) -> None:
        self.wfile.write(f"data: {text}\n\n".encode())
