"""The OpenAI-style endpoint of a served engine and its page: routes, answers, streams.

app = chat_app(hub, served, token="sesame")
with running(app, "127.0.0.1", 8000): hub.run()
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from anyio import to_thread
from fastapi import FastAPI
from fastapi.responses import FileResponse, Response, StreamingResponse

from saccade.errors import ConfigError, SaccadeError
from saccade.plugins.serving.chat_requests import (
    Asked,
    ChatBody,
    CompletionBody,
    Served,
    read_chat,
    read_completion,
    require_model,
)
from saccade.plugins.serving.engine_hub import Closed, Hub
from saccade.plugins.serving.http_server import BadRequest, Gate, JsonReply, json_app
from saccade.plugins.serving.text_stream import BROKEN, TextStream
from saccade.types import Completion

PAGE = Path(__file__).with_name("chat_page.html")
Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Style:
    """How one of the two kinds of completions is written."""

    prefix: str  # of ids
    whole: str  # name of an object
    piece: str
    text: Callable[[str], Json]  # of a choice
    delta: Callable[[str], Json]  # of a piece
    opening: Json  # of a stream; empty: it has none
    logprobs: Callable[[Sequence[str], Sequence[float]], Json]


def _chat_logprobs(tokens: Sequence[str], logprobs: Sequence[float]) -> Json:
    spelled = [None if BROKEN in token else list(token.encode()) for token in tokens]
    content = [
        {"token": token, "logprob": logprob, "bytes": found, "top_logprobs": []}
        for token, logprob, found in zip(tokens, logprobs, spelled, strict=True)
    ]
    return {"content": content, "refusal": None}


def _text_logprobs(tokens: Sequence[str], logprobs: Sequence[float]) -> Json:
    ends = list(accumulate(map(len, tokens), initial=0))
    return {"tokens": list(tokens), "token_logprobs": list(logprobs), "top_logprobs": None, "text_offset": ends[:-1]}


CHAT = Style(
    prefix="chatcmpl",
    whole="chat.completion",
    piece="chat.completion.chunk",
    text=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    delta=lambda text: {"delta": {"content": text} if text else {}},
    opening={"delta": {"role": "assistant", "content": ""}},
    logprobs=_chat_logprobs,
)
TEXT = Style(
    prefix="cmpl",
    whole="text_completion",
    piece="text_completion",
    text=lambda text: {"text": text},
    delta=lambda text: {"text": text},
    opening={},
    logprobs=_text_logprobs,
)


def chat_app(hub: Hub, served: Served, *, token: str) -> FastAPI:
    """`token` is empty where none is asked for; the page holds no secret, and asks for it."""
    app = json_app(Gate(token=token, public=("/",)), _error)
    card = {"id": served.model, "object": "model", "owned_by": "saccade", "created": int(time.time())}
    rendering = threading.Lock()  # tokenizers are not made for several threads

    @app.get("/")
    async def page() -> Response:
        return FileResponse(PAGE)

    @app.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Json:
        require_model(name, served)
        return card

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody) -> Response:
        return await answer(CHAT, read_chat, body)

    @app.post("/v1/completions")
    async def complete(body: CompletionBody) -> Response:
        return await answer(TEXT, read_completion, body)

    async def answer(style: Style, read: Callable[[Any, Served], Asked], body: Any) -> Response:
        def reading() -> Asked:
            with rendering:
                return read(body, served)

        asked = await to_thread.run_sync(reading)
        if asked.stream:
            head = {"Cache-Control": "no-store", "Connection": "close"}
            lines = _lines(hub, served, style, asked)
            return StreamingResponse(lines, media_type="text/event-stream", headers=head)
        try:
            return JsonReply(await _whole(hub, served, style, asked))
        except (SaccadeError, Closed) as problem:
            raise _refusal(problem) from None

    return app


async def _whole(hub: Hub, served: Served, style: Style, asked: Asked) -> Json:
    done: dict[int, Completion] = {}
    async for event in hub.ask(asked.requests):
        if event.completion is not None:
            done[event.index] = event.completion
    choices = []
    for index, completion in sorted(done.items()):
        stream = TextStream(served.family.decode, asked.requests[0].sampling.stop)
        text = stream.finish(completion.ids)
        logprobs = None
        if asked.logprobs:
            decode = served.family.chat.decode
            tokens = [decode([token], special=True) for token in completion.ids.tolist()]
            logprobs = style.logprobs(tokens, [float(value) for value in completion.logprobs])
        choice = {"index": index, **style.text(text), "logprobs": logprobs}
        choices.append(choice | _ending(completion.finish, stream.stopped_by))
    return {**_head(served, style, style.whole), "choices": choices, "usage": _usage(asked, list(done.values()))}


async def _lines(hub: Hub, served: Served, style: Style, asked: Asked) -> AsyncGenerator[str, None]:
    """Events of a stream; one that fails ends with its error, without the last mark."""
    try:
        async with aclosing(_pieces(hub, served, style, asked)) as pieces:
            async for piece in pieces:
                yield f"data: {json.dumps(piece)}\n\n"
        yield "data: [DONE]\n\n"
    except SaccadeError as problem:
        yield f"data: {json.dumps(_error(_refusal(problem)))}\n\n"
    except Closed:
        pass


async def _pieces(hub: Hub, served: Served, style: Style, asked: Asked) -> AsyncGenerator[Json, None]:
    head = _head(served, style, style.piece)
    streams = [TextStream(served.family.decode, request.sampling.stop) for request in asked.requests]
    done: list[Completion] = []

    def piece(index: int, text: str, finish: str | None = None) -> Json:
        end = _ending(finish, streams[index].stopped_by if finish else None)
        return {**head, "choices": [{"index": index, **style.delta(text), "logprobs": None, **end}]}

    for index in range(len(streams) if style.opening else 0):
        yield {**head, "choices": [{"index": index, **style.opening, "finish_reason": None}]}
    async with aclosing(hub.ask(asked.requests, stream=True)) as events:
        async for event in events:
            stream, completion = streams[event.index], event.completion
            text = stream.add(event.ids) if completion is None else stream.finish(event.ids)
            if text:
                yield piece(event.index, text)
            if completion is not None:
                done.append(completion)
                yield piece(event.index, "", completion.finish)
    if asked.stream_usage:
        yield {**head, "choices": [], "usage": _usage(asked, done)}


def _head(served: Served, style: Style, kind: str) -> Json:
    name = f"{style.prefix}-{secrets.token_hex(12)}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": served.model}


def _ending(finish: str | None, stopped_by: str | None) -> Json:
    return {"finish_reason": finish, "stop_reason": stopped_by}


def _usage(asked: Asked, completions: Sequence[Completion]) -> Json:
    prompt = len(asked.requests[0].ids)
    written = sum(len(completion.ids) for completion in completions)
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def _refusal(problem: SaccadeError | Closed) -> BadRequest:
    if isinstance(problem, Closed):
        return BadRequest(None, "the engine has ended", status=503)
    return BadRequest(None, str(problem), status=400 if isinstance(problem, ConfigError) else 502)


def _error(problem: BadRequest) -> Mapping[str, Any]:
    kind = "server_error" if problem.status >= 500 else "invalid_request_error"
    return {"error": {"message": str(problem), "type": kind, "param": problem.field, "code": problem.code or None}}
