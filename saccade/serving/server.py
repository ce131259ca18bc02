"""The HTTP side of a served engine: routes, answers, streams.

server = open_server(service, "127.0.0.1", 8000)
threading.Thread(target=server.serve_forever).start(); service.hub.run()
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from saccade.errors import ConfigError, SaccadeError
from saccade.serving import http, replies
from saccade.serving.fields import Asked, Served, read_chat, read_completion, require_model
from saccade.serving.http import BadRequest
from saccade.serving.hub import Closed, Event, Hub
from saccade.serving.replies import CHAT, TEXT, Json, Style
from saccade.serving.text import TextStream
from saccade.types import Completion

PAGE = Path(__file__).with_name("page.html")


@dataclass(frozen=True, kw_only=True)
class Service:
    hub: Hub
    served: Served
    token: str  # empty: none is asked for; the page holds no secret, and asks for it
    started: int = field(default_factory=lambda: int(time.time()))
    # Tokenizers are not made for several threads.
    rendering: threading.Lock = field(default_factory=threading.Lock)


def open_server(service: Service, host: str, port: int) -> ThreadingHTTPServer:
    return http.open_server(partial(Handler, service), host, port, token=service.token)


class Handler(http.JsonHandler):
    streaming = False

    def __init__(self, service: Service, *args: Any) -> None:
        self.service = service
        self.gate = http.Gate(token=service.token, public=("/",))
        super().__init__(*args)

    def do_GET(self) -> None:
        named = self.asked.removeprefix("/v1/models/")
        model = partial(self._model, unquote(named))
        self.route({"/": self._page, "/v1/models": self._models, f"/v1/models/{named}": model})

    def do_POST(self) -> None:
        self.route(
            {
                "/v1/chat/completions": partial(self._complete, CHAT, read_chat),
                "/v1/completions": partial(self._complete, TEXT, read_completion),
            }
        )

    # -- answers --

    def _page(self) -> None:
        self.send_data(200, PAGE.read_bytes(), "text/html; charset=utf-8")

    def _models(self) -> None:
        self.send_json(200, {"object": "list", "data": [self._card()]})

    def _model(self, name: str) -> None:
        require_model(name, self.service.served)
        self.send_json(200, self._card())

    def _card(self) -> Json:
        model = {"id": self.service.served.model, "object": "model", "owned_by": "saccade"}
        return {**model, "created": self.service.started}

    def _complete(self, style: Style, read: Callable[[Any, Served], Asked]) -> None:
        body = self.read_json()
        try:
            with self.service.rendering:
                asked = read(body, self.service.served)
            if asked.stream:
                self._stream(style, asked)
            else:
                self._whole(style, asked)
        except SaccadeError as problem:  # the engine's own
            status = 400 if isinstance(problem, ConfigError) else 502
            raise BadRequest(None, str(problem), status=status) from None
        except Closed:
            if not self.streaming:  # a stream just ends, without its last mark
                raise BadRequest(None, "the engine has ended", status=503) from None

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
        self.send_json(200, {**head, "choices": choices, "usage": usage})

    def _stream(self, style: Style, asked: Asked) -> None:
        self.streaming = self.close_connection = True  # its end is the end of the stream
        head = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        self.send_head(200, {**head, "Connection": "close"})
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

    def fail(self, problem: BadRequest) -> None:
        error = replies.error(str(problem), problem.field, problem.code, problem.status)
        if self.streaming:  # it ends with this, without its last mark
            self._event(json.dumps(error))
        else:
            self.send_json(problem.status, error)

    def _event(self, text: str) -> None:
        self.wfile.write(f"data: {text}\n\n".encode())
