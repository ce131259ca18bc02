"""Pack trajectories into token forests under a token budget.

Members of a group share their common prefixes (`trees.py`). A token is packed once however many
sequences pass through it; `predictors` says at which token each target is predicted.
Knows nothing of tensors, models or algorithms.

    batches = pack(groups, micro_tokens=16_384)
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from saccade.forest.batch import Batch, Forest
from saccade.types import Group, MediaSpan, Trajectory

EVERYTHING = np.empty(0, dtype=np.int64)  # support of a token sampled from the whole vocabulary
Members = tuple[int, Sequence[Trajectory]]  # the index of a group, and some of its trained members


def pack(
    groups: Sequence[Group], *, micro_tokens: int, ends: bool = False, whole: bool = False, dp_size: int = 1
) -> list[Batch]:
    """Forests of at most `micro_tokens` tokens, with whole groups if they fit, in the order of the groups.

    Trajectories that are not `trained`, or have no sampled token, are left out. A group over the
    budget is divided and repeats its trunk, or with `whole` becomes a forest of its own, as does a
    single sequence over the budget. With `ends` the last sampled token of each sequence, at which
    nothing is predicted, is packed too.

    With `dp_size` above 1 each data-parallel group gets one forest, with about the same number of tokens;
    the process that computes it divides it into `pieces`.
    """
    options: dict[str, Any] = {"with_ends": ends, "budget": micro_tokens, "whole": whole}
    trained = [[t for t in group.trajectories if t.trained and t.response_length] for group in groups]
    chosen: list[Members] = [(index, members) for index, members in enumerate(trained) if members]
    if not chosen or dp_size == 1:
        return _batch(chosen, options).pieces() if chosen else []
    dealt, sizes = list[Members](), list[int]()
    for index, left in chosen:
        # The computing process builds the trees; this assumes that members share exactly their prompt.
        size = left[0].prompt_length + sum(t.end - t.prompt_length for t in left)
        if size <= micro_tokens or whole:
            dealt.append((index, left))
            sizes.append(size)
            continue
        for piece in _batch([(index, left)], options).pieces():
            dealt.append((index, left[: len(piece.keys)]))
            sizes.append(piece.tokens)
            left = left[len(piece.keys) :]
    shares = [[dealt[index] for index in mine] for mine in deal(sizes, dp_size)]
    everything, end = _batch([*chain(*shares)], options), 0
    found = []
    for dp_rank, share in enumerate(shares):
        mine = slice(end, end := end + sum(len(members) for _, members in share))
        if share:
            found.append(everything.cut(mine, replace(everything.forest.cut(mine), dp_rank=dp_rank)))
    return found


def deal(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Indices for each part, ascending. Greedy: the largest first, each to the part with the smallest sum."""
    dealt: list[list[int]] = [[] for _ in range(parts)]
    given = [0] * parts
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        least = given.index(min(given))
        dealt[least].append(index)
        given[least] += sizes[index]
    return [sorted(mine) for mine in dealt]


def halves(batch: Batch, *, whole: bool) -> tuple[Batch, Batch] | None:
    """Divide a batch in two by sequences; `whole`: do not divide groups. None if it cannot be divided."""
    count = len(batch.keys)
    cuts = np.flatnonzero(np.diff(batch.groups)) + 1 if whole else np.arange(1, count)
    if not len(cuts):
        return None
    middle = int(cuts[np.abs(cuts - count / 2).argmin()])
    return batch.cut(slice(0, middle)), batch.cut(slice(middle, count))


def _batch(chosen: Sequence[Members], options: dict[str, Any]) -> Batch:
    members = [member for _, some in chosen for member in some]
    media_lists: dict[tuple[MediaSpan, ...], int] = {}
    media_index, last = list[int](), None
    for member in members:
        spans = member.media
        if spans and spans[-1].start >= member.end:  # nothing was sampled after it, so it is not packed
            spans = tuple(span for span in spans if span.start < member.end)
        if spans != last:  # members of a group mostly show the same
            index, last = media_lists.setdefault(spans, len(media_lists)), spans
        media_index.append(index)
    ends, lengths = [member.end for member in members], [member.response_length for member in members]
    offsets = np.cumsum([0, *ends]).tolist()
    support = [member.support for member in members]
    kept = [one or (EVERYTHING,) * n for one, n in zip(support, lengths, strict=True)] if any(support) else []
    advantages = [member.advantages for member in members]
    forest = Forest(
        rows=np.concatenate([member.ids[: member.end] for member in members], dtype=np.int32, casting="same_kind"),
        row_lengths=np.array(ends),
        sampled_runs=np.array([(at + a, at + b) for t, at in zip(members, offsets, strict=False) for a, b in t.runs]),
        lengths=np.array(lengths),
        keys=tuple(member.key for member in members),
        groups=np.repeat([index for index, _ in chosen], [len(some) for _, some in chosen]),
        media_lists=tuple(media_lists),
        media_index=np.array(media_index),
        support=tuple(chain(*kept)) if kept else None,
        **options,
    )
    return Batch(
        forest=forest,
        rollout_logprobs=np.concatenate([member.logprobs[a:b] for member in members for a, b in member.runs]),
        advantages=None if any(a is None for a in advantages) else np.concatenate(advantages),  # type: ignore[arg-type]
    )
