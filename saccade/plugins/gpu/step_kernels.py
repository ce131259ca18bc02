"""Triton kernels of recurrent layers for one new token per sequence: short convolution, gated delta rule, and the
gated norm after it. Convolution and delta rule update the states of sequences in place.

Kernels read the address of the states on the device, so captured graphs stay valid when the states are reallocated.
A row whose length is negative is idle: it changes nothing and returns zeros.

    mixed = convolve_step(mixed, weight, None, tails=address, rows=rows, lengths=lengths)
    out = delta_step(mixed, share, decay, A_log, dt_bias, heads=(16, 32, 128, 128), states=address, …)
    out = gate_step(out, gate, norm_weight, epsilon)

Legend: B rows, C channels of the convolution, K its width, G key heads, H heads, D and V size of a key and of a value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHANNELS = 512  # per program
COLUMNS = 32  # elements of a head's value per program


def convolve_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, tails: Tensor, rows: Tensor, lengths: Tensor, silu: bool = True
) -> Tensor:
    """x [B, C], weight [C, 1, K] → the causal convolution [B, C], or its silu. `tails`: address of the K - 1 tokens
    before, [K - 1, C] in the dtype of x for each state row; `rows` [B]: row of each sequence there.
    """
    count, channels = x.shape
    assert x.stride(1) == 1 and weight.is_contiguous()
    out = torch.empty((count, channels), dtype=x.dtype, device=x.device)
    _convolve[(count, triton.cdiv(channels, CHANNELS))](
        x, weight, bias, out, tails, rows, lengths, x.stride(0), C=channels, K=weight.shape[-1], SILU=silu,
        BLOCK=CHANNELS, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _convolve(
    x, weight, bias, out, tails, rows, lengths, x_row,
    C: tl.constexpr, K: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip  # pragma: no cover - runs on the GPU
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = channel < C
    dtype = out.dtype.element_ty
    given = tl.zeros([BLOCK], tl.float32)
    if tl.load(lengths + row) >= 0:
        new = tl.load(x + row * x_row + channel, mask=real, other=0.0)
        total = new.to(tl.float32) * tl.load(weight + channel * K + K - 1, mask=real, other=0.0).to(tl.float32)
        before = tl.load(tails).to(tl.pointer_type(dtype)) + tl.load(rows + row).to(tl.int64) * ((K - 1) * C)
        for i in tl.static_range(K - 1):
            old = tl.load(before + i * C + channel, mask=real, other=0.0)
            total += old.to(tl.float32) * tl.load(weight + channel * K + i, mask=real, other=0.0).to(tl.float32)
            if i > 0:
                tl.store(before + (i - 1) * C + channel, old, mask=real)
        if K > 1:
            tl.store(before + (K - 2) * C + channel, new, mask=real)
        if bias is not None:
            total += tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)
        given = total.to(dtype).to(tl.float32)  # rounded, as the result of a separate convolution
        if SILU:
            given = given / (1.0 + tl.exp(-given))
    tl.store(out + row * C + channel, given.to(dtype), mask=real)


def delta_step(
    mixed: Tensor,
    share: Tensor,
    decay: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    heads: tuple[int, int, int, int],
    states: Tensor,
    rows: Tensor,
    lengths: Tensor,
) -> Tensor:
    """mixed [B, 2 · G · D + H · V] (queries, keys, values), share and decay [B, H] (raw projections), A_log and dt_bias
    [H], heads (G, H, D, V) → [B, H, V]. `states`: address of the float32 states [H, D, V]; `rows` [B]: rows there.
    """
    key_heads, count, size, wide = heads
    assert mixed.is_contiguous()
    share, decay = (x if x.stride(1) == 1 else x.contiguous() for x in (share, decay))  # may be strided in Qwen3-Next
    out = torch.empty((len(mixed), count, wide), dtype=mixed.dtype, device=mixed.device)
    block = min(COLUMNS, triton.next_power_of_2(wide))
    _delta[(len(mixed), count, triton.cdiv(wide, block))](
        mixed, share, decay, A_log, dt_bias, out, states, rows, lengths, share.stride(0), decay.stride(0), size**-0.5,
        G=key_heads, H=count, D=size, V=wide, LINES=triton.next_power_of_2(size), BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _delta(
    mixed, share, decay, A_log, dt_bias, out, states, rows, lengths, share_row, decay_row, scale,
    G: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip  # pragma: no cover - runs on the GPU
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line = tl.arange(0, LINES)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    tall, real = line < D, column < V
    given = tl.zeros([BLOCK], tl.float32)
    if tl.load(lengths + row) >= 0:
        at = mixed + row * (2 * G * D + H * V)
        lane = head // (H // G) * D + line
        query = tl.load(at + lane, mask=tall, other=0.0).to(tl.float32)
        key = tl.load(at + G * D + lane, mask=tall, other=0.0).to(tl.float32)
        value = tl.load(at + 2 * G * D + head * V + column, mask=real, other=0.0).to(tl.float32)
        query = query * (tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * scale)
        key = key * tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
        part = 1.0 / (1.0 + tl.exp(-tl.load(share + row * share_row + head).to(tl.float32)))
        part = part.to(share.dtype.element_ty).to(tl.float32)  # rounded, as the result of a separate sigmoid
        step = tl.load(decay + row * decay_row + head).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
        grown = tl.exp(tl.minimum(step, 20.0))
        sure = 1.0 + grown  # log(1 + x), accurate for small x too
        soft = tl.where(sure == 1.0, grown, tl.log(sure) * (grown / tl.where(sure == 1.0, 1.0, sure - 1.0)))
        soft = tl.where(step > 20.0, step, soft)
        kept = tl.exp(-tl.exp(tl.load(A_log + head).to(tl.float32)) * soft)
        base = tl.load(states).to(tl.pointer_type(tl.float32)) + (tl.load(rows + row).to(tl.int64) * H + head) * (D * V)
        place = tl.multiple_of(base + line[:, None] * V + column[None, :], [1, 16])
        inside = tall[:, None] & real[None, :]
        state = tl.load(place, mask=inside, other=0.0) * kept
        change = (value - tl.sum(state * key[:, None], 0)) * part
        state += key[:, None] * change[None, :]
        tl.store(place, state, mask=inside)
        given = tl.sum(state * query[:, None], 0)
    tl.store(out + (row * H + head) * V + column, given.to(out.dtype.element_ty), mask=real)


def gate_step(x: Tensor, gate: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x and gate [B, H, V] → RMS norm of each head of x, times silu(gate)."""
    count, heads, size = x.shape
    assert x.is_contiguous() and gate.stride(2) == 1
    out = torch.empty_like(x)
    _gate[(count, heads)](
        x, gate, weight, out, epsilon, gate.stride(0), gate.stride(1), V=size, BLOCK=triton.next_power_of_2(size),
        num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def _gate(
    x, gate, weight, out, epsilon, gate_row, gate_head, V: tl.constexpr, BLOCK: tl.constexpr
):  # pragma: no cover - runs on the GPU
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    real = column < V
    at = (row * tl.num_programs(1) + head) * V + column
    dtype = out.dtype.element_ty
    value = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
    value = (value * tl.rsqrt(tl.sum(value * value, 0) / V + epsilon)).to(dtype)
    gain = tl.load(weight + column, mask=real, other=0.0)
    opened = tl.load(gate + row * gate_row + head * gate_head + column, mask=real, other=0.0).to(tl.float32)
    normed = (gain.to(tl.float32) * value.to(tl.float32)).to(dtype).to(tl.float32)
    tl.store(out + at, (normed * (opened / (1.0 + tl.exp(-opened)))).to(dtype), mask=real)
