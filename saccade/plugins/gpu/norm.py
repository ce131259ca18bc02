"""A sum and its root mean square norm in one pass: what stands between two halves of a layer.

hidden, normed = add_norm(hidden, update, weight, epsilon)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def add_norm(x: Tensor, y: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x + y, rounded as an addition of its own would, and the norm of that; [..., E] each."""
    x, y = x.contiguous(), y.contiguous()
    width = x.shape[-1]
    total, normed = torch.empty_like(x), torch.empty_like(x)
    _add_norm[(x.numel() // width,)](
        x, y, weight, total, normed, epsilon, WIDTH=width, BLOCK=triton.next_power_of_2(width),
        num_warps=8,
    )  # fmt: skip
    return total, normed


@triton.jit
def _add_norm(
    x, y, weight, total, normed, epsilon, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # pragma: no cover - runs on the GPU
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    left = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    rounded = (left + right).to(total.dtype.element_ty)
    tl.store(total + at, rounded, mask=inside)
    value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + epsilon)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, (value * scale * gain).to(normed.dtype.element_ty), mask=inside)
