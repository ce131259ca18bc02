"""Turns OpenAI-style requests into requests for the engine.

Nothing is fetched: images must be data URLs. An unsupported field that would change the answer is refused by
name, never ignored.

    read_chat(ChatBody(messages=[{"role": "user", "content": "Hi"}]), served)
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from saccade.config.schema import DataConfig
from saccade.errors import SaccadeError
from saccade.media.images import decode, open_media
from saccade.models.families import Family
from saccade.plugins.serving.http_server import BadRequest
from saccade.types import Media, Message, Request, Sampling

# Fields that do not change an answer.
IGNORED = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier"})
# Fields that are accepted with this value only.
NEUTRAL: Mapping[str, Any] = {
    **{"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_p": 0, "top_logprobs": 0},
    **{"logit_bias": {}, "best_of": 1, "echo": False, "suffix": None, "tools": []},
    "response_format": {"type": "text"},
}


# -- bodies ----------------------------------------------------------------------------------------


def _whole_text(text: str) -> str:
    text.encode()  # raises for a lone surrogate
    return text


_Str = Annotated[str, AfterValidator(_whole_text)]
_NonEmpty = Annotated[_Str, Field(min_length=1)]


def _from_text(make: Callable[[str], Any]) -> BeforeValidator:
    """Validator: accepts a plain string and converts it by `make`."""
    return BeforeValidator(lambda value: make(value) if isinstance(value, str) else value)


class _Record(BaseModel):
    model_config = ConfigDict(strict=True)


class _Url(_Record):
    url: str


class _Part(_Record):
    """`type` is the name of the field that holds the content."""

    type: Literal["text", "image_url"]
    text: _Str | None = None
    image_url: Annotated[_Url | None, _from_text(lambda url: {"url": url})] = None


class _Turn(_Record):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[_Part], _from_text(lambda text: [{"type": "text", "text": text}])]


class _Options(_Record):
    include_usage: bool | None = None


class Body(_Record):
    """The fields of both kinds of requests; null equals a missing field."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    stream: bool | None = None
    stream_options: _Options | None = None
    n: int | None = Field(None, ge=1, le=64)
    stop: Annotated[list[_NonEmpty] | None, Field(max_length=16), _from_text(lambda text: [text])] = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=1e-6, le=1)
    top_k: int | None = Field(None, ge=-1, le=1 << 31)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    ignore_eos: bool | None = None
    logprobs: Any = None

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None and self.logprobs is not False  # 0 requests them too


class ChatBody(Body):
    messages: list[_Turn] = Field(min_length=1)
    logprobs: bool | None = None


class CompletionBody(Body):
    prompt: Annotated[_NonEmpty, BeforeValidator(lambda v: v[0] if isinstance(v, list) and len(v) == 1 else v)]
    logprobs: bool | Annotated[int, Field(ge=0, le=1)] | None = None  # of sampled tokens only


# -- requests --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Served:
    """The served model, with defaults and limits of requests."""

    family: Family
    model: str  # its name in requests
    sampling: Sampling  # defaults; its max_tokens is also the limit
    data: DataConfig  # limits of images and prompts
    logprobs: bool  # whether the engine returns log-probs

    def require(self, model: str) -> None:
        if model != self.model:
            why = f"{model!r} is not served here, {self.model!r} is"
            raise BadRequest("model", why, status=404, code="model_not_found")


def read_chat(body: ChatBody, served: Served) -> tuple[Request, ...]:
    """One engine request per choice (`n`)."""
    messages = tuple(_message(turn, f"messages[{i}]", served.data) for i, turn in enumerate(body.messages))
    images, most = sum(len(m.media) for m in messages), served.data.max_images
    if images > most:
        raise BadRequest("messages", f"{images} images, at most {most} are taken here")
    try:
        # Bypasses the family's prompt cache, which would keep every image ever sent.
        rendered = served.family.chat.render(messages, served.family.measure, generation=True)
    except SaccadeError as error:  # roles or images that the model's template does not support
        raise BadRequest("messages", str(error)) from None
    prompt = Request(key="chat", ids=rendered.ids, media=rendered.media, messages=messages)
    return _choices(body, served, prompt, field="messages")


def read_completion(body: CompletionBody, served: Served) -> tuple[Request, ...]:
    ids = served.family.chat.tokenizer.encode(body.prompt)
    if len(served.family.banned) and served.family.banned[ids].any():
        raise BadRequest("prompt", "holds tokens that stand for images; use /v1/chat/completions")
    said = Message(role="user", parts=(body.prompt,))
    prompt = Request(key="text", ids=np.array(ids, dtype=np.int64), messages=(said,))
    return _choices(body, served, prompt, field="prompt")


def _choices(body: ChatBody | CompletionBody, served: Served, prompt: Request, *, field: str) -> tuple[Request, ...]:
    for name, value in (body.model_extra or {}).items():
        if name not in IGNORED and value is not None and value != NEUTRAL.get(name, ...):
            raise BadRequest(name, "is not served here; leave it out", code="unsupported_parameter")
    if body.model:
        served.require(body.model)
    if body.wants_logprobs and not served.logprobs:
        raise BadRequest("logprobs", "the engine behind this endpoint gives none")
    if body.wants_logprobs and body.stream:
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
    return tuple(replace(prompt, sampling=sampling, noise=first + index) for index in range(body.n or 1))


def _message(turn: _Turn, field: str, limits: DataConfig) -> Message:
    parts: list[str | Media] = []
    for number, part in enumerate(turn.content):
        where = f"{field}.content[{number}].{part.type}"
        given = getattr(part, part.type)
        if given is None:
            raise BadRequest(where, "field required")
        parts.append(given if part.type == "text" else _media(given.url, f"{where}.url", limits))
    return Message(role="system" if turn.role == "developer" else turn.role, parts=tuple(parts))


def _media(url: str, field: str, limits: DataConfig) -> Media:
    if not url.startswith("data:image/"):
        raise BadRequest(field, "only images inside the request are taken: data:image/png;base64,...")
    try:
        media = open_media(url, limits=limits)
        decode(media)  # now, so that a damaged file fails this request and not the engine
    except SaccadeError as error:
        raise BadRequest(field, str(error)) from None
    return media
