"""Sampling with noise that is keyed, not drawn: the token at index i of a trajectory depends on its
key, i and the logits alone, never on which other sequences share the batch.

    drawn = sample(logits, Sampling(temperature=1.0), banned=None, keys=keys, index=index)

Legend: B sequences, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.forest.logprobs import sampling_logits
from saccade.types import Sampling


@dataclass(frozen=True, kw_only=True)
class Drawn:
    ids: Tensor  # [B]
    logprobs: Tensor  # [B] fp32, of the distribution that was sampled from
    kept: Tensor | None  # [B, V] bool, when sampling was truncated


def sample(
    logits: Tensor, sampling: Sampling, *, banned: Tensor | None, keys: Tensor, index: Tensor
) -> Drawn:
    """logits [B, V] straight from the head; keys and index [B] int64 name the noise of each row."""
    greedy = sampling.temperature == 0
    scores = sampling_logits(logits, 1.0 if greedy else sampling.temperature, banned)
    kept = None
    if sampling.truncated and not greedy:
        kept = kept_ids(scores, sampling.top_k, sampling.top_p)
        scores = scores.masked_fill(~kept, -torch.inf)
    if greedy:
        ids = scores.argmax(-1)
    else:
        # argmax(z + Gumbel noise) is a draw from softmax(z).
        ids = (scores + keyed_gumbel(keys, index, scores.shape[-1])).argmax(-1)
    chosen = scores.gather(-1, ids[:, None]).squeeze(-1)
    return Drawn(ids=ids, logprobs=chosen - scores.logsumexp(-1), kept=kept)


def kept_ids(scores: Tensor, top_k: int, top_p: float) -> Tensor:
    """[B, V] bool: the k likeliest, then the fewest whose mass reaches p. One at least is kept; of
    ids that are equally likely the lower ones.
    """
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    keep = ordered > -torch.inf
    if top_k > 0:
        keep[:, top_k:] = False
        ordered = ordered.masked_fill(~keep, -torch.inf)
    if top_p < 1:
        mass = ordered.softmax(-1)
        keep &= mass.cumsum(-1) - mass < top_p
    return torch.zeros_like(keep).scatter(-1, order, keep)


def keyed_gumbel(keys: Tensor, index: Tensor, vocabulary: int) -> Tensor:
    """[B, V] Gumbel noise, a pure function of (key, index, id). The hash wraps around in int32 on
    every device.
    """
    row = _mix(_low(keys) ^ _mix(_low(keys >> 32) ^ _mix(_low(index + 0x51ED27))))
    column = torch.arange(vocabulary, device=keys.device, dtype=torch.int32) * _int32(0x9E3779B9)
    bits = _mix(row[:, None] + column[None, :])
    uniform = ((bits >> 8) & 0x7FFFFF).float().add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32 bits in which every input bit flips about half of the output bits."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _int32(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def _low(x: Tensor) -> Tensor:
    """The low 32 bits as int32."""
    x = x & 0xFFFFFFFF
    return torch.where(x >= 1 << 31, x - (1 << 32), x).to(torch.int32)


def _int32(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x
