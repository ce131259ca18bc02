"""One step of flash-linear-attention's backward in torch, for GPUs on which it refuses its own kernel: with Triton 3.4
to 3.7.0 that computes wrong gradients on Hopper. All other steps use its kernels.

    take_over()     # from now on the backward of chunk_gated_delta_rule runs there

A chunk with queries q, keys k, cumulative decays 2^g and corrections v (v = u - w S, with the state S before the chunk)
has these outputs and next state:

    out = scale (2^g q S + (q k^T where it is causal, 2^(g_i - g_j)) v)
    next S = 2^g_last S + (2^(g_last - g) k)^T v

Given the gradients of its outputs, its corrections and the next state, those of q, k, w and g are matrix products,
computed for many chunks at once.

Legend: T tokens, N segments, M chunks of L tokens, H heads, D and V size of a key and of a value.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

AT_ONCE = 256  # chunks, to bound the memory of padded float32 tensors


def take_over() -> None:
    """Make flash-linear-attention call this step instead of its own."""
    from fla.backends import BaseBackend, register

    @register("common")
    class TorchStep(BaseBackend):
        backend_type = "saccade"

        def chunk_bwd_dqkwg_verifier(self, **given: Any) -> tuple[bool, str]:
            return given.get("cu_seqlens") is not None, "of packed segments alone"

        def chunk_bwd_dqkwg(self, **given: Any) -> tuple[Tensor, ...]:
            return chunk_gradients(**given)


def chunk_gradients(*, cu_seqlens: Tensor, chunk_indices: Tensor, chunk_size: int, **given: Any) -> tuple[Tensor, ...]:
    """Argument names are those of flash-linear-attention: [1, T, H, …] per token; [1, M, H, D, V] states before chunks,
    and gradients of the states after them; `chunk_indices` [M, 2]: segment, and chunk in it. Returns the gradients of
    q, k, w and g, that of g without the sum over the rest of its chunk.
    """
    q, k, v, do, dv, g, h, dh = (given[name] for name in ("q", "k", "v", "do", "dv", "g", "h", "dh"))
    segment, number = chunk_indices.long().unbind(1)
    starts = cu_seqlens[segment] + number * chunk_size
    sizes = (cu_seqlens[segment + 1] - starts).clamp(max=chunk_size)
    place = torch.arange(chunk_size, device=q.device)
    inside = place < sizes[:, None]  # [M, L]
    tokens = torch.where(inside, starts[:, None] + place, q.shape[1])  # padding: the row of zeros after the last token
    last = (place == sizes[:, None] - 1)[:, None]  # [M, 1, L]
    padded = [pad(x[0], (0, 0) * (x.ndim - 2) + (0, 1)) for x in (q, k, v, do, dv, g)]
    ahead = torch.ones((chunk_size,) * 2, dtype=torch.bool, device=q.device).triu(1)
    found = []
    for at, ends, state, after in zip(*(x.split(AT_ONCE) for x in (tokens, last, h[0], dh[0])), strict=True):
        query, key, new, to_out, to_new, decay = (x[at].transpose(1, 2).contiguous() for x in padded)  # [M, H, L, …]
        until = (decay * ends).sum(-1, keepdim=True)
        decay = torch.where((at < q.shape[1])[:, None], decay, until)  # so that no difference is above 0
        between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(ahead, -torch.inf).exp2()
        among = (_product(to_out, new.mT) * between * given["scale"]).to(key.dtype)
        to_query = _product(to_out, state.mT) * (decay.exp2() * given["scale"]).unsqueeze(-1) + _product(among, key)
        carried = _product(new, after.mT) * (until - decay).exp2().unsqueeze(-1)
        to_key = carried + _product(among.mT, query)
        to_decay = (to_query * query - to_key * key).sum(-1)
        to_last = until.exp2() * (state.float() * after).sum((-2, -1)).unsqueeze(-1)
        to_decay += ends * (to_last + (carried * key).sum((-2, -1)).unsqueeze(-1))
        made = to_query.to(q.dtype), to_key.to(k.dtype), -_product(to_new, state.mT).to(k.dtype), to_decay
        found.append([x.transpose(1, 2).flatten(0, 1) for x in made])
    # The chunks hold the tokens in order, with padding between them.
    slots = torch.empty(q.shape[1] + 1, dtype=torch.int64, device=q.device)
    slots[tokens.flatten()] = torch.arange(tokens.numel(), device=q.device)
    return tuple(torch.cat(parts).index_select(0, slots[:-1]).unsqueeze(0) for parts in zip(*found, strict=True))


def _product(x: Tensor, y: Tensor) -> Tensor:
    """Batched product in float32 of matrices in half precision."""
    if x.dtype == torch.float32:
        return x @ y
    return torch.bmm(x.flatten(0, 1), y.flatten(0, 1), out_dtype=torch.float32).unflatten(0, x.shape[:2])
