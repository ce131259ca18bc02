"""Sums the gradients of rows that were gathered several times: the backward of a gather.

total = sum_rows(grad, places, offsets)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def sum_rows(grad: Tensor, places: Tensor, offsets: Tensor) -> Tensor:
    """[K, ...] → [T, ...]: row t is the sum of grad[places[offsets[t] : offsets[t + 1]]] in fp32, always
    in that order, so it is deterministic, which atomic additions are not.
    """
    grad = grad.contiguous()
    width = grad[0].numel()
    rows = offsets.shape[0] - 1
    out = torch.empty((rows, *grad.shape[1:]), dtype=grad.dtype, device=grad.device)
    _sum[(rows,)](grad, places, offsets, out, WIDTH=width, BLOCK=triton.next_power_of_2(width))
    return out


@triton.jit
def _sum(grad, places, offsets, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # pragma: no cover - runs on the GPU
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in range(tl.load(offsets + row), tl.load(offsets + row + 1)):
        place = tl.load(places + i).to(tl.int64)
        total += tl.load(grad + place * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, total.to(out.dtype.element_ty), mask=inside)
