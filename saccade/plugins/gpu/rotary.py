"""Rotary position embedding of queries and keys in one pass, into the layout that attention reads.

Legend: T tokens, H heads (of queries and of keys), D head size, R rotated part of a head.

    q, k = rotate(q, k, cos, sin)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.plugins.gpu.gate import rounded


def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False, pairs: bool = False, woven: bool = False
) -> tuple[Tensor, Tensor]:
    """q and k [T, H, D], cos and sin [T, R] → x cos + (-right half, left half) sin for both, in the first R elements
    of a head; the others are copied; contiguous. `back`: the transposed rotation, for gradients. `pairs`: left and
    right are adjacent elements, not halves, and only the sum is rounded. `woven`: adjacent elements of the input
    become halves of the output, and the left half of the angles is used for both. k may have no heads.
    """
    tokens, size, turned = len(q), q.shape[2], cos.shape[1]
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    out_q, out_k = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    if out_q.numel():
        _rotate[(tokens,)](
            q, k, cos.contiguous(), sin.contiguous(), out_q, out_k,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), q.shape[1], k.shape[1],
            SIZE=size, HALF=turned // 2, Q_HEADS=triton.next_power_of_2(q.shape[1]),
            K_HEADS=triton.next_power_of_2(k.shape[1]), COLUMNS=triton.next_power_of_2(turned // 2),
            REST=triton.next_power_of_2(size - turned), BACK=back, PAIRS=pairs, WOVEN=woven, num_warps=4,
            enable_fp_fusion=False,  # a fused multiply-add would skip a rounding
        )  # fmt: skip
    return out_q, out_k


@triton.jit
def _rotate(
    q, k, cos, sin, out_q, out_k, q_token, q_head, k_token, k_head, q_heads, k_heads,
    SIZE: tl.constexpr, HALF: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, COLUMNS: tl.constexpr,
    REST: tl.constexpr, BACK: tl.constexpr, PAIRS: tl.constexpr, WOVEN: tl.constexpr,
):  # fmt: skip  # pragma: no cover - runs on the GPU
    token = tl.program_id(0).to(tl.int64)
    turn: tl.constexpr = _turn_pairs if PAIRS else _turn
    turn(q + token * q_token, out_q, token, q_head, q_heads, cos, sin, SIZE, HALF, Q_HEADS, COLUMNS, BACK, WOVEN)
    if K_HEADS:
        turn(k + token * k_token, out_k, token, k_head, k_heads, cos, sin, SIZE, HALF, K_HEADS, COLUMNS, BACK, WOVEN)
    if REST:
        _copy_rest(q + token * q_token, out_q, token, q_head, q_heads, SIZE, 2 * HALF, Q_HEADS, REST)
        if K_HEADS:
            _copy_rest(k + token * k_token, out_k, token, k_head, k_heads, SIZE, 2 * HALF, K_HEADS, REST)


@triton.jit
def _copy_rest(
    x, out, token, head_stride, heads, SIZE: tl.constexpr, TURNED: tl.constexpr, HEADS: tl.constexpr, REST: tl.constexpr
):  # pragma: no cover - runs on the GPU
    column, head = TURNED + tl.arange(0, REST)[None, :], tl.arange(0, HEADS)[:, None]
    inside = (head < heads) & (column < SIZE)
    kept = tl.load(x + head * head_stride + column, mask=inside)
    tl.store(out + (token * heads + head) * SIZE + column, kept, mask=inside)


@triton.jit
def _turn(
    x, out, token, head_stride, heads, cos, sin, SIZE: tl.constexpr,
    HALF: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr, BACK: tl.constexpr, WOVEN: tl.constexpr,
):  # fmt: skip  # pragma: no cover - runs on the GPU
    # Distances: from a left element to the next (step), to its right one (gap), and between their angles (far).
    step: tl.constexpr = 2 if WOVEN else 1
    gap: tl.constexpr = 1 if WOVEN else HALF
    far: tl.constexpr = 0 if WOVEN else HALF
    column = tl.arange(0, COLUMNS)[None, :]
    head = tl.arange(0, HEADS)[:, None]
    narrow = column < HALF
    inside = (head < heads) & narrow
    angles = token * 2 * HALF + column
    cos_left = tl.load(cos + angles, mask=narrow, other=0.0).to(tl.float32)
    cos_right = tl.load(cos + angles + far, mask=narrow, other=0.0).to(tl.float32)
    sin_left = tl.load(sin + angles, mask=narrow, other=0.0).to(tl.float32)
    sin_right = tl.load(sin + angles + far, mask=narrow, other=0.0).to(tl.float32)
    source = x + head * head_stride + column * (1 if BACK else step)
    left = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(source + (HALF if BACK else gap), mask=inside, other=0.0).to(tl.float32)
    if BACK:
        new_left = rounded(left * cos_left, cos) + rounded(right * sin_right, cos)
        new_right = rounded(right * cos_right, cos) - rounded(left * sin_left, cos)
    else:
        new_left = rounded(left * cos_left, cos) - rounded(right * sin_left, cos)
        new_right = rounded(right * cos_right, cos) + rounded(left * sin_right, cos)
    place = out + (token * heads + head) * SIZE + column * (step if BACK else 1)
    tl.store(place, new_left.to(out.dtype.element_ty), mask=inside)
    tl.store(place + (gap if BACK else HALF), new_right.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _turn_pairs(
    x, out, token, head_stride, heads, cos, sin, SIZE: tl.constexpr,
    HALF: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr, BACK: tl.constexpr, WOVEN: tl.constexpr,
):  # fmt: skip  # pragma: no cover - runs on the GPU
    """Reads and writes whole rows and splits them in registers, as strided reads are slow. Angles are loaded once per
    head, in the same register layout as its elements.
    """
    column = tl.broadcast_to(tl.arange(0, 2 * COLUMNS)[None, :], (HEADS, 2 * COLUMNS))
    head = tl.arange(0, HEADS)[:, None]
    inside = (head < heads) & (column < 2 * HALF)
    angles = token * 2 * HALF + column
    cos_left, cos_right = _split(cos + angles, inside, HEADS, COLUMNS)
    sin_left, sin_right = _split(sin + angles, inside, HEADS, COLUMNS)
    left, right = _split(x + head * head_stride + column, inside, HEADS, COLUMNS)
    if BACK:
        sin_left, sin_right = -sin_right, -sin_left
    turned = tl.join(left * cos_left - right * sin_left, right * cos_right + left * sin_right)
    turned = tl.reshape(turned.to(out.dtype.element_ty), (HEADS, 2 * COLUMNS))
    tl.store(out + (token * heads + head) * SIZE + column, turned, mask=inside)


@triton.jit
def _split(places, inside, HEADS: tl.constexpr, COLUMNS: tl.constexpr):  # pragma: no cover - runs on the GPU
    rows = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    return tl.split(tl.reshape(rows, (HEADS, COLUMNS, 2)))
