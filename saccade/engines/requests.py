"""What several engines do with a request before or instead of computing it."""

from __future__ import annotations

from typing import Any

import numpy as np

from saccade.errors import ConfigError, TrainingError
from saccade.types import Completion, Request


def require_room(request: Request, longest: int) -> None:
    """`longest`: tokens of a prompt and its response that an engine holds."""
    asked, new = len(request.ids), request.sampling.max_tokens
    if asked + new > longest:
        raise ConfigError(
            f"request {request.key}: {asked} prompt tokens + {new} new ones exceed the {longest} "
            "that the engine holds; lower rollout.max_tokens, or raise data.max_prompt_tokens and "
            "env.max_total_tokens as far as the model's positions allow"
        )


def require_finite(logprobs: np.ndarray) -> None:
    """For engines over a copy of the weights, where nobody trains."""
    if not np.isfinite(logprobs).all():
        raise TrainingError(
            "log-probs are not finite; `saccade doctor MODEL` names the weight they come from, or "
            "whether a number overflows (model.dtype=float32)"
        )


def content_of(request: Request) -> Any:
    """What must be equal for two requests to share a prefill."""
    media = tuple((span.start, span.media.key) for span in request.media)
    return (request.ids.tobytes(), media)


def collapsed(request: Request) -> list[int]:
    """Ids with one placeholder per image, for an engine that expands it again."""
    for span in request.media:
        if span.media.kind != "image":
            raise ConfigError(
                f"request {request.key}: a prompt with {span.media.kind}, and this engine is sent "
                "images only; use rollout.engine=embedded"
            )
    keep = np.ones(len(request.ids), dtype=bool)
    for span in request.media:
        keep[span.start + 1 : span.end] = False
    return request.ids[keep].tolist()


def nothing_sampled(key: str) -> Completion:
    """Of a request that was aborted before it was computed."""
    nothing = np.zeros(0)
    return Completion(
        key=key,
        ids=nothing.astype(np.int64),
        logprobs=nothing.astype(np.float32),
        versions=nothing.astype(np.int32),
        finish="aborted",
    )
