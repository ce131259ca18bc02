"""What clients read: choices, pieces of a stream, log-probs and errors in OpenAI's form.

CHAT.choice(0, "4", "stop")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from saccade.models.families import Family
from saccade.serving.text import BROKEN
from saccade.types import Completion

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
    content = [
        {
            "token": token,
            "logprob": logprob,
            "bytes": None if BROKEN in token else list(token.encode()),
            "top_logprobs": [],
        }
        for token, logprob in zip(tokens, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _text_logprobs(tokens: Sequence[str], logprobs: Sequence[float]) -> Json:
    ends = list(accumulate(map(len, tokens), initial=0))
    return {
        "tokens": list(tokens),
        "token_logprobs": list(logprobs),
        "top_logprobs": None,
        "text_offset": ends[:-1],
    }


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


def logprobs_of(style: Style, family: Family, completion: Completion) -> Json:
    tokens = [family.chat.decode([token], special=True) for token in completion.ids.tolist()]
    return style.logprobs(tokens, [float(value) for value in completion.logprobs])


def ending(finish: str | None, stopped_by: str | None) -> Json:
    return {"finish_reason": finish, "stop_reason": stopped_by}


def usage(prompt: int, completions: Sequence[Completion]) -> Json:
    written = sum(len(completion.ids) for completion in completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
    }


def error(message: str, field: str | None, code: str, status: int) -> Mapping[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": field, "code": code or None}}
