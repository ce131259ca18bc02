"""Rotary position embedding of queries or keys in one pass, into the layout that attention reads.

Legend: T tokens, H heads, D head size.

    q = rotate(q, cos, sin)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """x [T, H, D], cos and sin [T, D] → x cos + (-right half, left half) sin, contiguous. `back`:
    the transposed product, which is its gradient.
    """
    tokens, heads, size = x.shape
    out = torch.empty((tokens, heads, size), dtype=x.dtype, device=x.device)
    if out.numel():
        x = x if x.stride(-1) == 1 else x.contiguous()
        _rotate[(tokens,)](
            x,
            cos.contiguous(),
            sin.contiguous(),
            out,
            x.stride(0),
            x.stride(1),
            heads,
            HALF=size // 2,
            HEADS=triton.next_power_of_2(heads),
            COLUMNS=triton.next_power_of_2(size // 2),
            BACK=back,
            num_warps=4,
            enable_fp_fusion=False,  # a fused multiply-add would skip a rounding
        )
    return out


@triton.jit
def _rounded(product, like):  # pragma: no cover - runs on the GPU
    """As a kernel of its own would leave it."""
    return product.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _rotate(
    x,
    cos,
    sin,
    out,
    token_stride,
    head_stride,
    heads,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BACK: tl.constexpr,
):  # pragma: no cover - runs on the GPU
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    narrow = column < HALF
    inside = (head < heads) & narrow
    angles = token * 2 * HALF + column
    cos_left = tl.load(cos + angles, mask=narrow, other=0.0).to(tl.float32)
    cos_right = tl.load(cos + angles + HALF, mask=narrow, other=0.0).to(tl.float32)
    sin_left = tl.load(sin + angles, mask=narrow, other=0.0).to(tl.float32)
    sin_right = tl.load(sin + angles + HALF, mask=narrow, other=0.0).to(tl.float32)
    source = x + token * token_stride + head * head_stride + column
    left = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if BACK:
        new_left = _rounded(left * cos_left, cos) + _rounded(right * sin_right, cos)
        new_right = _rounded(right * cos_right, cos) - _rounded(left * sin_left, cos)
    else:
        new_left = _rounded(left * cos_left, cos) - _rounded(right * sin_left, cos)
        new_right = _rounded(right * cos_right, cos) + _rounded(left * sin_right, cos)
    place = out + (token * heads + head) * 2 * HALF + column
    tl.store(place, new_left.to(out.dtype.element_ty), mask=inside)
    tl.store(place + HALF, new_right.to(out.dtype.element_ty), mask=inside)
