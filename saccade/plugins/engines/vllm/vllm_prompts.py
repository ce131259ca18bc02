"""Requests as vLLM takes them.

A prompt is a list of ids with one placeholder per image, which vLLM expands again, and the images
at the size at which the model sees them. The name of an image holds the version of the weights, so
that nothing computed under other weights is found under it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from saccade.engines.requests import collapsed
from saccade.types import Request

GOLDEN = 0x9E3779B97F4A7C15  # spreads small numbers over 64 bits


def prompt_of(request: Request, picture: Callable[[Any], np.ndarray], version: int | None) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt_token_ids": collapsed(request)}
    if request.media:
        shown = [span.media for span in request.media]
        names = ["/".join(map(str, (*media.key, version))) for media in shown]
        prompt["multi_modal_data"] = {"image": [Image.fromarray(picture(m)) for m in shown]}
        prompt["multi_modal_uuids"] = {"image": names}
    return prompt


def params_of(request: Request, eos: list[int]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    # Every id that ends a turn is among `eos`: the end ids of vLLM are switched off.
    params = SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop=list(sampling.stop) or None,
        include_stop_str_in_output=True,
        ignore_eos=True,
        stop_token_ids=None if sampling.ignore_eos else eos,
        seed=(request.noise + request.first_index * GOLDEN) & (2**63 - 1),
        logprobs=0,  # of the sampled token alone
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    params.flat_logprobs = True
    if sampling.first is not None and not request.first_index:
        params.extra_args = {"first": list(sampling.first)}
    return params
