"""silu(gate) * up in one pass, and both gradients together with the product in another: a gated
layer has to keep the gate and the other half for its backward, not what follows from them.

    product = multiply(gate, up)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


def multiply(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    product = torch.empty_like(gate)
    _multiply[(triton.cdiv(gate.numel(), BLOCK),)](gate, up, product, gate.numel(), BLOCK=BLOCK)
    return product


def gradients(gate: Tensor, up: Tensor, to_product: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The product once more, the gradient of the gate and that of the other half."""
    gate, up, to_product = gate.contiguous(), up.contiguous(), to_product.contiguous()
    product, to_gate, to_up = torch.empty_like(gate), torch.empty_like(gate), torch.empty_like(up)
    grid = (triton.cdiv(gate.numel(), BLOCK),)
    _gradients[grid](gate, up, to_product, product, to_gate, to_up, gate.numel(), BLOCK=BLOCK)
    return product, to_gate, to_up


@triton.jit
def _multiply(gate, up, product, size, BLOCK: tl.constexpr):  # pragma: no cover - runs on the GPU
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    g = tl.load(gate + places, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + places, mask=inside, other=0.0).to(tl.float32)
    # Rounded in between, as two kernels would.
    active = (g * tl.sigmoid(g)).to(product.dtype.element_ty).to(tl.float32)
    tl.store(product + places, (active * u).to(product.dtype.element_ty), mask=inside)


@triton.jit
def _gradients(
    gate, up, to_product, product, to_gate, to_up, size, BLOCK: tl.constexpr
):  # pragma: no cover - runs on the GPU
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    g = tl.load(gate + places, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + places, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(to_product + places, mask=inside, other=0.0).to(tl.float32)
    open_ = tl.sigmoid(g)
    active = (g * open_).to(product.dtype.element_ty).to(tl.float32)
    slope = open_ * (1.0 + g * (1.0 - open_))
    tl.store(product + places, (active * u).to(product.dtype.element_ty), mask=inside)
    tl.store(to_up + places, (d * active).to(to_up.dtype.element_ty), mask=inside)
    tl.store(to_gate + places, (d * u * slope).to(to_gate.dtype.element_ty), mask=inside)
