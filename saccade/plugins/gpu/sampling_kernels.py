"""Triton kernels from the logits to the next step: truncation by top_k and top_p, a list of the kept
ids, sampling, and advancing the state of every sequence by one token.

    floors = cut(logits, temperature=heat, top_p=p, state=state, banned=None)
    ids, logprobs = draw(logits, temperature=heat, keys=keys, index=i, banned=None, floors=floors)

Two numbers per row describe the truncation: the lowest level of logits that is kept (`level_of`), and
the last kept id among those exactly at it. So there is no mask [B, V] and nothing is sorted. Equal
logits are ordered by id, so that the set is unique.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.plugins.gpu import decode_state as fields

CHUNK = 4096  # ids per program
BLOCK = 8192  # ids per iteration of a program that reads the whole vocabulary
# Low bits of a float32 that are zero if it was converted from this dtype.
EMPTY_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


Mask = Tensor | None  # [V], true for ids that are never sampled
# Total number of kept ids, the ids, and first index and count for each step and row: [steps, 2, rows].
Support = tuple[Tensor, Tensor, Tensor]


# -- truncation ------------------------------------------------------------------------------------


def cut(logits: Tensor, *, temperature: Tensor, top_p: Tensor, state: Tensor, banned: Mask) -> Tensor:
    """[2, B] int32: the lowest kept level in each row of logits [B, V], and the last kept id at that
    level, equivalent to `sampling.allowed_ids`. Rows that are idle, greedy, or have neither top_k
    (> 0) nor top_p [B] (< 1) keep all ids. `state` as in decode_state.py.
    """
    count, vocabulary = len(temperature), logits.shape[1]
    floors = torch.empty((2, count), dtype=torch.int32, device=logits.device)
    _cut[(count,)](
        logits, _bytes(banned), temperature, state[fields.TOP_K], top_p, state[fields.LENGTH], floors, vocabulary,
        logits.stride(0), floors.stride(0), EMPTY=EMPTY_BITS[logits.dtype], BLOCK=BLOCK, num_warps=16,
    )  # fmt: skip
    return floors


def _bytes(mask: Tensor | None) -> Tensor | None:
    """The mask as kernels read it; code for a mask that is None is not compiled."""
    return None if mask is None else mask.view(torch.int8)


@triton.jit
def level_of(logit, EMPTY: tl.constexpr):
    """Map logits to integers of the same order."""
    bits = logit.to(tl.float32).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> EMPTY


@triton.jit
def _read(line, banned, start, vocabulary, BLOCK: tl.constexpr):
    """A block of logits, its columns, and a mask of those that can be sampled."""
    column = start + tl.arange(0, BLOCK)
    real = column < vocabulary
    logit = tl.load(line + column, mask=real, other=float("-inf")).to(tl.float32)
    possible = real & (logit > float("-inf"))
    if banned is not None:
        possible = possible & (tl.load(banned + column, mask=real, other=1) == 0)
    return logit, column, possible


@triton.jit
def _measure(
    line, banned, vocabulary, heat, top, low, last, above,
    MASS: tl.constexpr, EMPTY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Number or mass of the ids at level `above` or higher, among those that (low, last) keeps."""
    found = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        logit, column, possible = _read(line, banned, start, vocabulary, BLOCK)
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
    MASS: tl.constexpr, EMPTY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The fewest likeliest ids whose number or mass reaches `goal`, as lowest level and last id."""
    # Bisection; invariant: ids at level `down` or higher reach the goal, those at `up` or higher do not.
    down, up = least.to(tl.int64), level_of(top, EMPTY).to(tl.int64) + 1
    while up - down > 1:
        middle = (down + up) // 2
        if _measure(
            line, banned, vocabulary, heat, top, low, last, middle.to(tl.int32),
            MASS, EMPTY, BLOCK,
        ) >= goal:  # fmt: skip
            down = middle
        else:
            up = middle
    level = down.to(tl.int32)
    higher = _measure(line, banned, vocabulary, heat, top, low, last, level + 1, MASS, EMPTY, BLOCK)
    # Of the ids exactly at the level keep as many as needed, in the order of ids.
    each = 1.0
    if MASS:
        each = tl.exp((_logit(level, EMPTY) - top) / heat)
    wanted = tl.maximum(tl.ceil((goal - higher) / each), 1.0)
    seen, end = 0.0, vocabulary
    for start in range(0, vocabulary, BLOCK):
        logit, column, possible = _read(line, banned, start, vocabulary, BLOCK)
        at = level_of(logit, EMPTY)
        tie = possible & (at == level) & ((at > low) | (column <= last))
        order = seen + tl.cumsum(tl.where(tie, 1.0, 0.0), 0)
        here = tl.min(tl.where(tie & (order == wanted), column, vocabulary), 0)
        end = tl.minimum(end, here)
        seen += tl.sum(tl.where(tie, 1.0, 0.0), 0)
    return level, end


@triton.jit
def _logit(level, EMPTY: tl.constexpr):
    """The logit of a level: the inverse of `level_of`."""
    bits = level << EMPTY
    if EMPTY > 0:
        bits = tl.where(level < 0, bits | ((1 << EMPTY) - 1), bits)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _cut(
    logits, banned, temperature, top_k, top_p, lengths, floors, vocabulary, logits_row, floors_row,
    EMPTY: tl.constexpr, BLOCK: tl.constexpr,
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
            logit, _, possible = _read(line, banned, start, vocabulary, BLOCK)
            highest = tl.maximum(highest, tl.where(possible, logit, float("-inf")))
            lowest = tl.minimum(lowest, tl.where(possible, logit, float("inf")))
            number += tl.where(possible, 1.0, 0.0)
        top, least = tl.max(highest, 0), level_of(tl.min(lowest, 0), EMPTY)
        if (most > 0) & (most < tl.sum(number, 0)):
            low, last = _fewest(
                line, banned, vocabulary, heat, top, least, low, last, most.to(tl.float32),
                False, EMPTY, BLOCK,
            )  # fmt: skip
        if share < 1:
            least = tl.maximum(least, low)
            whole = _measure(line, banned, vocabulary, heat, top, low, last, least, True, EMPTY, BLOCK)
            low, last = _fewest(
                line, banned, vocabulary, heat, top, least, low, last, share * whole,
                True, EMPTY, BLOCK,
            )  # fmt: skip
    tl.store(floors + row, low)
    tl.store(floors + floors_row + row, last)


def keep(
    logits: Tensor, ids: Tensor, *, floors: Tensor, state: Tensor, banned: Mask, step_index: Tensor, out: Support
) -> None:
    """For each row with the field SUPPORT, append its kept ids, in order, to the list in `out`, and write
    their first index and count to line `step_index` of its spans. A row that does not fit gets the
    id -1.
    """
    cursor, kept, spans = out
    _keep[(len(ids),)](
        logits, _bytes(banned), floors, ids, state[fields.SUPPORT], state[fields.LENGTH], step_index, cursor, kept,
        spans, logits.shape[1], logits.stride(0), floors.stride(0), len(kept), *spans.stride()[:2],
        EMPTY=EMPTY_BITS[logits.dtype], BLOCK=BLOCK, num_warps=16,
    )  # fmt: skip


@triton.jit
def _keep(
    logits, banned, floors, ids, wanted, lengths, step_index, cursor, kept, spans,
    vocabulary, logits_row, floors_row, room, spans_tick, spans_line,
    EMPTY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if (tl.load(wanted + row) != 0) & (tl.load(lengths + row) >= 0):
        line = logits + row.to(tl.int64) * logits_row
        low, last = tl.load(floors + row), tl.load(floors + floors_row + row)
        count = _measure(line, banned, vocabulary, 1.0, 0.0, low, last, low, False, EMPTY, BLOCK).to(tl.int32)
        first = tl.atomic_add(cursor, count.to(tl.int64))
        at = spans + tl.load(step_index).to(tl.int64) * spans_tick + row
        tl.store(at, first)
        tl.store(at + spans_line, count)
        if first + count > room:
            tl.store(ids + row, -1)
        else:
            seen = first
            for start in range(0, vocabulary, BLOCK):
                logit, column, possible = _read(line, banned, start, vocabulary, BLOCK)
                level = level_of(logit, EMPTY)
                within = possible & ((level > low) | ((level == low) & (column <= last)))
                order = tl.cumsum(tl.where(within, 1, 0), 0)
                tl.store(kept + seen + order - 1, column, mask=within)
                seen += tl.sum(tl.where(within, 1, 0), 0)


# -- drawing ---------------------------------------------------------------------------------------


def draw(
    logits: Tensor,
    *,
    temperature: Tensor,
    keys: Tensor,
    index: Tensor,
    banned: Mask,
    rows: Tensor | None = None,
    floors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample one id per row and return it with its log-prob, as `sampling.sample` does; greedy if
    `temperature` [B] is 0; `floors` from `cut`. logits [B, V], or [R, V] with the indices `rows` [B];
    they are not copied to float32.
    """
    count, vocabulary = len(temperature), logits.shape[1]
    chunks = triton.cdiv(vocabulary, CHUNK)
    assert logits.stride(1) == 1
    noisy, highest, mass = torch.empty((3, count, chunks), dtype=torch.float32, device=logits.device)
    place = torch.empty((count, chunks), dtype=torch.int32, device=logits.device)
    _draw[(chunks, count)](
        logits, rows, _bytes(banned), temperature, keys, index, floors, noisy, highest, mass, place,
        vocabulary, logits.stride(0), 0 if floors is None else floors.stride(0),
        EMPTY=EMPTY_BITS[logits.dtype], CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
    ids = torch.empty(count, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(count, dtype=torch.float32, device=logits.device)
    _pick[(count,)](
        logits, rows, temperature, noisy, highest, mass, place, ids, logprobs, logits.stride(0),
        CHUNKS=chunks, PADDED=triton.next_power_of_2(chunks), num_warps=1,
    )  # fmt: skip
    return ids, logprobs


@triton.jit
def _mix(x):
    """The hash of `sampling.keyed_gumbel`, in unsigned integers."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _draw(
    logits, rows, banned, temperature, keys, index, floors, noisy, highest, mass, place,
    vocabulary, logits_row, floors_row, EMPTY: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    chunk, row = tl.program_id(0), tl.program_id(1)
    source = row.to(tl.int64)
    if rows is not None:
        source = tl.load(rows + row).to(tl.int64)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    real = column < vocabulary
    score = tl.load(logits + source * logits_row + column, mask=real, other=float("-inf"))
    level = level_of(score, EMPTY)
    heat = tl.load(temperature + row)
    score = score.to(tl.float32) / tl.where(heat > 0, heat, 1.0)
    if banned is not None:
        out = tl.load(banned + column, mask=real, other=1)
        score = tl.where(out != 0, float("-inf"), score)
    if floors is not None:
        low, last = tl.load(floors + row), tl.load(floors + floors_row + row)
        within = (level > low) | ((level == low) & (column <= last))
        score = tl.where(within, score, float("-inf"))
    top = tl.max(score, 0)
    weight = tl.exp(score - tl.where(top > float("-inf"), top, 0.0))

    key = tl.load(keys + row).to(tl.int64)
    number = _mix((tl.load(index + row).to(tl.int64) + 0x51ED27).to(tl.uint32))
    seed = _mix(key.to(tl.uint32) ^ _mix((key >> 32).to(tl.uint32) ^ number))
    bits = _mix(seed + column.to(tl.uint32) * 0x9E3779B9)
    uniform = (((bits >> 8) & 0x7FFFFF).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    # argmax(score + Gumbel noise), the noise being -log(-log u), is argmin(-log(u) / weight).
    wait = tl.where(heat > 0, -tl.log(uniform) / weight, -score)
    least, at = tl.min(wait, 0, return_indices=True)
    best = tl.where(heat > 0, top - tl.log(least), top)
    target = row * tl.num_programs(0) + chunk
    tl.store(noisy + target, best)
    # If logits are NaN, `at` may be any column, also one past the end.
    tl.store(place + target, tl.minimum(chunk * CHUNK + at, vocabulary - 1))
    tl.store(highest + target, top)
    tl.store(mass + target, tl.sum(weight, 0))


@triton.jit
def _pick(
    logits, rows, temperature, noisy, highest, mass, place, ids, logprobs, logits_row,
    CHUNKS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0), tl.arange(0, PADDED)
    source = row.to(tl.int64)
    if rows is not None:
        source = tl.load(rows + row).to(tl.int64)
    at, real = row * CHUNKS + chunk, chunk < CHUNKS
    _, best = tl.max(tl.load(noisy + at, mask=real, other=float("-inf")), 0, return_indices=True)
    best = tl.minimum(best, CHUNKS - 1)
    tops = tl.load(highest + at, mask=real, other=float("-inf"))
    top = tl.max(tops, 0)
    total = tl.sum(tl.load(mass + at, mask=real, other=0.0) * tl.exp(tops - top), 0)
    drawn = tl.load(place + row * CHUNKS + best).to(tl.int64)
    heat = tl.load(temperature + row)
    score = tl.load(logits + source * logits_row + drawn).to(tl.float32)
    score = score / tl.where(heat > 0, heat, 1.0)
    tl.store(ids + row, drawn)
    tl.store(logprobs + row, score - top - tl.log(total))


# -- state of the next step ------------------------------------------------------------------------


def advance(
    ids: Tensor, logprobs: Tensor, *, state: Tensor, eos: Tensor, step_index: Tensor, out: tuple[Tensor, Tensor]
) -> None:
    """Write ids (-1 for an idle row) and log-probs to line `step_index` of `out`, each [steps, rows], and
    make each id the next input. A row that ends, or whose id is -1, becomes idle.
    """
    count = len(ids)
    _advance[(triton.cdiv(count, 128),)](
        ids, logprobs, state, eos, step_index, *out, count, state.stride(0), out[0].stride(0), EOS=len(eos), BLOCK=128,
        TOKEN=fields.TOKEN, LENGTH=fields.LENGTH, POSITION=fields.POSITION, INDEX=fields.INDEX,
        REMAINING=fields.REMAINING, STOPS=fields.STOPS,
    )  # fmt: skip
    step_index.add_(1)


@triton.jit
def _advance(
    ids, logprobs, state, eos, step_index, out_ids, out_logprobs, count, field, line,
    EOS: tl.constexpr, BLOCK: tl.constexpr, TOKEN: tl.constexpr, LENGTH: tl.constexpr,
    POSITION: tl.constexpr, INDEX: tl.constexpr, REMAINING: tl.constexpr, STOPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = row < count
    at = state + row
    token = tl.load(ids + row, mask=real, other=0)
    length = tl.load(at + LENGTH * field, mask=real, other=-1)
    position = tl.load(at + POSITION * field, mask=real, other=0)
    index = tl.load(at + INDEX * field, mask=real, other=0)
    remaining = tl.load(at + REMAINING * field, mask=real, other=0) - 1
    stops = tl.load(at + STOPS * field, mask=real, other=0) != 0
    running = (length >= 0) & (token >= 0)
    now = tl.load(step_index).to(tl.int64) * line + row
    tl.store(out_ids + now, tl.where(running, token, -1), mask=real)
    tl.store(out_logprobs + now, tl.load(logprobs + row, mask=real, other=0.0), mask=real)
    ends = remaining <= 0
    for i in tl.static_range(EOS):
        ends = ends | (stops & (token == tl.load(eos + i)))
    tl.store(at + TOKEN * field, tl.maximum(token, 0), mask=real)
    tl.store(at + LENGTH * field, tl.where(running & ~ends, length + 1, -1), mask=real)
    tl.store(at + POSITION * field, position + 1, mask=real)
    tl.store(at + INDEX * field, index + 1, mask=real)
    tl.store(at + REMAINING * field, remaining, mask=real)
