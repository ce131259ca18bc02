"""Requests as SGLang takes them, and completions from its answers. The same fields serve its Python
engine and its HTTP server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from saccade.engines.requests import collapsed
from saccade.errors import ConfigError, EnvironmentProblem
from saccade.models.families import Family
from saccade.types import Completion, Media, Request

BANNED = -1e9  # added to a logit; JSON has no infinity
FINISH = {"stop": "stop", "length": "length", "abort": "aborted"}


def body_of(request: Request, family: Family, encode: Callable[[Media], str], version: int) -> dict[str, Any]:
    """One placeholder per image, which SGLang expands again."""
    sampling = request.sampling
    if sampling.first is not None:
        raise ConfigError(
            "rollout.engine=sglang draws every token alike; use "
            "algorithm.hot_first_token.temperature=0, or rollout.engine=embedded"
        )
    body: dict[str, Any] = {
        "input_ids": collapsed(request),
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop": list(sampling.stop),
            # Every id that ends a turn is among these: the end ids of SGLang are switched off.
            "stop_token_ids": [] if sampling.ignore_eos else sorted(family.chat.eos_ids),
            "ignore_eos": True,
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "logit_bias": {str(i): BANNED for i in np.flatnonzero(family.banned)},
            # Read together with the position, where SGLang runs with deterministic inference.
            "sampling_seed": request.noise,
        },
    }
    if request.media:
        shown = [span.media for span in request.media]
        body["image_data"] = [encode(media) for media in shown]
        body["mm_hashes"] = [_name(media, version) for media in shown]
    return body


def _name(media: Media, version: int) -> str:
    """64 bits under which SGLang keeps what it computed of an image."""
    content = "/".join(map(str, (*media.key, version)))
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def completion_of(request: Request, answer: Mapping[str, Any], *, version: int, aborted: bool) -> Completion:
    info = answer["meta_info"]
    reason = info["finish_reason"]
    if reason["type"] == "abort" and not aborted:
        raise EnvironmentProblem(f"sglang gave up request {request.key}: {reason.get('message')}; see its log")
    _compare_prompt(request, answer, aborted)
    triples = info.get("output_token_logprobs") or []  # (log-prob, id, text); none if it waited
    return Completion(
        key=request.key,
        ids=np.array([triple[1] for triple in triples], dtype=np.int64),
        logprobs=np.array([triple[0] for triple in triples], dtype=np.float32),
        versions=np.full(len(triples), version, dtype=np.int32),
        finish="aborted" if aborted else FINISH[reason["type"]],  # type: ignore[arg-type]
    )


def _compare_prompt(request: Request, answer: Mapping[str, Any], aborted: bool) -> None:
    """Refuse other ids than were sent, where the answer holds them, or another number of them."""
    count = answer["meta_info"].get("prompt_tokens", len(request.ids) if aborted else None)
    ids = answer.get("prompt_token_ids", request.ids)
    if count != len(request.ids) or not np.array_equal(ids, request.ids):
        raise EnvironmentProblem(
            f"request {request.key}: sglang reads {count} prompt tokens where we have "
            f"{len(request.ids)}, or others: it expands images or text differently; compare the "
            "preprocessor_config.json of the model, or use rollout.engine=embedded"
        )
