"""Norms in one pass: `add_norm`, of a residual sum, and `norm_rows`, an RMS norm of rows of a strided
tensor, computed in float32, with gradients for the Gemma variant (times 1 + weight).

    hidden, normed = add_norm(hidden, update, weight, epsilon)
    normed = norm_rows(x, weight, epsilon, shift=True)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # elements that a program of norm_rows holds at a time
PROGRAMS = 528  # at most, for gradients: each has a partial sum of the weight's gradient


def add_norm(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    epsilon: float,
    *,
    also: Tensor | None = None,
    before: tuple[Tensor, float] | None = None,
    factor: Tensor | None = None,
    shift: bool = False,
    center: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns x + y, rounded as a separate addition would, and its norm, each [..., E]. `also`: a third
    summand; `before`: weight and epsilon of a norm applied to y first; `factor` [1]: multiplies the
    sum. `shift`: norms multiply by 1 + weight; `center`: they subtract the mean.
    """
    x, y = x.contiguous(), y.contiguous()
    width = x.shape[-1]
    total, normed = torch.empty_like(x), torch.empty_like(x)
    first, first_epsilon = before or (weight, epsilon)
    _add_norm[(x.numel() // width,)](
        x, y, x if also is None else also.contiguous(), first, x if factor is None else factor, weight,
        total, normed, first_epsilon, epsilon, WIDTH=width, BLOCK=triton.next_power_of_2(width),
        ALSO=also is not None, BEFORE=before is not None, SCALED=factor is not None, SHIFT=shift, CENTER=center,
        num_warps=8,
    )  # fmt: skip
    return total, normed


@triton.jit
def _add_norm(
    x, y, also, first, factor, weight, total, normed, first_epsilon, epsilon,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ALSO: tl.constexpr, BEFORE: tl.constexpr,
    SCALED: tl.constexpr, SHIFT: tl.constexpr, CENTER: tl.constexpr,
):  # fmt: skip  # pragma: no cover - runs on the GPU
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    left = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    if BEFORE:
        right = _normed(right, first, column, inside, first_epsilon, WIDTH, SHIFT, CENTER)
        right = right.to(total.dtype.element_ty).to(tl.float32)
    rounded_sum = (left + right).to(total.dtype.element_ty)
    if ALSO:
        third = tl.load(also + at, mask=inside, other=0.0).to(tl.float32)
        rounded_sum = (rounded_sum.to(tl.float32) + third).to(total.dtype.element_ty)
    if SCALED:
        rounded_sum = (rounded_sum.to(tl.float32) * tl.load(factor).to(tl.float32)).to(total.dtype.element_ty)
    tl.store(total + at, rounded_sum, mask=inside)
    value = _normed(rounded_sum.to(tl.float32), weight, column, inside, epsilon, WIDTH, SHIFT, CENTER)
    tl.store(normed + at, value.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _normed(
    value, weight, column, inside, epsilon, WIDTH: tl.constexpr, SHIFT: tl.constexpr, CENTER: tl.constexpr
):  # pragma: no cover - runs on the GPU
    if CENTER:
        value = tl.where(inside, value - tl.sum(value, 0) / WIDTH, 0.0)
    scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + epsilon)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if SHIFT:
        gain += 1.0
    return value * scale * gain


# -- norms of rows ---------------------------------------------------------------------------------


def norm_rows(x: Tensor, weight: Tensor | None, epsilon: float, *, shift: bool = False) -> Tensor:
    """x / rms(x) over the last axis, times the weight if there is one (`shift`: 1 + weight), in the memory layout
    of x.
    """
    x = _even(x)
    out = torch.empty_like(x)
    if x.numel():
        lines, made = _lines(x), _lines(out)
        block = triton.next_power_of_2(x.shape[-1])
        count = lines.shape[0] * lines.shape[1]
        _norm_rows[(triton.cdiv(count, max(1, TILE // block)),)](
            lines, weight, made, epsilon, count, lines.shape[1],
            lines.stride(0), lines.stride(1), made.stride(0), made.stride(1),
            WIDTH=x.shape[-1], BLOCK=block, ROWS=max(1, TILE // block), SHIFT=shift,
            num_warps=4 if block <= TILE else 8,
        )  # fmt: skip
    return out


def norm_gradients(x: Tensor, weight: Tensor, epsilon: float, to_out: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and of the weight of `norm_rows(…, shift=True)`."""
    x, to_out = _even(x), _even(to_out)
    to_x = torch.empty_like(x)
    if not x.numel():
        return to_x, torch.zeros_like(weight)
    lines, given, made = _lines(x), _lines(to_out), _lines(to_x)
    block = triton.next_power_of_2(x.shape[-1])
    count, rows = lines.shape[0] * lines.shape[1], max(1, TILE // block)
    programs = min(PROGRAMS, triton.cdiv(count, rows))
    sums = torch.empty((programs, x.shape[-1]), dtype=torch.float32, device=x.device)
    _norm_gradients[(programs,)](
        lines, weight, given, made, sums, epsilon, count, lines.shape[1], lines.stride(0), lines.stride(1),
        given.stride(0), given.stride(1), made.stride(0), made.stride(1), triton.cdiv(count, rows), programs,
        WIDTH=x.shape[-1], BLOCK=block, ROWS=rows, num_warps=4 if block <= TILE else 8,
    )  # fmt: skip
    return to_x, sums.sum(0).to(weight.dtype)


def _even(x: Tensor) -> Tensor:
    """x, copied unless its last axis is contiguous and at most two others have more than one entry."""
    return x if x.stride(-1) == 1 and all(size == 1 for size in x.shape[:-3]) else x.contiguous()


def _lines(x: Tensor) -> Tensor:
    return x.view(-1, *(1, 1, *x.shape)[-2:])


@triton.jit
def _norm_rows(
    x, weight, out, epsilon, count, inner, x_outer, x_inner, out_outer, out_inner,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip  # pragma: no cover - runs on the GPU
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < count) & (column < WIDTH)
    at = row // inner * x_outer + row % inner * x_inner + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 1) / WIDTH + epsilon)[:, None]
    if weight is not None:
        gain = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        if SHIFT:
            gain += 1.0
        value *= gain
    there = row // inner * out_outer + row % inner * out_inner + column
    tl.store(out + there, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_gradients(
    x, weight, to_out, to_x, sums, epsilon, count, inner, x_outer, x_inner,
    given_outer, given_inner, made_outer, made_inner, tiles, programs,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip  # pragma: no cover - runs on the GPU
    column = tl.arange(0, BLOCK)[None, :]
    gain = 1.0 + tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(tl.program_id(0), tiles, programs):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        inside = (row < count) & (column < WIDTH)
        outer, place = row // inner, row % inner
        value = tl.load(x + outer * x_outer + place * x_inner + column, mask=inside, other=0.0).to(tl.float32)
        given = tl.load(to_out + outer * given_outer + place * given_inner + column, mask=inside, other=0.0)
        scale = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + epsilon)[:, None]
        unit = value * scale
        total += given.to(tl.float32) * unit
        pulled = given.to(tl.float32) * gain
        made = (pulled - unit * (tl.sum(pulled * unit, 1) / WIDTH)[:, None]) * scale
        there = to_x + outer * made_outer + place * made_inner + column
        tl.store(there, made.to(to_x.dtype.element_ty), mask=inside)
    at_sum = sums + tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, BLOCK)
    tl.store(at_sum, tl.sum(total, 0), mask=tl.arange(0, BLOCK) < WIDTH)
