"""OpenAI-style requests: what a client sends becomes requests for the engine.

Nothing is fetched: an image is a data URL. A field that would change the answer and is not served
is refused by name, never ignored.

    read_chat(ChatBody(messages=[{"role": "user", "content": "Hi"}]), served)
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from saccade.config.schema import DataConfig
from saccade.errors import SaccadeError
from saccade.media.images import decode, open_media
from saccade.models.families import Family
from saccade.plugins.serving.http_server import BadRequest
from saccade.types import Media, Message, Request, Sampling

# Change nothing of an answer.
IGNORED = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier"})
# Served at this value only.
NEUTRAL: Mapping[str, Any] = {
    **{"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_p": 0, "top_logprobs": 0},
    **{"logit_bias": {}, "best_of": 1, "echo": False, "suffix": None, "tools": []},
    "response_format": {"type": "text"},
}


# -- bodies ----------------------------------------------------------------------------------------


def _whole_text(text: str) -> str:
    text.encode()  # half a surrogate pair is no text
    return text


_Str = Annotated[str, AfterValidator(_whole_text)]


class _Record(BaseModel):
    model_config = ConfigDict(strict=True)


class _Text(_Record):
    type: Literal["text"]
    text: _Str


class _Url(_Record):
    url: str


class _Image(_Record):
    type: Literal["image_url"]
    image_url: Annotated[_Url, BeforeValidator(lambda v: {"url": v} if isinstance(v, str) else v)]


# Tags in angle brackets are left out of the name of a field.
_Part = Annotated[
    Annotated[_Text, Tag("<text>")] | Annotated[_Image, Tag("<image_url>")],
    Discriminator(
        lambda part: f"<{part.get('type')}>" if isinstance(part, dict) else None,
        custom_error_type="union_tag",
        custom_error_message="expected one of text, image_url",
    ),
]
_Content = Annotated[
    Annotated[_Str, Tag("<whole>")] | Annotated[list[_Part], Tag("<parts>")],
    Discriminator(lambda content: "<parts>" if isinstance(content, list) else "<whole>"),
]


class _Turn(_Record):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Content


class _Options(_Record):
    include_usage: bool | None = None


class Body(_Record):
    """What both kinds of requests share; null stands for a field that is left out."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    stream: bool | None = None
    stream_options: _Options | None = None
    n: int | None = Field(None, ge=1, le=64)
    stop: Annotated[
        list[Annotated[_Str, Field(min_length=1)]] | None,
        Field(max_length=16),
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    ] = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=1e-6, le=1)
    top_k: int | None = Field(None, ge=-1, le=1 << 31)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    ignore_eos: bool | None = None


class ChatBody(Body):
    messages: list[_Turn] = Field(min_length=1)
    logprobs: bool | None = None


class CompletionBody(Body):
    prompt: Annotated[
        _Str, Field(min_length=1), BeforeValidator(lambda v: v[0] if isinstance(v, list) and len(v) == 1 else v)
    ]
    logprobs: bool | Annotated[int, Field(ge=0, le=1)] | None = None  # of sampled tokens only


# -- requests --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Served:
    """What requests are read against."""

    family: Family
    model: str
    sampling: Sampling  # where a client says nothing; its max_tokens is the most that one gets
    data: DataConfig  # limits of images and prompts
    logprobs: bool


@dataclass(frozen=True, kw_only=True)
class Asked:
    requests: tuple[Request, ...]  # one for each choice
    stream: bool
    stream_usage: bool
    logprobs: bool


def read_chat(body: ChatBody, served: Served) -> Asked:
    def part(item: str | _Text | _Image, where: str) -> str | Media:
        if isinstance(item, _Image):
            return _media(item, f"messages{where}.image_url.url", served.data)
        return item.text if isinstance(item, _Text) else item

    def message(turn: _Turn, i: int) -> Message:
        content = [turn.content] if isinstance(turn.content, str) else turn.content
        parts = tuple(part(item, f"[{i}].content[{j}]") for j, item in enumerate(content))
        return Message(role="system" if turn.role == "developer" else turn.role, parts=parts)

    messages = tuple(message(turn, i) for i, turn in enumerate(body.messages))
    images, most = sum(len(m.media) for m in messages), served.data.max_images
    if images > most:
        raise BadRequest("messages", f"{images} images, at most {most} are taken here")
    try:
        # Past the family's memory of prompts, which would keep every picture that was ever sent.
        rendered = served.family.chat.render(messages, served.family.measure, generation=True)
    except SaccadeError as error:  # roles or images that the model's template does not take
        raise BadRequest("messages", str(error)) from None
    prompt = Request(key="chat", ids=rendered.ids, media=rendered.media, messages=messages)
    return _asked(body, served, prompt, field="messages", logprobs=bool(body.logprobs))


def read_completion(body: CompletionBody, served: Served) -> Asked:
    ids = served.family.chat.tokenizer.encode(body.prompt)
    if len(served.family.banned) and served.family.banned[ids].any():
        raise BadRequest("prompt", "holds tokens that stand for images; use /v1/chat/completions")
    said = Message(role="user", parts=(body.prompt,))
    prompt = Request(key="text", ids=np.array(ids, dtype=np.int64), messages=(said,))
    wanted = body.logprobs is not None and body.logprobs is not False  # 0 asks for them too
    return _asked(body, served, prompt, field="prompt", logprobs=wanted)


def require_model(name: str, served: Served) -> None:
    if name != served.model:
        why = f"{name!r} is not served here, {served.model!r} is"
        raise BadRequest("model", why, status=404, code="model_not_found")


def _asked(body: Body, served: Served, prompt: Request, *, field: str, logprobs: bool) -> Asked:
    for name, value in (body.model_extra or {}).items():
        if name not in IGNORED and value is not None and value != NEUTRAL.get(name, ...):
            raise BadRequest(name, "is not served here; leave it out", code="unsupported_parameter")
    if body.model:
        require_model(body.model, served)
    if logprobs and not served.logprobs:
        raise BadRequest("logprobs", "the engine behind this endpoint gives none")
    if logprobs and body.stream:
        raise BadRequest("logprobs", "come with the whole answer; leave out stream")
    longest = min(served.data.max_prompt_tokens, served.family.max_positions - 1)
    if len(prompt.ids) > longest:
        reason = f"{len(prompt.ids)} tokens, at most {longest} are taken here"
        raise BadRequest(field, reason, code="context_length_exceeded")
    most = min(served.sampling.max_tokens, served.family.max_positions - len(prompt.ids))
    limit = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
    wanted = getattr(body, limit)
    if wanted is not None and not 1 <= wanted <= most:
        raise BadRequest(limit, f"takes a whole number from 1 to {most}, not {wanted}")
    given = {"temperature": body.temperature, "top_p": body.top_p, "top_k": -1 if body.top_k == 0 else body.top_k}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    chosen |= {"max_tokens": wanted or most, "ignore_eos": bool(body.ignore_eos), "stop": tuple(body.stop or ())}
    sampling = replace(served.sampling, **chosen)
    first = secrets.randbits(62) if body.seed is None else body.seed & ((1 << 62) - 1)
    return Asked(
        requests=tuple(replace(prompt, sampling=sampling, noise=first + index) for index in range(body.n or 1)),
        stream=bool(body.stream),
        stream_usage=bool(body.stream_options and body.stream_options.include_usage),
        logprobs=logprobs,
    )


def _media(part: _Image, field: str, limits: DataConfig) -> Media:
    if not part.image_url.url.startswith("data:image/"):
        raise BadRequest(field, "only images inside the request are taken: data:image/png;base64,...")
    try:
        media = open_media(part.image_url.url, limits=limits)
        decode(media)  # here, where a damaged file costs one request and not the engine
    except SaccadeError as error:
        raise BadRequest(field, str(error)) from None
    return media
