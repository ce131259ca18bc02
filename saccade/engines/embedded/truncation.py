"""Triton kernels of truncated sampling: which ids top_k and top_p keep, and a list of them.

    floors = cut(logits, temperature=heat, top_k=k, top_p=p, lengths=lengths, banned=None)

What is cut away is said by two numbers per row, a level of the logits and the last id that is kept
of those that are exactly at it: no mask [B, V] exists, and nothing is sorted. Equal logits are
ordered by id, so that a set does not depend on how it was found.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192  # of the vocabulary, one turn of a program that reads it all
# Low bits of a float32 that say nothing about a narrower number it was made from.
EMPTY_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


def cut(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    lengths: Tensor,
    banned: Tensor | None,
) -> Tensor:
    """[2, B] int32: the lowest level that is kept of each row of logits [B, V], and the last id at
    that level, as `sampler.kept_ids` keeps them. All for rows that are idle, greedy, or have
    neither top_k [B] (> 0) nor top_p [B] (< 1).
    """
    count, vocabulary = len(temperature), logits.shape[1]
    floors = torch.empty((2, count), dtype=torch.int32, device=logits.device)
    _cut[(count,)](
        logits, temperature if banned is None else banned.view(torch.int8), temperature, top_k,
        top_p, lengths, floors, vocabulary, logits.stride(0), floors.stride(0),
        EMPTY=EMPTY_BITS[logits.dtype], BANNED=banned is not None, BLOCK=BLOCK, num_warps=16,
    )  # fmt: skip
    return floors


@triton.jit
def level_of(logit, EMPTY: tl.constexpr):
    """Integers in the order of the numbers."""
    bits = logit.to(tl.float32).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> EMPTY


@triton.jit
def _read(line, banned, start, vocabulary, BANNED: tl.constexpr, BLOCK: tl.constexpr):
    """A block of logits, its columns, and which of them may be drawn at all."""
    column = start + tl.arange(0, BLOCK)
    real = column < vocabulary
    logit = tl.load(line + column, mask=real, other=float("-inf")).to(tl.float32)
    possible = real & (logit > float("-inf"))
    if BANNED:
        possible = possible & (tl.load(banned + column, mask=real, other=1) == 0)
    return logit, column, possible


@triton.jit
def _measure(
    line, banned, vocabulary, heat, top, low, last, above,
    MASS: tl.constexpr, EMPTY: tl.constexpr, BANNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many ids, or how much mass, lies at `above` or higher, of what (low, last) keeps."""
    found = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        logit, column, possible = _read(line, banned, start, vocabulary, BANNED, BLOCK)
        level = level_of(logit, EMPTY)
        within = possible & (level >= above) & (
            (level > low) | ((level == low) & (column <= last))
        )  # fmt: skip
        if MASS:
            found += tl.where(within, tl.exp((logit - top) / heat), 0.0)
        else:
            found += tl.where(within, 1.0, 0.0)
    return tl.sum(found, 0)


@triton.jit
def _fewest(
    line, banned, vocabulary, heat, top, least, low, last, goal,
    MASS: tl.constexpr, EMPTY: tl.constexpr, BANNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The likeliest ids whose number or mass reaches `goal`, as a lowest level and a last id."""
    # Invariant: what lies at `down` or higher reaches the goal, what lies at `up` or higher not.
    down, up = least.to(tl.int64), level_of(top, EMPTY).to(tl.int64) + 1
    while up - down > 1:
        middle = (down + up) // 2
        if _measure(
            line, banned, vocabulary, heat, top, low, last, middle.to(tl.int32),
            MASS, EMPTY, BANNED, BLOCK,
        ) >= goal:  # fmt: skip
            down = middle
        else:
            up = middle
    level = down.to(tl.int32)
    higher = _measure(
        line, banned, vocabulary, heat, top, low, last, level + 1, MASS, EMPTY, BANNED, BLOCK
    )
    # Of those exactly at the level as many as are needed, in the order of their ids.
    each = 1.0
    if MASS:
        each = tl.exp((_logit(level, EMPTY) - top) / heat)
    wanted = tl.maximum(tl.ceil((goal - higher) / each), 1.0)
    seen, end = 0.0, vocabulary
    for start in range(0, vocabulary, BLOCK):
        logit, column, possible = _read(line, banned, start, vocabulary, BANNED, BLOCK)
        at = level_of(logit, EMPTY)
        tie = possible & (at == level) & ((at > low) | (column <= last))
        order = seen + tl.cumsum(tl.where(tie, 1.0, 0.0), 0)
        here = tl.min(tl.where(tie & (order == wanted), column, vocabulary), 0)
        end = tl.minimum(end, here)
        seen += tl.sum(tl.where(tie, 1.0, 0.0), 0)
    return level, end


@triton.jit
def _logit(level, EMPTY: tl.constexpr):
    """The number of a level."""
    bits = level << EMPTY
    if EMPTY > 0:
        bits = tl.where(level < 0, bits | ((1 << EMPTY) - 1), bits)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _cut(
    logits, banned, temperature, top_k, top_p, lengths, floors, vocabulary, logits_row, floors_row,
    EMPTY: tl.constexpr, BANNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    heat = tl.load(temperature + row)
    most, share = tl.load(top_k + row), tl.load(top_p + row)
    low, last = tl.full((), -(1 << 31), tl.int32), vocabulary
    if (heat > 0) & (tl.load(lengths + row) >= 0) & ((most > 0) | (share < 1)):
        line = logits + row.to(tl.int64) * logits_row
        highest = tl.full([BLOCK], float("-inf"), tl.float32)
        lowest = tl.full([BLOCK], float("inf"), tl.float32)
        number = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocabulary, BLOCK):
            logit, _, possible = _read(line, banned, start, vocabulary, BANNED, BLOCK)
            highest = tl.maximum(highest, tl.where(possible, logit, float("-inf")))
            lowest = tl.minimum(lowest, tl.where(possible, logit, float("inf")))
            number += tl.where(possible, 1.0, 0.0)
        top, least = tl.max(highest, 0), level_of(tl.min(lowest, 0), EMPTY)
        if (most > 0) & (most < tl.sum(number, 0)):
            low, last = _fewest(
                line, banned, vocabulary, heat, top, least, low, last, most.to(tl.float32),
                False, EMPTY, BANNED, BLOCK,
            )  # fmt: skip
        if share < 1:
            least = tl.maximum(least, low)
            whole = _measure(
                line, banned, vocabulary, heat, top, low, last, least,
                True, EMPTY, BANNED, BLOCK,
            )  # fmt: skip
            low, last = _fewest(
                line, banned, vocabulary, heat, top, least, low, last, share * whole,
                True, EMPTY, BANNED, BLOCK,
            )  # fmt: skip
    tl.store(floors + row, low)
    tl.store(floors + floors_row + row, last)


def keep(
    logits: Tensor,
    ids: Tensor,
    *,
    floors: Tensor,
    wanted: Tensor,
    lengths: Tensor,
    banned: Tensor | None,
    tick: Tensor,
    cursor: Tensor,
    kept: Tensor,
    out_spans: Tensor,
) -> None:
    """Write what each row that is `wanted` [B] has kept, in the order of ids, to the next free
    place of `kept`, and where it lies to line `tick` of `out_spans` [ticks, 2, rows]. A row for
    which there is no place left gets the id -1.
    """
    _keep[(len(ids),)](
        logits, logits if banned is None else banned.view(torch.int8), floors, ids, wanted, lengths,
        tick, cursor, kept, out_spans, logits.shape[1], logits.stride(0), floors.stride(0),
        len(kept), out_spans.stride(0), out_spans.stride(1),
        EMPTY=EMPTY_BITS[logits.dtype], BANNED=banned is not None, BLOCK=BLOCK, num_warps=16,
    )  # fmt: skip


@triton.jit
def _keep(
    logits, banned, floors, ids, wanted, lengths, tick, cursor, kept, spans,
    vocabulary, logits_row, floors_row, room, spans_tick, spans_line,
    EMPTY: tl.constexpr, BANNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if (tl.load(wanted + row) != 0) & (tl.load(lengths + row) >= 0):
        line = logits + row.to(tl.int64) * logits_row
        low, last = tl.load(floors + row), tl.load(floors + floors_row + row)
        count = _measure(
            line, banned, vocabulary, 1.0, 0.0, low, last, low, False, EMPTY, BANNED, BLOCK
        ).to(tl.int32)
        first = tl.atomic_add(cursor, count.to(tl.int64))
        at = spans + tl.load(tick).to(tl.int64) * spans_tick + row
        tl.store(at, first)
        tl.store(at + spans_line, count)
        if first + count > room:
            tl.store(ids + row, -1)
        else:
            seen = first
            for start in range(0, vocabulary, BLOCK):
                logit, column, possible = _read(line, banned, start, vocabulary, BANNED, BLOCK)
                level = level_of(logit, EMPTY)
                within = possible & ((level > low) | ((level == low) & (column <= last)))
                order = tl.cumsum(tl.where(within, 1, 0), 0)
                tl.store(kept + seen + order - 1, column, mask=within)
                seen += tl.sum(tl.where(within, 1, 0), 0)
