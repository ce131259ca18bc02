"""The gated delta rule, with gradients, over segments of any length, each with its own initial state: in plain torch,
or by flash-linear-attention on a GPU in half precision, if it is installed and runs.

    out, states = delta_rule((q, k, v, decay, share), lengths, ends, states)

For each token t, a head's state S [D, V] decays, is corrected towards the token's value, and is read with its query:

    S = exp(decay_t) S
    S = S + share_t k_t (v_t - S^T k_t)^T
    out_t = S^T q_t / sqrt(D), with q and k of length 1

In chunks of up to CHUNK tokens ("Gated Delta Networks", arXiv 2412.06464): the corrections of a chunk are the solution
of a triangular system, so everything that does not need the state before a chunk is computed for all chunks at once, as
matrix products. Only differences of decays that are at most 0 are exponentiated, so nothing overflows.

Legend: T tokens, N segments, H heads, D and V size of a key and of a value, M chunks, L tokens of a chunk.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.forest.attention import HALF
from saccade.forest.device_ops import to_device
from saccade.plugins.linear.torch_step import take_over

log = logging.getLogger(__name__)
CHUNK = 64
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
def _learns(device: torch.device) -> bool:
    """Whether the backward of flash-linear-attention runs on this device; if it refuses one step, with that step in
    torch. Tried in another thread, so that activation checkpointing, which records this thread's tensors, misses it.
    """

    def attempt() -> None:
        with torch.cuda.device(device):
            x = torch.ones((1, 16, 1, 16), device=device, dtype=torch.bfloat16, requires_grad=True)
            gate, ends = torch.zeros((1, 16, 1), device=device), torch.tensor([0, 16], device=device)
            given = {"g": gate, "beta": gate, "cu_seqlens": ends, **OPTIONS}
            fast_rules().chunk_gated_delta_rule(x, x, x, **given)[0].sum().backward()

    with ThreadPoolExecutor(1) as thread:
        for prepare in (None, take_over):
            try:
                if prepare is not None:
                    prepare()
                thread.submit(attempt).result()
                return True
            except (ImportError, RuntimeError) as error:
                log.info(f"flash-linear-attention on {device}: {error}")
    log.info("recurrent layers learn in plain torch")
    return False


def delta_rule(given: Sequence[Tensor], lengths: np.ndarray, ends: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """`given`: q and k [T, H, D], v [T, H, V], decay [T, H], whose exponential scales the state, and share [T, H] of
    the new value. `lengths` [N] and `ends` [N + 1] of segments; initial `states` [N, H, D, V] in float32. Returns the
    outputs [T, H, V], and the state after each segment.
    """
    q, k, v, decay, share = given
    learning = torch.is_grad_enabled()
    if q.is_cuda and q.dtype in HALF and (fast := fast_rules()) is not None and (not learning or _learns(q.device)):
        row = (x.unsqueeze(0) for x in (q, k, v))
        gates = {"g": decay.unsqueeze(0), "beta": share.unsqueeze(0)}
        out, after = fast.chunk_gated_delta_rule(*row, **gates, initial_state=states, cu_seqlens=ends, **OPTIONS)
        return out.squeeze(0), after
    # Chunks are ordered by their index in the segment, longest segments first: those that continue are a prefix.
    size = min(CHUNK, 1 << (int(lengths.max()) - 1).bit_length())
    order = np.argsort(-lengths, kind="stable")
    counts = -(-lengths[order] // size)
    going = [int((counts > step).sum()) for step in range(counts[0])]
    first = np.concatenate([[0], np.cumsum(going)])
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    segment = np.repeat(np.arange(len(lengths)), lengths)
    offset = np.arange(len(segment)) - (lengths.cumsum() - lengths)[segment]
    places = to_device((first[offset // size] + rank[segment]) * size + offset % size, q.device)
    padded = [_chunks(x, places, int(first[-1]), size) for x in given]
    rows, back = to_device(order, q.device), to_device(rank, q.device)
    out, after = _chunked(padded, going, states.index_select(0, rows))
    return out.transpose(1, 2).flatten(0, 1).index_select(0, places).to(v.dtype), after.index_select(0, back)


def _chunks(x: Tensor, places: Tensor, count: int, size: int) -> Tensor:
    """[T, H, …] → [M, H, L, …] in float32. Padding has a share and a decay of 0, which leave the state unchanged."""
    padded = x.new_zeros((count * size, *x.shape[1:])).index_copy(0, places, x)
    return padded.unflatten(0, (count, size)).transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format)


def _chunked(given: Sequence[Tensor], going: Sequence[int], states: Tensor) -> tuple[Tensor, Tensor]:
    """[M, H, L, …] each, of which step n takes the next `going[n]` → outputs [M, H, L, V], and the final states."""
    q, k, v, decay, share = given
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    total = decay.cumsum(-1)  # within each chunk
    ahead = torch.ones((q.shape[2],) * 2, dtype=torch.bool, device=q.device).triu(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(ahead, -torch.inf).exp()
    share, since = share.unsqueeze(-1), total.exp().unsqueeze(-1)
    inverse = _Inverse.apply((share * k) @ k.mT * between)
    wanted, said = inverse @ (share * v), inverse @ (share * since * k)
    among = (q @ k.mT) * between
    asked, until = q * since, k * (total[..., -1:] - total).exp().unsqueeze(-1)
    whole = total[..., -1, None, None].exp()
    steps = [x.split(list(going)) for x in (wanted, said, asked, until, whole)]
    corrections, found, done = [], [], []
    for new, known, query, key, kept in zip(*steps, strict=True):
        if len(new) < len(states):
            done.append(states[len(new) :])
            states = states[: len(new)]
        change = new - known @ states
        corrections.append(change)
        found.append(query @ states)
        states = states * kept + key.mT @ change
    return torch.cat(found) + among @ torch.cat(corrections), torch.cat([states, *reversed(done)])


class _Inverse(torch.autograd.Function):
    """(1 + A)^-1 for A [..., L, L], L a power of two; only entries of A below its diagonal are used. Blocks of 1, 2, …
    along the diagonal are inverted from pairs of smaller ones: as exact as solving row by row, in batched products.
    """

    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        *batch, size, _ = lower.shape
        found = lower.new_ones((*batch, size, 1, 1))
        while (width := found.shape[-1]) < size:
            pairs = lower.unflatten(-1, (-1, 2, width)).unflatten(-4, (-1, 2, width))
            below = pairs[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
            upper, low = found[..., 0::2, :, :], found[..., 1::2, :, :]
            wider = found.new_zeros((*batch, size // width // 2, 2 * width, 2 * width))
            wider[..., :width, :width], wider[..., width:, width:] = upper, low
            wider[..., width:, :width] = -_product(_product(low, below), upper)
            found = wider
        inverse = found.squeeze(-3)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, to_inverse: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ to_inverse @ inverse.mT).tril(-1)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """Batched matrix product; small matrices elementwise, because a GPU would use a thread block for each of them."""
    return x @ y if x.shape[-1] >= 16 else (x.unsqueeze(-1) * y.unsqueeze(-3)).sum(-2)
