"""Triton kernels for the paged KV cache: attention of one new token per sequence, writing and copying
pages. Sampling from logits is in sampling_kernels.py.

`bases` [layers, 2] holds the addresses of the pool's key and value tensors. Kernels read them on the
device, so captured graphs stay valid when the pool is reallocated.
A row whose length is negative is idle: it reads and writes no page.

    write_pages(k, v, bases=bases, layer=0, places=places)

Legend: B rows, H query heads, G key heads, D size of a key, V of a value. A place is a token's index in
the pool: page number · page size + offset. Sizes are multiples of 8, so that rows are aligned to 16 bytes;
the COLUMNS of a tile are the next power of two.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.plugins.gpu import decode_state as fields

LOG2_E = 1.4426950408889634
LOWEST = tl.constexpr(-1e30)  # least running maximum of scores, if all are masked
TOGETHER = 256  # at most this many row programs run in one launch with those of prefix groups
LEAST_PART = 512  # least tokens of a part of a row, if there are many rows


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
    prefix_groups: Tensor,
    page: int,
    scale: float,
    splits: tuple[int, int],
    window: int | None = None,
) -> Tensor:
    """q [B, H, D], k [B, G, D] and v [B, G, V] of one new token per row → [B, H, V]. The new key and value
    are written after the `lengths` [B] tokens in the row's pages, `table` [B, pages]. `window`: see
    forest.attention.Window.

    Adjacent rows that begin with the same pages form a prefix group: their shared pages are read
    once for all rows, the rest for each row. `prefix_groups` [3, F]: first row, number of rows,
    shared tokens (0: no group); `shared` [B]: tokens of each row that its group reads. `splits`: parts
    of the shared tokens, and of the rest. If there are many rows, only long ones are split.
    """
    rows, heads, size = q.shape
    key_heads, group, value_size = k.shape[1], heads // k.shape[1], v.shape[2]
    columns = _padded(size), _padded(value_size)
    front, back = splits
    queries = fields.members_of(group, size) * group
    assert q.stride(2) == k.stride(2) == v.stride(2) == table.stride(1) == prefix_groups.stride(1) == 1
    of_groups, of_rows = key_heads * front * prefix_groups.shape[1], key_heads * back * rows
    # Few rows do not fill a GPU, so they run in one launch with the prefix groups, and a second kernel
    # merges. Many rows do, so they are launched after the groups, and each starts from its group's result.
    together = back > 1 or of_rows <= TOGETHER
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    parts = torch.empty((rows, heads, front + back * together, value_size), **fp32)
    sums = torch.empty((rows, heads, front + back * together), **fp32)
    out = torch.empty((rows, heads, value_size), dtype=q.dtype, device=q.device)
    launches = [(True, True)] if together else [(True, False), (False, True)]
    for has_groups, has_rows in launches:
        _attend[(of_groups * has_groups + of_rows * has_rows,)](
            q, k, v, out, parts, sums, bases, table, lengths, shared, prefix_groups, layer,
            scale * LOG2_E, of_groups * has_groups,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            table.stride(0), prefix_groups.stride(0), PREFIX_GROUPS=has_groups, ROWS=has_rows,
            KEY_HEADS=key_heads, GROUP=group, KEY_SIZE=size, VALUE_SIZE=value_size,
            KEY_COLUMNS=columns[0], VALUE_COLUMNS=columns[1], PAGE=page, FRONT=front, BACK=back,
            QUERIES=_padded(queries), LANES=_padded(group), BLOCK=min(64, 8192 // max(columns)),
            LEAST=LEAST_PART if of_rows > back * TOGETHER else 1,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32", WINDOW=window or 0,
            num_stages=2 if together else 3,  # as measured
        )  # fmt: skip
    if together:
        _merge[(rows, heads)](
            parts, sums, lengths, shared, out, SIZE=value_size, COLUMNS=columns[1], FRONT=front, PARTS=front + back,
            PADDED=triton.next_power_of_2(front + back), num_warps=1,
        )  # fmt: skip
    return out


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))  # tl.dot needs at least 16


@triton.jit
def _real(rows, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Mask of a tile: these rows, and the SIZE columns of a head."""
    return rows[:, None] & (tl.arange(0, COLUMNS) < SIZE)[None, :] if COLUMNS > SIZE else rows[:, None]


@triton.jit
def _load_head(at, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.arange(0, COLUMNS)
    return tl.load(at + column, mask=column < SIZE, other=0.0) if COLUMNS > SIZE else tl.load(at + column)


@triton.jit
def _store_head(at, numbers, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.arange(0, COLUMNS)
    if COLUMNS > SIZE:
        tl.store(tl.multiple_of(at + column, 16), numbers, mask=column < SIZE)
    else:
        tl.store(tl.multiple_of(at + column, 16), numbers)


@triton.jit
def _seen_from(length, WINDOW: tl.constexpr):
    """The first token that the token after `length` others attends to."""
    return tl.maximum(length - WINDOW + 1, 0) if WINDOW > 0 else length - length % -WINDOW


@triton.jit
def _scan(
    query, keys, values, pages, first, last, scale, highest, total, mixed, head, begins,
    KEY_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, KEY_COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Continue the online softmax of a tile of queries over tokens first … last - 1 of a row. `MASKED`:
    each query attends only to tokens from its entry of `begins` on, perhaps to none.
    """
    for start in range(first, last, BLOCK):
        index = start + tl.arange(0, BLOCK)
        known = index < last
        number = tl.load(pages + index // PAGE, mask=known, other=0)
        place = number.to(tl.int64) * PAGE + index % PAGE
        at = place[:, None] * (KEY_HEADS * KEY_SIZE) + head * KEY_SIZE + tl.arange(0, KEY_COLUMNS)[None, :]
        inside = _real(known, KEY_SIZE, KEY_COLUMNS)
        key = tl.load(tl.multiple_of(keys + at, [1, 16]), mask=inside, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        seen = known[None, :]
        if MASKED:
            seen = seen & (index[None, :] >= begins[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        if MASKED:  # -inf - -inf would be NaN
            higher = tl.maximum(higher, LOWEST)
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(weights, 1)
        if VALUE_SIZE != KEY_SIZE:
            at = place[:, None] * (KEY_HEADS * VALUE_SIZE) + head * VALUE_SIZE + tl.arange(0, VALUE_COLUMNS)[None, :]
            inside = _real(known, VALUE_SIZE, VALUE_COLUMNS)
        value = tl.load(tl.multiple_of(values + at, [1, 16]), mask=inside, other=0.0)
        mixed = mixed * shrink[:, None]
        mixed += tl.dot(weights.to(query.dtype), value, input_precision=PRECISION)
        highest = higher
    return highest, total, mixed


@triton.jit
def _attend(
    q, k, v, out, parts, sums, bases, table, lengths, shared, prefix_groups, layer, scale,
    of_groups, q_row, q_head, k_row, k_head, v_row, v_head, table_row, groups_row,
    PREFIX_GROUPS: tl.constexpr, ROWS: tl.constexpr, KEY_HEADS: tl.constexpr, GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, KEY_COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    PAGE: tl.constexpr, FRONT: tl.constexpr, BACK: tl.constexpr, QUERIES: tl.constexpr, LANES: tl.constexpr,
    BLOCK: tl.constexpr, LEAST: tl.constexpr, PRECISION: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Each of the first `of_groups` programs computes a part of a prefix group for one key head, each of
    the others a part of a row for one key head.
    """
    dtype = q.dtype.element_ty
    keys = tl.load(bases + 2 * layer).to(tl.pointer_type(dtype))
    values = tl.load(bases + 2 * layer + 1).to(tl.pointer_type(dtype))
    program = tl.program_id(0)
    # Nested conditions: a branch that a constexpr rules out is not compiled.
    if PREFIX_GROUPS:  # noqa: SIM102
        if program < of_groups:
            _attend_prefix_group(
                program % FRONT, program // FRONT % KEY_HEADS, program // (FRONT * KEY_HEADS),
                q, keys, values, parts, sums, table, lengths, prefix_groups, scale, q_row, q_head, table_row,
                groups_row, FRONT + BACK if ROWS else FRONT, KEY_HEADS, GROUP, KEY_SIZE, VALUE_SIZE,
                KEY_COLUMNS, VALUE_COLUMNS, PAGE, FRONT, QUERIES, BLOCK, PRECISION, WINDOW,
            )  # fmt: skip
    if ROWS:  # noqa: SIM102
        if program >= of_groups:
            program -= of_groups
            _attend_row(
                program % BACK, program // BACK % KEY_HEADS, (program // (BACK * KEY_HEADS)).to(tl.int64),
                q, k, v, out, keys, values, parts, sums, table, lengths, shared, scale,
                q_row, q_head, k_row, k_head, v_row, v_head, table_row, not PREFIX_GROUPS,
                KEY_HEADS, GROUP, KEY_SIZE, VALUE_SIZE, KEY_COLUMNS, VALUE_COLUMNS,
                PAGE, FRONT, BACK, LANES, BLOCK, LEAST, PRECISION, WINDOW,
            )  # fmt: skip


@triton.jit
def _attend_prefix_group(
    part, head, prefix_group, q, keys, values, parts, sums, table, lengths, prefix_groups, scale,
    q_row, q_head, table_row, groups_row, PARTS: tl.constexpr, KEY_HEADS: tl.constexpr, GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, KEY_COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    PAGE: tl.constexpr, FRONT: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    length = tl.load(prefix_groups + 2 * groups_row + prefix_group).to(tl.int32)
    if length > 0:
        row = tl.load(prefix_groups + prefix_group).to(tl.int64)
        member, column = tl.arange(0, QUERIES), tl.arange(0, KEY_COLUMNS)
        real = member // GROUP < tl.load(prefix_groups + groups_row + prefix_group)
        own, lane = row + member // GROUP, head * GROUP + member % GROUP
        query_at = q + own[:, None] * q_row + lane[:, None] * q_head + column[None, :]
        query = tl.load(query_at, mask=_real(real, KEY_SIZE, KEY_COLUMNS), other=0.0)
        begin, begins = 0, member
        if WINDOW != 0:
            ends = tl.load(lengths + own, mask=real, other=-1).to(tl.int32)
            begins = tl.where(ends >= 0, _seen_from(ends, WINDOW), length)
            begin = tl.minimum(tl.min(begins, 0), length)
        per_part = tl.cdiv(tl.cdiv(length - begin, FRONT), BLOCK) * BLOCK
        first = begin + part * per_part
        highest, total, mixed = _scan(
            query, keys, values, table + row * table_row, first, tl.minimum(first + per_part, length), scale,
            tl.full([QUERIES], float("-inf"), tl.float32), tl.zeros([QUERIES], tl.float32),
            tl.zeros([QUERIES, VALUE_COLUMNS], tl.float32), head, begins,
            KEY_HEADS, KEY_SIZE, VALUE_SIZE, KEY_COLUMNS, VALUE_COLUMNS, PAGE, BLOCK, PRECISION, WINDOW != 0,
        )  # fmt: skip
        target = (own * (KEY_HEADS * GROUP) + lane) * PARTS + part
        _store(parts, sums, target, highest, total, mixed, real, VALUE_SIZE, VALUE_COLUMNS)


@triton.jit
def _attend_row(
    part, head, row, q, k, v, out, keys, values, parts, sums, table, lengths, shared, scale,
    q_row, q_head, k_row, k_head, v_row, v_head, table_row, WHOLE: tl.constexpr, KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, KEY_COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr, PAGE: tl.constexpr, FRONT: tl.constexpr, BACK: tl.constexpr, LANES: tl.constexpr,
    BLOCK: tl.constexpr, LEAST: tl.constexpr, PRECISION: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """`WHOLE`: the row is one part, so this also merges its prefix group's result and writes `out`."""
    length = tl.load(lengths + row).to(tl.int32)
    begin = tl.load(shared + row).to(tl.int32)
    member, column, value_column = tl.arange(0, LANES), tl.arange(0, KEY_COLUMNS), tl.arange(0, VALUE_COLUMNS)
    real = member < GROUP
    lane = head * GROUP + member
    query_at = q + row * q_row + lane[:, None] * q_head + column[None, :]
    query = tl.load(query_at, mask=_real(real, KEY_SIZE, KEY_COLUMNS), other=0.0)
    pages = table + row * table_row
    line = row * (KEY_HEADS * GROUP) + lane
    inside = _real(real, VALUE_SIZE, VALUE_COLUMNS)

    highest = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    mixed = tl.zeros([LANES, VALUE_COLUMNS], tl.float32)
    if part == 0 and length >= 0:
        # The new token attends to itself, and is written to its page for later tokens.
        new_key = _load_head(k + row * k_row + head * k_head, KEY_SIZE, KEY_COLUMNS)
        new_value = _load_head(v + row * v_row + head * v_head, VALUE_SIZE, VALUE_COLUMNS)
        highest = scale * tl.sum(query.to(tl.float32) * new_key[None, :].to(tl.float32), 1)
        total += 1.0
        mixed += new_value[None, :].to(tl.float32)
        number = tl.load(pages + length // PAGE).to(tl.int64)
        at = (number * PAGE + length % PAGE) * KEY_HEADS + head
        _store_head(keys + at * KEY_SIZE, new_key, KEY_SIZE, KEY_COLUMNS)
        _store_head(values + at * VALUE_SIZE, new_value, VALUE_SIZE, VALUE_COLUMNS)
        if WHOLE:  # noqa: SIM102
            if begin > 0:
                for i in range(FRONT):
                    found = line * FRONT + i
                    mass = tl.load(sums + found, mask=real, other=float("-inf"))
                    at_part = parts + found[:, None] * VALUE_SIZE + value_column[None, :]
                    each = tl.load(at_part, mask=inside & (mass > float("-inf"))[:, None], other=0.0)
                    higher = tl.maximum(highest, mass)
                    shrink, weight = tl.exp2(highest - higher), tl.exp2(mass - higher)
                    mixed = mixed * shrink[:, None] + each * weight[:, None]
                    total = total * shrink + weight
                    highest = higher

    if WINDOW != 0:
        begin = tl.maximum(begin, _seen_from(length, WINDOW))
    per_part = tl.cdiv(tl.maximum(tl.cdiv(tl.maximum(length - begin, 0), BACK), LEAST), BLOCK) * BLOCK
    first = begin + part * per_part
    highest, total, mixed = _scan(
        query, keys, values, pages, first, tl.minimum(first + per_part, length), scale, highest,
        total, mixed, head, member, KEY_HEADS, KEY_SIZE, VALUE_SIZE, KEY_COLUMNS, VALUE_COLUMNS,
        PAGE, BLOCK, PRECISION, False,
    )  # fmt: skip
    if WHOLE:
        some = tl.where(total > 0, total, 1.0)
        at_out = out + line[:, None] * VALUE_SIZE + value_column[None, :]
        tl.store(at_out, (mixed / some[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        target = line * (FRONT + BACK) + FRONT + part
        _store(parts, sums, target, highest, total, mixed, real, VALUE_SIZE, VALUE_COLUMNS)


@triton.jit
def _store(parts, sums, target, highest, total, mixed, real, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Store a part's output and the base-2 logarithm of its softmax mass (-inf for an empty part)."""
    some = total > 0
    at = parts + target[:, None] * SIZE + tl.arange(0, COLUMNS)[None, :]
    tl.store(at, mixed / tl.where(some, total, 1.0)[:, None], mask=_real(real & some, SIZE, COLUMNS))
    tl.store(sums + target, tl.where(some, highest + tl.log2(tl.where(some, total, 1.0)), float("-inf")), mask=real)


@triton.jit
def _merge(
    parts, sums, lengths, shared, out,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, FRONT: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one row, and of its prefix group if it has one, weighted by their softmax mass."""
    row = tl.program_id(0).to(tl.int64)
    target = row * tl.num_programs(1) + tl.program_id(1)
    column, part = tl.arange(0, COLUMNS), tl.arange(0, PADDED)
    mixed = tl.zeros([COLUMNS], tl.float32)
    if tl.load(lengths + row) >= 0:
        first = tl.where(tl.load(shared + row) > 0, 0, FRONT)
        made = (part >= first) & (part < PARTS)
        mass = tl.load(sums + target * PARTS + part, mask=made, other=float("-inf"))
        weight = tl.exp2(mass - tl.max(mass, 0))
        at = parts + (target * PARTS + part[:, None]) * SIZE + column[None, :]
        each = tl.load(at, mask=_real(mass > float("-inf"), SIZE, COLUMNS), other=0.0)
        mixed = tl.sum(each * weight[:, None], 0) / tl.sum(weight, 0)
    _store_head(out + target * SIZE, mixed.to(out.dtype.element_ty), SIZE, COLUMNS)


# -- pages -----------------------------------------------------------------------------------------


def write_pages(k: Tensor, v: Tensor, *, bases: Tensor, layer: int, places: Tensor) -> None:
    """Write k [T, G, D] and v [T, G, V] to `places` [T]."""
    tokens, heads, size = k.shape
    assert k.stride(2) == v.stride(2) == 1
    _write[(tokens, heads)](
        k, v, bases, places, layer, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        HEADS=heads, KEY_SIZE=size, VALUE_SIZE=v.shape[2],
        KEY_COLUMNS=_padded(size), VALUE_COLUMNS=_padded(v.shape[2]), num_warps=1,
    )  # fmt: skip


@triton.jit
def _write(
    k, v, bases, places, layer, k_row, k_head, v_row, v_head, HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, KEY_COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dtype = k.dtype.element_ty
    keys = tl.load(bases + 2 * layer).to(tl.pointer_type(dtype))
    values = tl.load(bases + 2 * layer + 1).to(tl.pointer_type(dtype))
    at = tl.load(places + row) * HEADS + head
    new_key = _load_head(k + row * k_row + head * k_head, KEY_SIZE, KEY_COLUMNS)
    new_value = _load_head(v + row * v_row + head * v_head, VALUE_SIZE, VALUE_COLUMNS)
    _store_head(keys + at * KEY_SIZE, new_key, KEY_SIZE, KEY_COLUMNS)
    _store_head(values + at * VALUE_SIZE, new_value, VALUE_SIZE, VALUE_COLUMNS)


def copy_pages(source: Tensor, target: Tensor, *, bases: Tensor, words: Tensor) -> None:
    """Copy pages `source` to pages `target`, pairwise, keys and values of all layers. `words` [layers, 2]:
    number of int32 words in a page of keys and of values.
    """
    _copy[(len(source), bases.numel())](source, target, bases, words, BLOCK=1024)


@triton.jit
def _copy(source, target, bases, words, BLOCK: tl.constexpr):
    pair, which = tl.program_id(0), tl.program_id(1)
    base = tl.load(bases + which).to(tl.pointer_type(tl.int32))
    count = tl.load(words + which)
    here = tl.load(source + pair).to(tl.int64) * count
    there = tl.load(target + pair).to(tl.int64) * count
    for start in range(0, count, BLOCK):
        word = start + tl.arange(0, BLOCK)
        read = tl.load(tl.multiple_of(base + here + word, 16), mask=word < count)
        tl.store(tl.multiple_of(base + there + word, 16), read, mask=word < count)
