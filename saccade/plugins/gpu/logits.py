"""Log-prob and entropy of each row of logits in one pass, and their gradient, written over the logits.

Logits stay in the head's output dtype; the arithmetic is fp32. Banned ids and ids outside the
kept set have no mass. Legend: R rows, V vocabulary.

    logprobs, entropies, normalisers = read(logits, targets, 1.0, banned, None)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

READ_BLOCK, WRITE_BLOCK = 8192, 4096


def read(
    logits: Tensor, targets: Tensor, temperature: float, banned: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """logits [R, V] → log-prob of the target, entropy and log-sum-exp of every row, fp32 [R]."""
    rows, vocabulary = logits.shape
    logprobs, entropies, normalisers = logits.new_empty((3, rows), dtype=torch.float32)
    if rows:
        _read[(rows,)](
            logits, logits.stride(0), targets, *_masks(banned, kept), logprobs, entropies, normalisers,
            vocabulary, temperature, BLOCK=READ_BLOCK, num_warps=8,
        )  # fmt: skip
    return logprobs, entropies, normalisers


def write_gradient(
    logits: Tensor, how: Sequence[Any], found: Sequence[Tensor], to_logprobs: Tensor, to_entropies: Tensor | None
) -> Tensor:
    """Overwrite the logits with their gradient and return it. `how`: targets, temperature, banned and
    kept, as for `read`; `found`: entropies and normalisers that `read` returned.
    """
    rows, vocabulary = logits.shape
    targets, temperature, *masks = how
    if rows:
        _write[(rows, triton.cdiv(vocabulary, WRITE_BLOCK))](
            logits, logits.stride(0), targets, *_masks(*masks), *found, to_logprobs, to_entropies,
            vocabulary, temperature, BLOCK=WRITE_BLOCK, num_warps=4,
        )  # fmt: skip
    return logits


def _masks(*masks: Tensor | None) -> list[Any]:
    """The masks as bytes; code for a mask that is None is not compiled."""
    return [None if mask is None else mask.view(torch.uint8) for mask in masks]


@triton.jit
def _scores(row, columns, logits, stride, banned, kept, vocabulary, temperature):  # pragma: no cover - runs on the GPU
    """Logits of the sampling distribution: divided by the temperature, -inf for masked ids."""
    inside = columns < vocabulary
    scores = tl.load(logits + row * stride + columns, mask=inside, other=-float("inf"))
    scores = scores.to(tl.float32) / temperature
    if banned is not None:
        gone = tl.load(banned + columns, mask=inside, other=1)
        scores = tl.where(gone != 0, -float("inf"), scores)
    if kept is not None:
        stays = tl.load(kept + row * vocabulary + columns, mask=inside, other=0)
        scores = tl.where(stays == 0, -float("inf"), scores)
    return scores


@triton.jit
def _read(
    logits, stride, targets, banned, kept, logprobs, entropies, normalisers, vocabulary, temperature,
    BLOCK: tl.constexpr,
):  # fmt: skip  # pragma: no cover - runs on the GPU
    row = tl.program_id(0).to(tl.int64)
    best = tl.full((), -float("inf"), tl.float32)
    mass = tl.zeros((), tl.float32)  # sum of exp(score - best)
    moment = tl.zeros((), tl.float32)  # sum of exp(score - best) (score - best)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        scores = _scores(row, columns, logits, stride, banned, kept, vocabulary, temperature)
        higher = tl.maximum(best, tl.max(scores, 0))
        base = tl.where(higher == -float("inf"), 0.0, higher)  # 0 while all scores are -inf
        drop = tl.where(best == -float("inf"), 0.0, best - base)
        shrink = tl.where(best == -float("inf"), 0.0, tl.exp(drop))
        distance = tl.where(scores == -float("inf"), 0.0, scores - base)
        weight = tl.where(scores == -float("inf"), 0.0, tl.exp(distance))
        moment = (moment + mass * drop) * shrink + tl.sum(weight * distance, 0)
        mass = mass * shrink + tl.sum(weight, 0)
        best = higher
    normaliser = best + tl.log(mass)
    target = tl.load(targets + row)
    chosen = _scores(row, target, logits, stride, banned, kept, vocabulary, temperature)
    tl.store(logprobs + row, chosen - normaliser)
    tl.store(entropies + row, tl.log(mass) - moment / mass)
    tl.store(normalisers + row, normaliser)


@triton.jit
def _write(
    logits, stride, targets, banned, kept, entropies, normalisers, to_logprobs, to_entropies, vocabulary,
    temperature, BLOCK: tl.constexpr,
):  # fmt: skip  # pragma: no cover - runs on the GPU
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scores = _scores(row, columns, logits, stride, banned, kept, vocabulary, temperature)
    alive = scores != -float("inf")
    surprise = tl.where(alive, scores - tl.load(normalisers + row), 0.0)  # log-prob
    share = tl.where(alive, tl.exp(surprise), 0.0)
    to_logprob = tl.load(to_logprobs + row).to(tl.float32)
    gradient = tl.where(columns == tl.load(targets + row), to_logprob, 0.0) - to_logprob * share
    if to_entropies is not None:
        to_entropy = tl.load(to_entropies + row).to(tl.float32)
        gradient -= to_entropy * share * (surprise + tl.load(entropies + row))
    gradient = tl.where(alive, gradient, 0.0) / temperature
    place = logits + row * stride + columns
    tl.store(place, gradient.to(logits.dtype.element_ty), mask=columns < vocabulary)
