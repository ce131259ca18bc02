"""How kinds of endpoints are spoken to: messages to the body of a request, a reply to an answer.

Sends nothing. `Picture` gives the type and the base64 text of an image, or a name for it where only
the identity of a request matters.

    APIS["chat"].body(messages, Sampling(temperature=0), 7, picture)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

from saccade.errors import ConfigError
from saccade.types import Media, Message, Sampling

Picture = Callable[[Media], tuple[str, str]]
Body = dict[str, Any]
CHARACTERS_PER_TOKEN = 4  # of an answer whose tokens the endpoint does not count


@dataclass(frozen=True, kw_only=True)
class Usage:
    prompt: int
    response: int
    estimated: bool = False


@dataclass(frozen=True, kw_only=True)
class Answer:
    text: str
    finish: Literal["stop", "length"]
    usage: Usage


@dataclass(frozen=True, kw_only=True)
class Api:
    path: str
    headers: Callable[[str], dict[str, str]]  # of a key
    body: Callable[[Sequence[Message], Sampling, int, Picture], Body]
    answer: Callable[[Mapping[str, Any], Sampling], Answer]


# -- OpenAI ----------------------------------------------------------------------------------------


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _settings(sampling: Sampling, seed: int) -> Body:
    settings: Body = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "seed": seed,
    }
    # Not every server knows these, so they are sent only when they say something.
    optional = {"stop": list(sampling.stop), "top_k": max(0, sampling.top_k)}
    optional["ignore_eos"] = sampling.ignore_eos
    return settings | {name: value for name, value in optional.items() if value}


def _chat_body(
    messages: Sequence[Message], sampling: Sampling, seed: int, picture: Picture
) -> Body:
    def part(item: str | Media) -> Body:
        if isinstance(item, str):
            return {"type": "text", "text": item}
        kind, data = picture(item)
        return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}

    written = [
        {"role": m.role, "content": [part(p) for p in m.parts] if m.media else m.text}
        for m in messages
    ]
    return {"messages": written, **_settings(sampling, seed)}


def _completions_body(
    messages: Sequence[Message], sampling: Sampling, seed: int, picture: Picture
) -> Body:
    """As a folder without a chat template is asked."""
    if any(message.media for message in messages):
        raise ConfigError(
            "rollout.http.api: completions take text only, and a row holds an image; "
            "try rollout.http.api=chat"
        )
    prompt = "".join(f"{m.role}: {m.text}\n" for m in messages) + "assistant:"
    return {"prompt": prompt, **_settings(sampling, seed)}


def _chat_answer(reply: Mapping[str, Any], sampling: Sampling) -> Answer:
    return _openai_answer(reply, sampling, lambda choice: choice["message"]["content"])


def _completions_answer(reply: Mapping[str, Any], sampling: Sampling) -> Answer:
    return _openai_answer(reply, sampling, lambda choice: choice["text"])


def _openai_answer(
    reply: Mapping[str, Any], sampling: Sampling, text_of: Callable[[Mapping[str, Any]], str | None]
) -> Answer:
    choice = reply["choices"][0]
    text = text_of(choice) or ""
    # Endpoints cut a stop string off; where they say which it was, it is put back: it belongs to
    # the response.
    ended_by = choice.get("stop_reason") or choice.get("matched_stop")
    if ended_by in sampling.stop and not text.endswith(ended_by):
        text += ended_by
    usage = reply.get("usage") or {}
    return Answer(
        text=text,
        finish="length" if choice["finish_reason"] == "length" else "stop",
        usage=_usage(usage.get("prompt_tokens"), usage.get("completion_tokens"), text),
    )


# -- Anthropic -------------------------------------------------------------------------------------


def _anthropic_headers(key: str) -> dict[str, str]:
    return {"anthropic-version": "2023-06-01", **({"x-api-key": key} if key else {})}


def _anthropic_body(
    messages: Sequence[Message], sampling: Sampling, seed: int, picture: Picture
) -> Body:
    def part(item: str | Media) -> Body:
        if isinstance(item, str):
            return {"type": "text", "text": item}
        kind, data = picture(item)
        return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}

    system = "\n\n".join(m.text for m in messages if m.role == "system")
    body: Body = {
        "messages": [
            {
                "role": "assistant" if m.role == "assistant" else "user",
                "content": [part(p) for p in m.parts],
            }
            for m in messages
            if m.role != "system"
        ],
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
    }
    optional: Body = {"system": system, "stop_sequences": list(sampling.stop)}
    optional |= {"top_k": max(0, sampling.top_k)}
    optional |= {"top_p": sampling.top_p if sampling.top_p < 1 else None}
    return body | {name: value for name, value in optional.items() if value}


def _anthropic_answer(reply: Mapping[str, Any], sampling: Sampling) -> Answer:
    text = "".join(block["text"] for block in reply["content"] if block["type"] == "text")
    reason = reply["stop_reason"]
    if reason == "stop_sequence":
        text += reply["stop_sequence"]
    usage = reply.get("usage") or {}
    cut = reason in ("max_tokens", "model_context_window_exceeded")
    return Answer(
        text=text,
        finish="length" if cut else "stop",
        usage=_usage(usage.get("input_tokens"), usage.get("output_tokens"), text),
    )


def _usage(prompt: int | None, response: int | None, text: str) -> Usage:
    if prompt is None or response is None:
        guess = ceil(len(text) / CHARACTERS_PER_TOKEN)
        return Usage(prompt=prompt or 0, response=response or guess, estimated=True)
    return Usage(prompt=int(prompt), response=int(response))


APIS: Mapping[str, Api] = {
    "chat": Api(path="/chat/completions", headers=_bearer, body=_chat_body, answer=_chat_answer),
    "completions": Api(
        path="/completions", headers=_bearer, body=_completions_body, answer=_completions_answer
    ),
    "anthropic": Api(
        path="/messages",
        headers=_anthropic_headers,
        body=_anthropic_body,
        answer=_anthropic_answer,
    ),
}
