"""Triton kernels of the paged engine: attention of one new token per sequence over pages, writing
and copying pages. What happens to the logits is in truncation.py and draws.py.

A pool is found through `bases` [layers, 2], the addresses of its key and value tensors: kernels
read them on the device, so a captured graph goes on working when the pool is allocated elsewhere.
A row whose length is negative is idle: it reads and writes no page.

    write_pages(k, v, bases=bases, layer=0, places=places)

Legend: B rows, H query heads, G key heads, D head size. A place is a token's index in the pool:
page number · page size + offset.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.engines.embedded import rows as fields

LOG2_E = 1.4426950408889634


# -- attention -------------------------------------------------------------------------------------


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bases: Tensor,
    layer: int,
    table: Tensor,
    lengths: Tensor,
    shared: Tensor,
    families: Tensor,
    page: int,
    scale: float,
    splits: tuple[int, int],
    stages: int = 3,
) -> Tensor:
    """q [B, H, D], k and v [B, G, D] of one new token per row → [B, H, D]. The new key and value
    are written behind the `lengths` [B] tokens of the row's pages, `table` [B, pages].

    Rows next to each other that begin with the same pages are a family: what they share is read
    once for all, then each row goes on from there. `families` [3, F]: first row, rows, shared
    tokens (0: no family); `shared` [B]: what a family reads of each row. `splits`: parts of what is
    shared, and of the rest.
    """
    rows, heads, size = q.shape
    key_heads, group = k.shape[1], heads // k.shape[1]
    front, back = splits
    queries = fields.members_of(group) * group
    assert q.stride(2) == k.stride(2) == v.stride(2) == table.stride(1) == families.stride(1) == 1
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    fronts = torch.empty((rows, heads, front, size), **fp32)
    front_sums = torch.empty((rows, heads, front), **fp32)
    options: dict[str, Any] = {
        "KEY_HEADS": key_heads,
        "GROUP": group,
        "SIZE": size,
        "PAGE": page,
        "BLOCK": 64 if size <= 128 else 32,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "num_stages": stages,
    }
    _attend_families[(front, families.shape[1], key_heads)](
        q, fronts, front_sums, bases, table, families, layer, scale * LOG2_E,
        q.stride(0), q.stride(1), table.stride(0), families.stride(0),
        TILE=max(16, triton.next_power_of_2(queries)), PARTS=front, **options,
    )  # fmt: skip
    out = torch.empty((rows, heads, size), dtype=q.dtype, device=q.device)
    parts, sums = out, front_sums  # unused when a row is one part
    if back > 1:
        parts = torch.empty((rows, heads, back, size), **fp32)
        sums = torch.empty((rows, heads, back), **fp32)
    _attend_rows[(back, key_heads, rows)](
        q, k, v, fronts, front_sums, parts, sums, bases, table, lengths, shared, layer,
        scale * LOG2_E, q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0),
        v.stride(1), table.stride(0),
        TILE=max(16, triton.next_power_of_2(group)), FRONT=front, PARTS=back, **options,
    )  # fmt: skip
    if back > 1:
        _merge[(rows, heads)](parts, sums, lengths, out, SIZE=size, PARTS=back, num_warps=1)
    return out


@triton.jit
def _scan(
    query, keys, values, pages, first, last, scale, highest, total, mixed, lane,
    KEY_HEADS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The softmax of a tile of queries, carried on over tokens first … last - 1 of a row."""
    column = tl.arange(0, SIZE)
    for start in range(first, last, BLOCK):
        index = start + tl.arange(0, BLOCK)
        known = index < last
        number = tl.load(pages + index // PAGE, mask=known, other=0)
        place = number.to(tl.int64) * PAGE + index % PAGE
        at = place[:, None] * (KEY_HEADS * SIZE) + lane + column[None, :]
        key = tl.load(tl.multiple_of(keys + at, [1, 16]), mask=known[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        scores = tl.where(known[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(weights, 1)
        value = tl.load(tl.multiple_of(values + at, [1, 16]), mask=known[:, None], other=0.0)
        mixed = mixed * shrink[:, None]
        mixed += tl.dot(weights.to(query.dtype), value, input_precision=PRECISION)
        highest = higher
    return highest, total, mixed


@triton.jit
def _attend_families(
    q, parts, sums, bases, table, families, layer, scale, q_row, q_head, table_row, families_row,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    part, family, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(families + 2 * families_row + family).to(tl.int32)
    if length > 0:
        dtype = q.dtype.element_ty
        keys = tl.load(bases + 2 * layer).to(tl.pointer_type(dtype))
        values = tl.load(bases + 2 * layer + 1).to(tl.pointer_type(dtype))
        row = tl.load(families + family).to(tl.int64)
        member, column = tl.arange(0, TILE), tl.arange(0, SIZE)
        real = member // GROUP < tl.load(families + families_row + family)
        own, lane = row + member // GROUP, head * GROUP + member % GROUP
        query_at = q + own[:, None] * q_row + lane[:, None] * q_head + column[None, :]
        query = tl.load(query_at, mask=real[:, None], other=0.0)
        per_part = tl.cdiv(tl.cdiv(length, PARTS), BLOCK) * BLOCK
        first = part * per_part
        highest, total, mixed = _scan(
            query, keys, values, table + row * table_row, first,
            tl.minimum(first + per_part, length), scale,
            tl.full([TILE], float("-inf"), tl.float32), tl.zeros([TILE], tl.float32),
            tl.zeros([TILE, SIZE], tl.float32), head * SIZE,
            KEY_HEADS, SIZE, PAGE, BLOCK, PRECISION,
        )  # fmt: skip
        target = (own * (KEY_HEADS * GROUP) + lane) * PARTS + part
        at = parts + target[:, None] * SIZE + column[None, :]
        some = tl.where(total > 0, total, 1.0)
        tl.store(at, mixed / some[:, None], mask=real[:, None])
        tl.store(sums + target, highest + tl.log2(some), mask=real)


@triton.jit
def _attend_rows(
    q, k, v, fronts, front_sums, parts, sums, bases, table, lengths, shared, layer, scale,
    q_row, q_head, k_row, k_head, v_row, v_head, table_row,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, FRONT: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    dtype = q.dtype.element_ty
    length = tl.load(lengths + row).to(tl.int32)
    begin = tl.load(shared + row).to(tl.int32)
    keys = tl.load(bases + 2 * layer).to(tl.pointer_type(dtype))
    values = tl.load(bases + 2 * layer + 1).to(tl.pointer_type(dtype))
    member, column = tl.arange(0, TILE), tl.arange(0, SIZE)
    real = member < GROUP
    lane = head * GROUP + member
    query_at = q + row * q_row + lane[:, None] * q_head + column[None, :]
    query = tl.load(query_at, mask=real[:, None], other=0.0)
    pages = table + row * table_row

    highest = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    mixed = tl.zeros([TILE, SIZE], tl.float32)
    if part == 0 and length >= 0:
        # The new token attends to itself, and lies in its page for those that follow.
        new_key = tl.load(k + row * k_row + head * k_head + column)
        new_value = tl.load(v + row * v_row + head * v_head + column)
        highest = scale * tl.sum(query.to(tl.float32) * new_key[None, :].to(tl.float32), 1)
        total += 1.0
        mixed += new_value[None, :].to(tl.float32)
        number = tl.load(pages + length // PAGE).to(tl.int64)
        at = (number * PAGE + length % PAGE) * (KEY_HEADS * SIZE) + head * SIZE + column
        tl.store(tl.multiple_of(keys + at, 16), new_key)
        tl.store(tl.multiple_of(values + at, 16), new_value)
        if begin > 0:
            target = (row * (KEY_HEADS * GROUP) + lane) * FRONT
            for i in range(FRONT):
                mass = tl.load(front_sums + target + i, mask=real, other=float("-inf"))
                at_part = fronts + (target + i)[:, None] * SIZE + column[None, :]
                each = tl.load(at_part, mask=real[:, None], other=0.0)
                higher = tl.maximum(highest, mass)
                shrink, weight = tl.exp2(highest - higher), tl.exp2(mass - higher)
                mixed = mixed * shrink[:, None] + each * weight[:, None]
                total = total * shrink + weight
                highest = higher

    per_part = tl.cdiv(tl.cdiv(tl.maximum(length - begin, 0), PARTS), BLOCK) * BLOCK
    first = begin + part * per_part
    highest, total, mixed = _scan(
        query, keys, values, pages, first, tl.minimum(first + per_part, length), scale, highest,
        total, mixed, head * SIZE, KEY_HEADS, SIZE, PAGE, BLOCK, PRECISION,
    )  # fmt: skip
    some = tl.where(total > 0, total, 1.0)
    target = (row * (KEY_HEADS * GROUP) + lane) * PARTS + part
    at_out = parts + target[:, None] * SIZE + column[None, :]
    tl.store(at_out, (mixed / some[:, None]).to(parts.dtype.element_ty), mask=real[:, None])
    if PARTS > 1:
        tl.store(sums + target, highest + tl.log2(some), mask=real)


@triton.jit
def _merge(parts, sums, lengths, out, SIZE: tl.constexpr, PARTS: tl.constexpr):
    """Parts of one row, weighted by the mass of each."""
    row = tl.program_id(0).to(tl.int64)
    target = row * tl.num_programs(1) + tl.program_id(1)
    column, part = tl.arange(0, SIZE), tl.arange(0, PARTS)
    mixed = tl.zeros([SIZE], tl.float32)
    if tl.load(lengths + row) >= 0:
        mass = tl.load(sums + target * PARTS + part)
        weight = tl.exp2(mass - tl.max(mass, 0))
        each = tl.load(parts + (target * PARTS + part[:, None]) * SIZE + column[None, :])
        mixed = tl.sum(each * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + target * SIZE + column, mixed.to(out.dtype.element_ty))


# -- pages -----------------------------------------------------------------------------------------


def write_pages(k: Tensor, v: Tensor, *, bases: Tensor, layer: int, places: Tensor) -> None:
    """k and v [T, G, D] to `places` [T]."""
    tokens, heads, size = k.shape
    assert k.stride(2) == v.stride(2) == 1
    _write[(tokens, heads)](
        k, v, bases, places, layer,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        HEADS=heads, SIZE=size, num_warps=1,
    )  # fmt: skip


@triton.jit
def _write(
    k, v, bases, places, layer, k_row, k_head, v_row, v_head,
    HEADS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dtype = k.dtype.element_ty
    keys = tl.load(bases + 2 * layer).to(tl.pointer_type(dtype))
    values = tl.load(bases + 2 * layer + 1).to(tl.pointer_type(dtype))
    column = tl.arange(0, SIZE)
    at = (tl.load(places + row) * HEADS + head) * SIZE + column
    new_key = tl.load(k + row * k_row + head * k_head + column)
    new_value = tl.load(v + row * v_row + head * v_head + column)
    tl.store(tl.multiple_of(keys + at, 16), new_key)
    tl.store(tl.multiple_of(values + at, 16), new_value)


def copy_pages(source: Tensor, target: Tensor, *, bases: Tensor, words: int) -> None:
    """Pages `source` to `target`, pairwise, keys and values of all layers. `words` int32 each."""
    _copy[(len(source), bases.numel())](source, target, bases, WORDS=words, BLOCK=1024)


@triton.jit
def _copy(source, target, bases, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    pair, which = tl.program_id(0), tl.program_id(1)
    base = tl.load(bases + which).to(tl.pointer_type(tl.int32))
    here = tl.load(source + pair).to(tl.int64) * WORDS
    there = tl.load(target + pair).to(tl.int64) * WORDS
    for start in range(0, WORDS, BLOCK):
        word = start + tl.arange(0, BLOCK)
        read = tl.load(tl.multiple_of(base + here + word, 16), mask=word < WORDS)
        tl.store(tl.multiple_of(base + there + word, 16), read, mask=word < WORDS)
