"""The gated delta rule over segments of any length, each from a state of its own: by flash-linear-attention on a GPU
in half precision where it is installed, else by transformers' functions on padded batches.

    out, states = delta_rule((q, k, v, decay, share), lengths, ends, states)

Legend: T tokens, N segments, H heads, D and V size of a key and of a value.
"""

import inspect
import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.forest.attention import HALF
from saccade.forest.device_ops import to_device

log = logging.getLogger(__name__)
OPTIONS = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}


@cache
def fast_rules() -> Any:
    """flash-linear-attention, if it is installed."""
    try:
        from fla.ops import gated_delta_rule
    except ImportError:
        return None
    return gated_delta_rule


@cache
def _learns() -> bool:
    """Whether its backward runs here: with some versions of Triton it refuses to on some GPUs."""
    x = torch.ones((1, 16, 1, 16), device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gate = torch.zeros((1, 16, 1), device="cuda")
    try:
        fast_rules().chunk_gated_delta_rule(x, x, x, g=gate, beta=gate, **OPTIONS)[0].sum().backward()
    except RuntimeError as error:
        log.warning(f"recurrent layers learn in plain torch, which is slow: {error}")
        return False
    return True


def delta_rule(given: Sequence[Tensor], lengths: np.ndarray, ends: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """`given`: q and k [T, H, D], v [T, H, V]; [T, H]: decay, whose exponential scales the state, and the share of the
    new value. `lengths` [N] and `ends` [N + 1] of segments; states [N, H, D, V] in float32. Returns [T, H, V], and the
    state behind each segment.
    """
    q, k, v, decay, share = given
    single = len(lengths) == len(q)
    learning = torch.is_grad_enabled()
    if q.is_cuda and q.dtype in HALF and (fast := fast_rules()) is not None and (not learning or _learns()):
        one = single and not learning  # that rule has no backward
        rule = fast.fused_recurrent_gated_delta_rule if one else fast.chunk_gated_delta_rule
        row = (x.unsqueeze(0) for x in (q, k, v))
        gates = {"g": decay.unsqueeze(0), "beta": share.unsqueeze(0)}
        out, after = rule(*row, **gates, initial_state=states, cu_seqlens=ends, **OPTIONS)
        return out.squeeze(0), after
    from transformers.models.qwen3_next import modeling_qwen3_next as slow

    rule = slow.torch_recurrent_gated_delta_rule if single else slow.torch_chunk_gated_delta_rule
    rule = inspect.unwrap(rule)  # its wrapper prefers flash-linear-attention everywhere
    out, after = v.new_zeros(v.shape), torch.zeros_like(states)
    starts = lengths.cumsum() - lengths
    sizes = np.ceil(np.log2(lengths)).astype(np.int64)
    for size in np.unique(sizes):
        rows = np.flatnonzero(sizes == size)
        places = starts[rows, None] + np.arange(lengths[rows].max())
        valid = to_device(np.arange(places.shape[1]) < lengths[rows, None], q.device)
        index, some = to_device(np.minimum(places, len(q) - 1), q.device), to_device(rows, q.device)
        # Padding has no share, and no decay: it leaves the state as it is.
        batch = (x[index] for x in (q, k, v))
        gates = {"g": decay[index] * valid[..., None], "beta": share[index] * valid[..., None]}
        padded, final = rule(*batch, **gates, initial_state=states[some], **OPTIONS)
        out = out.index_put((index[valid],), padded[valid].to(out.dtype))
        after = after.index_put((some,), final)
    return out, after
