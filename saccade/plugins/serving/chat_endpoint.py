"""The OpenAI-style endpoint of an engine and its chat page: routes, answers, streams.

app = chat_app(hub, served, token="sesame")
with running(app, "127.0.0.1", 8000): hub.run()
"""

import json
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from anyio import to_thread
from fastapi import FastAPI
from fastapi.responses import FileResponse, Response, StreamingResponse

from saccade.errors import ConfigError, SaccadeError
from saccade.plugins.serving.chat_requests import ChatBody, CompletionBody, Served, read_chat, read_completion
from saccade.plugins.serving.engine_hub import Closed, Hub
from saccade.plugins.serving.http_server import BadRequest, Gate, JsonReply, json_app
from saccade.plugins.serving.text_stream import BROKEN, TextStream
from saccade.types import Completion, Request

PAGE = Path(__file__).with_name("chat_page.html")
Json = dict[str, Any]


def chat_app(hub: Hub, served: Served, *, token: str) -> FastAPI:
    """The application. An empty `token` requires none; the page needs no token itself, and asks the user for it."""
    app = json_app(Gate(token=token, public=("/",)), _error)
    card = {"id": served.model, "object": "model", "owned_by": "saccade", "created": int(time.time())}
    rendering = threading.Lock()  # tokenizers are not thread-safe

    @app.get("/")
    async def page() -> Response:
        return FileResponse(PAGE)

    @app.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Json:
        served.require(name)
        return card

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody) -> Response:
        return await answer(body, read_chat)

    @app.post("/v1/completions")
    async def complete(body: CompletionBody) -> Response:
        return await answer(body, read_completion)

    async def answer(body: Any, read: Callable[[Any, Served], tuple[Request, ...]]) -> Response:
        def reading() -> tuple[Request, ...]:
            with rendering:
                return read(body, served)

        asked = ClientRequest(body=body, served=served, requests=await to_thread.run_sync(reading))
        if body.stream:
            head = {"Cache-Control": "no-store", "Connection": "close"}
            return StreamingResponse(_stream(hub, asked), media_type="text/event-stream", headers=head)
        try:
            return JsonReply(await _whole(hub, asked))
        except SaccadeError as problem:
            raise _refusal(problem) from None

    return app


@dataclass(frozen=True, kw_only=True)
class ClientRequest:
    """A client's request, and the JSON of its answers."""

    body: ChatBody | CompletionBody
    served: Served
    requests: tuple[Request, ...]  # one per choice (`n`)

    @property
    def chat(self) -> bool:
        return isinstance(self.body, ChatBody)

    def head(self, *, piece: bool = False) -> Json:
        name = f"{'chatcmpl' if self.chat else 'cmpl'}-{secrets.token_hex(12)}"
        kind = ("chat.completion.chunk" if piece else "chat.completion") if self.chat else "text_completion"
        return {"id": name, "object": kind, "created": int(time.time()), "model": self.served.model}

    def stream(self) -> TextStream:
        return TextStream(self.served.family.decode, self.requests[0].sampling.stop)

    def usage(self, completions: Iterable[Completion]) -> Json:
        prompt = len(self.requests[0].ids)
        written = sum(len(completion.ids) for completion in completions)
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}

    def logprobs(self, completion: Completion) -> Json | None:
        if not self.body.wants_logprobs:
            return None
        decode = self.served.family.chat.decode
        tokens = [decode([token], special=True) for token in completion.ids.tolist()]
        values = [float(value) for value in completion.logprobs]
        if not self.chat:
            starts = list(accumulate(map(len, tokens), initial=0))[:-1]
            return {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": starts}
        spelled = [None if BROKEN in token else list(token.encode()) for token in tokens]
        rows = zip(tokens, values, spelled, strict=True)
        content = [{"token": token, "logprob": value, "bytes": data, "top_logprobs": []} for token, value, data in rows]
        return {"content": content, "refusal": None}


async def _whole(hub: Hub, asked: ClientRequest) -> Json:
    done = {e.choice: e.completion async for e in hub.ask(asked.requests) if e.completion is not None}
    choices = []
    for index, completion in sorted(done.items()):
        stream = asked.stream()
        text = stream.finish(completion.ids)
        said = {"message": {"role": "assistant", "content": text, "refusal": None}} if asked.chat else {"text": text}
        choice = {"index": index, **said, "logprobs": asked.logprobs(completion)}
        choices.append(choice | {"finish_reason": completion.finish, "stop_reason": stream.stopped_by})
    return {**asked.head(), "choices": choices, "usage": asked.usage(done.values())}


async def _stream(hub: Hub, asked: ClientRequest) -> AsyncGenerator[str, None]:
    """Server-sent events. A stream that fails ends with its error and without `[DONE]`."""
    head = asked.head(piece=True)
    streams = [asked.stream() for _ in asked.requests]
    done: list[Completion] = []

    def piece(index: int, delta: Json, finish: str | None = None) -> str:
        shown = {"delta": delta} if asked.chat else {"text": delta.get("content", "")}
        end = {"finish_reason": finish, "stop_reason": streams[index].stopped_by if finish else None}
        return _line({**head, "choices": [{"index": index, **shown, "logprobs": None, **end}]})

    try:
        for index in range(len(streams) if asked.chat else 0):
            yield piece(index, {"role": "assistant", "content": ""})
        async with aclosing(hub.ask(asked.requests, stream=True)) as events:
            async for event in events:
                stream, completion = streams[event.choice], event.completion
                text = stream.add(event.ids) if completion is None else stream.finish(event.ids)
                if text:
                    yield piece(event.choice, {"content": text})
                if completion is not None:
                    done.append(completion)
                    yield piece(event.choice, {}, completion.finish)
        if asked.body.stream_options and asked.body.stream_options.include_usage:
            yield _line({**head, "choices": [], "usage": asked.usage(done)})
        yield "data: [DONE]\n\n"
    except SaccadeError as problem:
        yield _line(_error(_refusal(problem)))


def _line(event: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(event)}\n\n"


def _refusal(problem: SaccadeError) -> BadRequest:
    status = 400 if isinstance(problem, ConfigError) else 503 if isinstance(problem, Closed) else 502
    return BadRequest(None, str(problem), status=status)


def _error(problem: BadRequest) -> Mapping[str, Any]:
    kind = "server_error" if problem.status >= 500 else "invalid_request_error"
    return {"error": {"message": str(problem), "type": kind, "param": problem.field, "code": problem.code or None}}
