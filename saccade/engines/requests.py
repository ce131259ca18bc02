"""Checks and conversions of requests that several engines share."""

from __future__ import annotations

from typing import Any

import numpy as np

from saccade.errors import ConfigError, TrainingError
from saccade.types import Completion, Request


def require_room(request: Request, longest: int) -> None:
    """Refuse a request that may exceed `longest` tokens of prompt and response."""
    asked, new = len(request.ids), request.sampling.max_tokens
    if asked + new > longest:
        raise ConfigError(
            f"request {request.key}: {asked} prompt tokens + {new} new ones exceed the {longest} "
            "that the engine holds; lower rollout.max_tokens, or raise data.max_prompt_tokens and "
            "env.max_total_tokens as far as the model's positions allow"
        )


def require_finite(logprobs: np.ndarray) -> None:
    """Refuse log-probs that are not finite, in engines over a copy of the weights."""
    if not np.isfinite(logprobs).all():
        raise TrainingError(
            "log-probs are not finite; `saccade doctor MODEL` names the weight they come from, or "
            "whether a number overflows (model.dtype=float32)"
        )


def content_of(request: Request) -> Any:
    """What must be equal for two requests to share a prefill: ids, and media with their places."""
    media = tuple((span.start, span.media.key) for span in request.media)
    return (request.ids.tobytes(), media)


def collapsed(request: Request) -> list[int]:
    """Ids with one placeholder per image, for an engine that expands it again."""
    for span in request.media:
        if span.media.kind != "image":
            raise ConfigError(
                f"request {request.key}: the prompt has {span.media.kind}, but this engine takes "
                "images only; use rollout.engine=embedded"
            )
    keep = np.ones(len(request.ids), dtype=bool)
    for span in request.media:
        keep[span.start + 1 : span.end] = False
    return request.ids[keep].tolist()


def nothing_sampled(key: str) -> Completion:
    """The completion of a request that was aborted before it was computed."""
    nothing = np.zeros(0)
    return Completion(
        key=key,
        ids=nothing.astype(np.int64),
        logprobs=nothing.astype(np.float32),
        versions=nothing.astype(np.int32),
        finish="aborted",
    )
