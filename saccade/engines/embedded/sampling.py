"""The next token of each sequence from the logits of its last one, in torch.

Noise is keyed, not drawn: the token at index i of a trajectory depends on its key, i and the logits
alone, never on which other sequences share the batch.

    drawn = sample(logits, Sampling(temperature=1.0), banned=None, keys=keys, index=index)

Legend: B sequences, V vocabulary.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.engines.embedded.sequences import Sequence
from saccade.forest.device_ops import to_device
from saccade.forest.logprobs import sampling_logits
from saccade.types import Sampling


@dataclass(frozen=True, kw_only=True)
class Drawn:
    ids: Tensor  # [B]
    logprobs: Tensor  # [B] fp32, of the distribution that was sampled from
    kept: Tensor | None  # [B, V] bool, when sampling was truncated


NOTHING_CUT = np.empty(0, dtype=np.int64)  # the support of a token drawn from the whole vocabulary
BY_THREADS = 1 << 20  # numbers of noise that threads of torch compute sooner than one of numpy
SORTED = 64  # rows per call for truncated sampling outside of a CUDA graph, which sorts in float32
# (logits, lines to read or None for all, sampling, keys, index) → a draw from the whole vocabulary.
QuickDraw = Callable[[Tensor, Tensor | None, Sampling, Tensor, Tensor], Drawn]


def truncates(sampling: Sampling) -> bool:
    """Whether top_k or top_p restrict the ids to draw from."""
    return sampling.truncated and sampling.temperature > 0


def draw(
    logits: Tensor,
    lines: np.ndarray | None,
    sequences: SequenceOf[Sequence],
    *,
    banned: Tensor | None,
    quick: QuickDraw | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids and log-probs. `lines`: line of the logits of each sequence; None: in order. The ids
    that truncated sampling kept are appended to each sequence's support.
    """
    ids = np.empty(len(sequences), dtype=np.int64)
    logprobs = np.empty(len(sequences), dtype=np.float32)
    for sampling, chosen in _pieces(sequences):
        members = [sequences[i] for i in chosen]
        own: Tensor | None = None
        if lines is not None or len(chosen) < len(sequences):
            own = to_device(np.array(chosen) if lines is None else lines[chosen], logits.device)
        keys = to_device(np.array([s.request.noise for s in members]), logits.device)
        index = to_device(np.array([s.request.first_index + s.sampled for s in members]), logits.device)
        if quick is not None and not truncates(sampling):
            drawn = quick(logits, own, sampling, keys, index)
        else:
            drawn = sample(logits if own is None else logits[own], sampling, banned=banned, keys=keys, index=index)
        ids[chosen], logprobs[chosen] = drawn.ids.cpu().numpy(), drawn.logprobs.cpu().numpy()
        kept = drawn.kept.cpu().numpy() if sampling.support and drawn.kept is not None else None
        for row, sequence in enumerate(members):
            if kept is not None:
                sequence.support.append(np.flatnonzero(kept[row]))
            elif sequence.request.sampling.support and truncates(sequence.request.sampling):
                sequence.support.append(NOTHING_CUT)
    return ids, logprobs


def _pieces(sequences: SequenceOf[Sequence]) -> Iterator[tuple[Sampling, list[int]]]:
    groups: dict[tuple[object, ...], tuple[Sampling, list[int]]] = {}
    for row, sequence in enumerate(sequences):
        how = sequence.sampling
        drawn_alike = (how.temperature, how.top_p, how.top_k, how.support)  # whatever ends them
        groups.setdefault(drawn_alike, (how, []))[1].append(row)
    for sampling, chosen in groups.values():
        most = SORTED if truncates(sampling) else len(chosen)
        for first in range(0, len(chosen), most):
            yield sampling, chosen[first : first + most]


def sample(logits: Tensor, sampling: Sampling, *, banned: Tensor | None, keys: Tensor, index: Tensor) -> Drawn:
    """logits [B, V] straight from the head; keys and index [B] int64 name the noise of each row."""
    greedy = sampling.temperature == 0
    scores = sampling_logits(logits, 1.0 if greedy else sampling.temperature, banned)
    kept = None
    if sampling.truncated and not greedy:
        kept = allowed_ids(scores, sampling.top_k, sampling.top_p)
        scores = scores.masked_fill(~kept, -torch.inf)
    # argmax(z + Gumbel noise) is a draw from softmax(z).
    ids = (scores if greedy else scores + keyed_gumbel(keys, index, scores.shape[-1])).argmax(-1)
    chosen = scores.gather(-1, ids[:, None]).squeeze(-1)
    return Drawn(ids=ids, logprobs=chosen - scores.logsumexp(-1), kept=kept)


def allowed_ids(scores: Tensor, top_k: int, top_p: float) -> Tensor:
    """[B, V] bool: the k most likely ids, and of these the fewest whose mass reaches p, at least one. Of
    equally likely ids the lower ones are kept.
    """
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    keep = ordered > -torch.inf
    if top_k > 0:
        keep[:, top_k:] = False
        ordered = ordered.masked_fill(~keep, -torch.inf)
    if top_p < 1:
        mass = ordered.softmax(-1)
        keep &= mass.cumsum(-1) - mass < top_p
    return torch.zeros_like(keep).scatter(-1, order, keep)


def keyed_gumbel(keys: Tensor, index: Tensor, vocabulary: int) -> Tensor:
    """[B, V] Gumbel noise, a pure function of (key, index, id). The hash wraps around in int32 on
    every device.
    """
    words: list[Any] = [word.to(torch.int32) for word in (keys, keys >> 32, index + 0x51ED27)]  # the low 32 bits
    words.append(torch.arange(vocabulary, device=keys.device, dtype=torch.int32) * -0x61C88647)
    if keys.device.type == "cpu" and len(keys) * vocabulary < BY_THREADS:
        words = [word.numpy() for word in words]  # small products take a third of the time
    low, high, later, column = words
    bits = _mix(_mix(low ^ _mix(high ^ _mix(later)))[:, None] + column[None, :])
    uniform = torch.as_tensor((bits >> 8) & 0x7FFFFF).float().add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def _mix(x: Any) -> Any:
    """A bijection of 32 bits in which every input bit flips about half of the output bits."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * -0x7B935975
    return x ^ ((x >> 16) & 0xFFFF)
