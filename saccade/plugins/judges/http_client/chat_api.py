"""How endpoints are asked: messages to the body of a request, a reply to an answer. Sends nothing.

`Picture` gives the type and the base64 text of an image, or a name for it where only the identity
of a request matters.

    APIS["chat"].body(messages, picture) | settings(Sampling(temperature=0), seed=7)
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
    body: Callable[[Sequence[Message], Picture], Body]
    text: Callable[[Mapping[str, Any]], str | None]  # of a choice


def settings(sampling: Sampling, seed: int) -> Body:
    """The fields of a request that say how to sample."""
    # Not every server takes these, so they are sent only when they say something.
    optional = {"stop": list(sampling.stop), "top_k": max(0, sampling.top_k)}
    optional["ignore_eos"] = sampling.ignore_eos
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "seed": seed,
        **{name: value for name, value in optional.items() if value},
    }


def read_answer(api: Api, reply: Mapping[str, Any], sampling: Sampling) -> Answer:
    """The answer in a reply; its tokens are estimated where the endpoint does not count them."""
    choice = reply["choices"][0]
    text = api.text(choice) or ""
    # Endpoints cut a stop string off; where they say which it was, it is put back: it belongs to
    # the response.
    ended_by = choice.get("stop_reason") or choice.get("matched_stop")
    if ended_by in sampling.stop and not text.endswith(ended_by):
        text += ended_by
    usage = reply.get("usage") or {}
    prompt, response = usage.get("prompt_tokens"), usage.get("completion_tokens")
    return Answer(
        text=text,
        finish="length" if choice["finish_reason"] == "length" else "stop",
        usage=Usage(
            prompt=int(prompt or 0),
            response=ceil(len(text) / CHARACTERS_PER_TOKEN) if response is None else int(response),
            estimated=prompt is None or response is None,
        ),
    )


def _chat_body(messages: Sequence[Message], picture: Picture) -> Body:
    def part(item: str | Media) -> Body:
        if isinstance(item, str):
            return {"type": "text", "text": item}
        kind, data = picture(item)
        return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}

    written = [{"role": m.role, "content": [part(p) for p in m.parts] if m.media else m.text} for m in messages]
    return {"messages": written}


def _completions_body(messages: Sequence[Message], picture: Picture) -> Body:
    """As a folder without a chat template is asked."""
    if any(message.media for message in messages):
        raise ConfigError(
            "rollout.http.api: completions take text only, and a row holds an image; try rollout.http.api=chat"
        )
    return {"prompt": "".join(f"{m.role}: {m.text}\n" for m in messages) + "assistant:"}


APIS: Mapping[str, Api] = {
    "chat": Api(path="/chat/completions", body=_chat_body, text=lambda choice: choice["message"]["content"]),
    "completions": Api(path="/completions", body=_completions_body, text=lambda choice: choice["text"]),
}
