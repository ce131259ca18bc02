"""Triton kernels of silu(gate) * up: one pass for the product, and one that recomputes it together with
both gradients, so that a gated layer saves only gate and up for backward. `gelu`: GELU in its tanh
form replaces silu.

    product = multiply(gate, up)

For few rows and without gradients, project(x, …) also computes gate and up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
TILE = 64  # columns and inner dimension of a tile of `project`


def multiply(gate: Tensor, up: Tensor, *, gelu: bool = False) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    product = torch.empty_like(gate)
    _multiply[(triton.cdiv(gate.numel(), BLOCK),)](gate, up, product, gate.numel(), BLOCK=BLOCK, GELU=gelu)
    return product


def gradients(gate: Tensor, up: Tensor, to_product: Tensor, *, gelu: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the product again, and the gradients of gate and up."""
    gate, up, to_product = gate.contiguous(), up.contiguous(), to_product.contiguous()
    product, to_gate, to_up = torch.empty_like(gate), torch.empty_like(gate), torch.empty_like(up)
    grid = (triton.cdiv(gate.numel(), BLOCK),)
    _gradients[grid](gate, up, to_product, product, to_gate, to_up, gate.numel(), BLOCK=BLOCK, GELU=gelu)
    return product, to_gate, to_up


@triton.jit
def _multiply(gate, up, product, size, BLOCK: tl.constexpr, GELU: tl.constexpr):  # pragma: no cover - runs on the GPU
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    g = tl.load(gate + places, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + places, mask=inside, other=0.0).to(tl.float32)
    active = rounded(g * _open(g, GELU), product)
    tl.store(product + places, (active * u).to(product.dtype.element_ty), mask=inside)


@triton.jit
def _gradients(
    gate, up, to_product, product, to_gate, to_up, size, BLOCK: tl.constexpr, GELU: tl.constexpr
):  # pragma: no cover - runs on the GPU
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    g = tl.load(gate + places, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + places, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(to_product + places, mask=inside, other=0.0).to(tl.float32)
    open_ = _open(g, GELU)
    active = rounded(g * open_, product)
    steep = g * (1.0 - open_)
    if GELU:
        steep *= 1.5957691216057308 * (1.0 + 0.134145 * g * g)
    slope = open_ * (1.0 + steep)
    tl.store(product + places, (active * u).to(product.dtype.element_ty), mask=inside)
    tl.store(to_up + places, (d * active).to(to_up.dtype.element_ty), mask=inside)
    tl.store(to_gate + places, (d * u * slope).to(to_gate.dtype.element_ty), mask=inside)


@triton.jit
def _open(g, GELU: tl.constexpr):  # pragma: no cover - runs on the GPU
    """silu(g) / g or gelu(g) / g; for the latter, (1 + tanh(z)) / 2 is sigmoid(2 z)."""
    if GELU:
        g = 1.5957691216057308 * (g + 0.044715 * g * g * g)
    return tl.sigmoid(g)


@triton.jit
def rounded(value, like):  # pragma: no cover - runs on the GPU
    """Round to the dtype that `like` points to, as storing an intermediate result would."""
    return value.to(like.dtype.element_ty).to(tl.float32)


# -- gated product of two matrix products ----------------------------------------------------------


def project(x: Tensor, gate: Tensor, up: Tensor, *, gelu: bool = False) -> Tensor:
    """silu(x gateᵀ) * (x upᵀ) for few rows, x [M, K], gate and up [N, K]. The time is that of reading
    both matrices, so one kernel reads both. K and N must be multiples of TILE.
    """
    rows, width = x.shape
    out = torch.empty((rows, gate.shape[0]), dtype=x.dtype, device=x.device)
    _project[(gate.shape[0] // TILE,)](
        x.contiguous(), gate, up, out, rows, gate.shape[0], WIDTH=width,
        ROWS=max(16, triton.next_power_of_2(rows)), TILE=TILE, GELU=gelu,
        num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


@triton.jit
def _project(
    x, gate, up, out, rows, columns, WIDTH: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, GELU: tl.constexpr
):  # pragma: no cover - runs on the GPU
    column = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    row, lane = tl.arange(0, ROWS), tl.arange(0, TILE)
    real = (row < rows)[None, :]
    at_matrix = column[:, None] * WIDTH + lane[None, :]
    at_x = row[None, :] * WIDTH + lane[:, None]
    g = tl.zeros((TILE, ROWS), tl.float32)
    u = tl.zeros((TILE, ROWS), tl.float32)
    for start in range(0, WIDTH, TILE):
        piece = tl.load(x + at_x + start, mask=real, other=0.0)
        g = tl.dot(tl.load(gate + at_matrix + start), piece, g)
        u = tl.dot(tl.load(up + at_matrix + start), piece, u)
    g, u = rounded(g, out), rounded(u, out)
    product = rounded(g * _open(g, GELU), out) * u
    at_out = out + row[None, :] * columns + column[:, None]
    tl.store(at_out, product.to(out.dtype.element_ty), mask=real)
