"""Triton kernels of the paged engine, from the logits to the next step: the draw, and the state of
every sequence one token later. What truncated sampling cuts away is found in truncation.py.

    ids, logprobs = draw(logits, temperature=heat, keys=keys, index=i, banned=None, floors=floors)

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.engines.embedded import rows as fields
from saccade.engines.embedded.truncation import EMPTY_BITS, level_of

CHUNK = 4096  # of the vocabulary, one program each


# -- drawing ---------------------------------------------------------------------------------------


def draw(
    logits: Tensor,
    *,
    temperature: Tensor,
    keys: Tensor,
    index: Tensor,
    banned: Tensor | None,
    rows: Tensor | None = None,
    floors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One id per row and its log-prob, as `sampler.sample` draws it, greedily where `temperature`
    [B] is 0; `floors` from `cut`. logits [B, V], or [R, V] with `rows` [B] saying which to read; no
    wider copy of them is made.
    """
    count, vocabulary = len(temperature), logits.shape[1]
    chunks = triton.cdiv(vocabulary, CHUNK)
    assert logits.stride(1) == 1
    noisy, highest, mass = torch.empty(
        (3, count, chunks), dtype=torch.float32, device=logits.device
    )
    place = torch.empty((count, chunks), dtype=torch.int32, device=logits.device)
    lines = temperature if rows is None else rows
    _draw[(chunks, count)](
        logits, lines, temperature if banned is None else banned.view(torch.int8),
        temperature, keys, index, temperature if floors is None else floors, noisy, highest, mass,
        place, vocabulary, logits.stride(0), 0 if floors is None else floors.stride(0),
        ROWS=rows is not None, BANNED=banned is not None, CUT=floors is not None,
        EMPTY=EMPTY_BITS[logits.dtype], CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
    ids = torch.empty(count, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(count, dtype=torch.float32, device=logits.device)
    _pick[(count,)](
        logits, lines, temperature, noisy, highest, mass, place, ids, logprobs, logits.stride(0),
        ROWS=rows is not None, CHUNKS=chunks, PADDED=triton.next_power_of_2(chunks), num_warps=1,
    )  # fmt: skip
    return ids, logprobs


@triton.jit
def _mix(x):
    """The hash of `sampler.keyed_gumbel`, in unsigned integers."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _draw(
    logits, rows, banned, temperature, keys, index, floors, noisy, highest, mass, place,
    vocabulary, logits_row, floors_row,
    ROWS: tl.constexpr, BANNED: tl.constexpr, CUT: tl.constexpr, EMPTY: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    chunk, row = tl.program_id(0), tl.program_id(1)
    source = row.to(tl.int64)
    if ROWS:
        source = tl.load(rows + row).to(tl.int64)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    real = column < vocabulary
    score = tl.load(logits + source * logits_row + column, mask=real, other=float("-inf"))
    level = level_of(score, EMPTY)
    heat = tl.load(temperature + row)
    score = score.to(tl.float32) / tl.where(heat > 0, heat, 1.0)
    if BANNED:
        out = tl.load(banned + column, mask=real, other=1)
        score = tl.where(out != 0, float("-inf"), score)
    if CUT:
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
    # Gumbel noise is -log(-log u): what is highest with it has the lowest -log(u) / weight.
    wait = tl.where(heat > 0, -tl.log(uniform) / weight, -score)
    least, at = tl.min(wait, 0, return_indices=True)
    best = tl.where(heat > 0, top - tl.log(least), top)
    target = row * tl.num_programs(0) + chunk
    tl.store(noisy + target, best)
    # Where logits are no numbers any column may come out, also one past the end.
    tl.store(place + target, tl.minimum(chunk * CHUNK + at, vocabulary - 1))
    tl.store(highest + target, top)
    tl.store(mass + target, tl.sum(weight, 0))


@triton.jit
def _pick(
    logits, rows, temperature, noisy, highest, mass, place, ids, logprobs, logits_row,
    ROWS: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0), tl.arange(0, PADDED)
    source = row.to(tl.int64)
    if ROWS:
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


# -- from one token to the next --------------------------------------------------------------------


def advance(
    ids: Tensor,
    logprobs: Tensor,
    *,
    state: Tensor,
    eos: Tensor,
    tick: Tensor,
    out_ids: Tensor,
    out_logprobs: Tensor,
) -> None:
    """Note what was drawn in line `tick` of the outputs (-1 for an idle row) and make it the next
    token to read. A row that ends, or has drawn -1, becomes idle. `state` as in rows.py, outputs
    [ticks, rows].
    """
    count = len(ids)
    _advance[(triton.cdiv(count, 128),)](
        ids, logprobs, state, eos, tick, out_ids, out_logprobs, count, state.stride(0),
        out_ids.stride(0), EOS=len(eos), BLOCK=128,
        TOKEN=fields.TOKEN, LENGTH=fields.LENGTH, POSITION=fields.POSITION, INDEX=fields.INDEX,
        REMAINING=fields.REMAINING, STOPS=fields.STOPS,
    )  # fmt: skip
    tick.add_(1)


@triton.jit
def _advance(
    ids, logprobs, state, eos, tick, out_ids, out_logprobs, count, field, line,
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
    now = tl.load(tick).to(tl.int64) * line + row
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
