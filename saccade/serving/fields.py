"""Fields of an OpenAI-style request, checked: what a client sends becomes requests for the engine.

Nothing is fetched: an image is a data URL. A field that would change the answer and is not served
is refused by name, never ignored.

    read_chat({"messages": [{"role": "user", "content": "Hi"}]}, service)
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from saccade.config import DataConfig
from saccade.errors import SaccadeError
from saccade.media.images import decode, open_media
from saccade.models.families import Family
from saccade.serving.http import BadRequest
from saccade.types import Media, Message, Request, Sampling

ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
ROLES |= {"developer": "system"}
MOST_CHOICES, MOST_STOPS = 64, 16
# Change nothing of an answer.
IGNORED = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier"})
# Served at this value only.
NEUTRAL: Mapping[str, Any] = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "logit_bias": {},
    "best_of": 1,
    "echo": False,
    "suffix": None,
    "top_logprobs": 0,
    "tools": [],
    "response_format": {"type": "text"},
}


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
    stop: tuple[str, ...]
    stream: bool
    stream_usage: bool
    logprobs: bool


def read_chat(body: Mapping[str, Any], served: Served) -> Asked:
    written = body.get("messages")
    if not isinstance(written, list) or not written:
        raise BadRequest("messages", "give a list with at least one message")
    messages = tuple(
        _message(item, f"messages[{i}]", served.data) for i, item in enumerate(written)
    )
    images, most = sum(len(message.media) for message in messages), served.data.max_images
    if images > most:
        raise BadRequest("messages", f"{images} images, at most {most} are taken here")
    try:
        # Past the family's memory of prompts, which would keep every picture that was ever sent.
        rendered = served.family.chat.render(messages, served.family.measure, generation=True)
    except SaccadeError as error:  # roles or images that the model's template does not take
        raise BadRequest("messages", str(error)) from None
    prompt = Request(key="chat", ids=rendered.ids, media=rendered.media, messages=messages)
    return _asked(body, served, prompt, logprobs=_flag(body, "logprobs"))


def read_completion(body: Mapping[str, Any], served: Served) -> Asked:
    text = body.get("prompt")
    if isinstance(text, list) and len(text) == 1:
        text = text[0]
    if not text:
        raise BadRequest("prompt", "give one text")
    text = _string(text, "prompt")
    ids = served.family.chat.tokenizer.encode(text)
    if len(served.family.banned) and served.family.banned[ids].any():
        raise BadRequest("prompt", "holds tokens that stand for images; use /v1/chat/completions")
    prompt = Request(
        key="text",
        ids=np.array(ids, dtype=np.int64),
        messages=(Message(role="user", parts=(text,)),),
    )
    wanted = body.get("logprobs")
    if wanted not in (None, 0, 1, False, True):
        raise BadRequest("logprobs", "only those of the tokens that were sampled: try 0 or 1")
    return _asked(body, served, prompt, logprobs=wanted is not None and wanted is not False)


def require_model(name: Any, served: Served) -> None:
    if name != served.model:
        reason = f"{name!r} is not served here, {served.model!r} is"
        raise BadRequest("model", reason, status=404, code="model_not_found")


def _asked(body: Mapping[str, Any], served: Served, prompt: Request, *, logprobs: bool) -> Asked:
    _refuse_unknown(body)
    if (model := body.get("model")) not in (None, ""):
        require_model(model, served)
    stop, options = _stop(body), body.get("stream_options") or {}
    if not isinstance(options, Mapping):
        raise BadRequest("stream_options", "give a record, such as {include_usage: true}")
    stream = _flag(body, "stream")
    if logprobs and not served.logprobs:
        raise BadRequest("logprobs", "the engine behind this endpoint gives none")
    if logprobs and stream:
        raise BadRequest("logprobs", "come with the whole answer; leave out stream")
    default = served.sampling
    sampling = replace(
        default,
        temperature=_number(body, "temperature", default.temperature, 0, 100),
        top_p=_number(body, "top_p", default.top_p, 1e-6, 1),
        top_k=_whole(body, "top_k", default.top_k, -1, 1 << 31) or -1,
        max_tokens=_max_tokens(body, served, len(prompt.ids)),
        stop=stop,
        ignore_eos=_flag(body, "ignore_eos"),
    )
    seed = _whole(body, "seed", None, -(1 << 63), (1 << 63) - 1)
    first = secrets.randbits(62) if seed is None else seed & ((1 << 62) - 1)
    choices = _whole(body, "n", 1, 1, MOST_CHOICES)
    return Asked(
        requests=tuple(
            replace(prompt, sampling=sampling, noise=first + index) for index in range(choices)
        ),
        stop=stop,
        stream=stream,
        stream_usage=bool(options.get("include_usage")),
        logprobs=logprobs,
    )


def _max_tokens(body: Mapping[str, Any], served: Served, prompt: int) -> int:
    longest = min(served.data.max_prompt_tokens, served.family.max_positions - 1)
    if prompt > longest:
        raise BadRequest(
            "messages" if "messages" in body else "prompt",
            f"{prompt} tokens, at most {longest} are taken here",
            code="context_length_exceeded",
        )
    most = min(served.sampling.max_tokens, served.family.max_positions - prompt)
    name = "max_completion_tokens" if body.get("max_completion_tokens") else "max_tokens"
    return _whole(body, name, most, 1, most)


def _refuse_unknown(body: Mapping[str, Any]) -> None:
    known = {"model", "messages", "prompt", "stream", "stream_options", "logprobs", "n", "stop"}
    known |= {"temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "seed"}
    known |= {"ignore_eos"} | IGNORED
    for name, value in body.items():
        if name not in known and value is not None and value != NEUTRAL.get(name, ...):
            raise BadRequest(name, "is not served here; leave it out", code="unsupported_parameter")


def _number(
    body: Mapping[str, Any], name: str, default: Any, low: float, high: float, whole: bool = False
) -> Any:
    value = body.get(name)
    if value is None:
        return default
    fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not fits or not low <= value <= high:
        what = "a whole number" if whole else "a number"
        raise BadRequest(name, f"takes {what} from {low} to {high}, not {value!r}")
    return value


_whole = partial(_number, whole=True)


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value not in (None, True, False):
        raise BadRequest(name, f"takes true or false, not {value!r}")
    return bool(value)


def _stop(body: Mapping[str, Any]) -> tuple[str, ...]:
    value = body.get("stop")
    items = [value] if isinstance(value, str) else value or []
    if not isinstance(items, list) or len(items) > MOST_STOPS or not all(items):
        raise BadRequest("stop", f"takes a text or a list of at most {MOST_STOPS} texts")
    return tuple(_string(item, "stop") for item in items)


def _string(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise BadRequest(field, f"takes text, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRequest(field, "holds half a surrogate pair, which is no text") from None
    return value


# -- messages --------------------------------------------------------------------------------------


def _message(item: Any, where: str, data: DataConfig) -> Message:
    if not isinstance(item, Mapping):
        raise BadRequest(where, "give a record with role and content")
    role = ROLES.get(str(item.get("role")))
    if role is None:
        raise BadRequest(f"{where}.role", f"{item.get('role')!r}; roles are {', '.join(ROLES)}")
    content = item.get("content")
    if isinstance(content, str):
        text = _string(content, f"{where}.content")
        return Message(role=role, parts=(text,))  # type: ignore[arg-type]
    if not isinstance(content, list):
        raise BadRequest(f"{where}.content", "give a text or a list of parts")
    parts = tuple(_part(part, f"{where}.content[{i}]", data) for i, part in enumerate(content))
    return Message(role=role, parts=parts)  # type: ignore[arg-type]


def _part(part: Any, where: str, data: DataConfig) -> str | Media:
    kind = str(part.get("type")) if isinstance(part, Mapping) else ""
    if kind not in PARTS:
        raise BadRequest(f"{where}.type", f"{kind!r}; types are {', '.join(PARTS)}")
    return PARTS[kind](part, where, data)


def _text(part: Mapping[str, Any], where: str, data: DataConfig) -> str:
    return _string(part.get("text"), f"{where}.text")


def _image(part: Mapping[str, Any], where: str, data: DataConfig) -> Media:
    value = part.get("image_url")
    url = value.get("url") if isinstance(value, Mapping) else value
    field = f"{where}.image_url.url"
    if not isinstance(url, str) or not url.startswith("data:image/"):
        raise BadRequest(
            field, "only images inside the request are taken: data:image/png;base64,..."
        )
    try:
        media = open_media(url, limits=data)
        decode(media)  # here, where a damaged file costs one request and not the engine
    except SaccadeError as error:
        raise BadRequest(field, str(error)) from None
    return media


PARTS: Mapping[str, Callable[[Mapping[str, Any], str, DataConfig], str | Media]] = {
    "text": _text,
    "image_url": _image,
}
