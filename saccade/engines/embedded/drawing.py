"""The next token of each sequence from the logits of its last one, whatever its settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from torch import Tensor

from saccade.engines.embedded.sampler import Drawn, sample
from saccade.engines.embedded.sequences import Sequence, by_sampling, cuts
from saccade.forest.to_device import to_device
from saccade.types import Sampling

NOTHING_CUT = np.empty(0, dtype=np.int64)  # the support of a token drawn from the whole vocabulary
SORTED = 64  # rows at a time: where ids are cut away outside of a graph, they are sorted in float32
# (logits, lines to read or all, settings, keys, index): where nothing is cut away.
QuickDraw = Callable[[Tensor, Tensor | None, Sampling, Tensor, Tensor], Drawn]


def draw(
    logits: Tensor,
    lines: np.ndarray | None,
    sequences: SequenceOf[Sequence],
    *,
    banned: Tensor | None,
    quick: QuickDraw | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """ids and log-probs. `lines` says which line of the logits is whose; without it they are in
    order. What was kept by truncated sampling is appended to each sequence's support.
    """
    ids = np.empty(len(sequences), dtype=np.int64)
    logprobs = np.empty(len(sequences), dtype=np.float32)
    for sampling, chosen in _pieces(sequences):
        members = [sequences[i] for i in chosen]
        own: Tensor | None = None
        if lines is not None or len(chosen) < len(sequences):
            own = to_device(np.array(chosen) if lines is None else lines[chosen], logits.device)
        drawn = _draw_alike(logits, own, sampling, members, banned, quick)
        ids[chosen], logprobs[chosen] = drawn.ids.cpu().numpy(), drawn.logprobs.cpu().numpy()
        read = sampling.support and drawn.kept is not None
        kept = drawn.kept.cpu().numpy() if read else None  # type: ignore[union-attr]
        for row, sequence in enumerate(members):
            if kept is not None:
                sequence.support.append(np.flatnonzero(kept[row]))
            elif sequence.request.sampling.support and cuts(sequence.request.sampling):
                sequence.support.append(NOTHING_CUT)
    return ids, logprobs


def _pieces(sequences: SequenceOf[Sequence]) -> Iterator[tuple[Sampling, list[int]]]:
    for sampling, chosen in by_sampling(sequences):
        most = SORTED if cuts(sampling) else len(chosen)
        for first in range(0, len(chosen), most):
            yield sampling, chosen[first : first + most]


def _draw_alike(
    logits: Tensor,
    lines: Tensor | None,
    sampling: Sampling,
    members: SequenceOf[Sequence],
    banned: Tensor | None,
    quick: QuickDraw | None,
) -> Drawn:
    keys = torch.tensor([s.request.noise for s in members])
    index = torch.tensor([s.request.first_index + s.sampled for s in members])
    keys, index = (to_device(x, logits.device) for x in (keys, index))
    if quick is not None and not cuts(sampling):
        return quick(logits, lines, sampling, keys, index)
    scores = logits if lines is None else logits[lines]
    return sample(scores, sampling, banned=banned, keys=keys, index=index)
