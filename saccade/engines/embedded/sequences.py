"""The state of each request in the embedded engine: while it waits, while its prompt is computed, while
it decodes, and between two turns of an episode; and the sampled tokens.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from saccade.models.chat import Chat
from saccade.types import Completion, Request, Sampling


@dataclass(kw_only=True, eq=False)
class Sequence:
    """A request from its submission to its completion: it waits, has a slot, is ready (it decodes)
    and ends, or is evicted and gets a slot again.
    """

    request: Request
    prefill_key: tuple[int, Any]  # (version of its first key, opening); requests with equal keys share its prefill
    slot: int = -1
    cached_prompt: int = 0  # its first tokens that are cached before its own prefill: a kept turn, or the opening
    rope_delta: int = 0  # position id of a new token, minus its index
    sampled: int = 0
    searched: int = 0  # sampled tokens in which stop strings were looked for
    ready: bool = False  # all but its last token is cached, so it can decode
    aborted: bool = False
    support: list[np.ndarray] = field(default_factory=list)

    @property
    def opening(self) -> int:
        return len(self.request.ids[: self.request.opening])

    @property
    def cached(self) -> int:
        """Tokens in the cache while it decodes: all but the last one."""
        return len(self.request.ids) + self.sampled - 1

    @property
    def sampling(self) -> Sampling:
        """How the next token is drawn. The first of an episode may have its own temperature and top_k:
        top_p does not apply to it then, and its support stays empty, because the trainer scores it
        at the ordinary temperature, where nothing is cut away.
        """
        sampling = self.request.sampling
        if sampling.first is None or self.request.first_index + self.sampled:
            return sampling
        temperature, top_k = sampling.first
        return replace(sampling, temperature=temperature, top_k=top_k, top_p=1.0, support=False)

    @property
    def remaining(self) -> int:
        return self.request.sampling.max_tokens - self.sampled


@dataclass(frozen=True, kw_only=True)
class IdleTurn:
    """A finished turn whose pages are kept, and the row of its states."""

    pages: np.ndarray
    row: int
    ids: np.ndarray
    media: tuple[Any, ...]
    cached: int

    def extended_by(self, request: Request) -> bool:
        """Whether a request continues exactly what is cached, with the same media in that part."""
        n = self.cached
        media = tuple(span.media.key for span in request.media)
        same_ids = len(request.ids) > n and np.array_equal(request.ids[:n], self.ids[:n])
        return same_ids and media[: len(self.media)] == self.media


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """A computed opening that is kept because waiting requests begin with it."""

    pages: np.ndarray
    hidden: Tensor


@dataclass(kw_only=True)
class PrefillJob:
    """An opening being computed, perhaps piece by piece, for all members that begin with it, or the rest of one
    sequence. It fills the pages of the first member, unless a kept prefix has all of it.
    """

    members: list[Sequence]
    ids: np.ndarray
    positions: np.ndarray  # [axes, tokens]
    cached: int
    hidden: Tensor | None = None  # [E] of the last token, when all is computed
    prefix: Prefix | None = None

    @property
    def left(self) -> int:
        return 0 if self.hidden is not None else len(self.ids) - self.cached

    @property
    def rope_delta(self) -> int:
        return int(self.positions[:, -1].max()) + 1 - len(self.ids)

    def cut(self, budget: int) -> int:
        """Where a piece of about `budget` tokens ends: never inside an image, whose features are
        computed at once.
        """
        end = min(self.cached + budget, len(self.ids))
        for span in self.members[0].request.media:
            if span.start < end < span.end:
                return span.start if span.start > self.cached else span.end
        return end


Part = tuple[PrefillJob, int]  # a job and where its next piece ends


SAMPLED = np.dtype([("token", np.int64), ("logprob", np.float32), ("version", np.int32)])


class Outputs:
    """Sampled tokens by slot [slots, tokens], until a sequence ends and becomes a completion."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.rows = np.zeros((0, 0), dtype=SAMPLED)

    def resize(self, slots: int, longest: int) -> None:
        rows, columns = self.rows.shape
        if slots > rows or longest > columns:
            wider = np.zeros((max(slots, rows), max(longest, columns)), dtype=SAMPLED)
            wider[:rows, :columns] = self.rows
            self.rows = wider

    def append(self, sequences: SequenceOf[Sequence], ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Append ids and log-probs [steps, sequences]; an id is -1 where a sequence had ended. A token has
        the version of the oldest key that it reads.
        """
        slots = np.array([s.slot for s in sequences])
        places = np.array([s.sampled for s in sequences])
        versions = np.array([s.prefill_key[0] for s in sequences])
        for line, line_logprobs in zip(ids, logprobs, strict=True):
            drawn = line >= 0
            at = slots[drawn], places[drawn]
            self.rows["token"][at], self.rows["logprob"][at] = line[drawn], line_logprobs[drawn]
            self.rows["version"][at] = versions[drawn]
            places += drawn
        for sequence, drawn in zip(sequences, (ids >= 0).sum(0).tolist(), strict=True):
            sequence.sampled += drawn

    def last(self, sequences: SequenceOf[Sequence]) -> np.ndarray:
        return self.rows["token"][[s.slot for s in sequences], [s.sampled - 1 for s in sequences]]

    def of(self, sequence: Sequence) -> np.ndarray:
        return self.rows["token"][sequence.slot, : sequence.sampled]

    def ended(self, sequences: SequenceOf[Sequence], chat: Chat) -> list[tuple[Sequence, str]]:
        """Sequences that have ended, with their finish reasons."""
        last = self.last(sequences).tolist()
        ways = [self._finish(s, chat, id_) for s, id_ in zip(sequences, last, strict=True)]
        return [(s, way) for s, way in zip(sequences, ways, strict=True) if way]

    def _finish(self, sequence: Sequence, chat: Chat, last: int) -> str | None:
        sampling = sequence.request.sampling
        # An aborted sequence may have drawn one more token after its prompt, and ended with it.
        if sampling.stop and self._reaches_stop(sequence, chat):
            return "stop"
        if sequence.sampled and last in chat.eos_ids and not sampling.ignore_eos:
            return "stop"
        if not sequence.remaining:
            return "length"
        return "aborted" if sequence.aborted else None

    def _reaches_stop(self, sequence: Sequence, chat: Chat) -> bool:
        """Search the new tokens for stop strings; tokens drawn after one are discarded."""
        stop = sequence.request.sampling.stop
        # A stop string has at most one token per byte; a few more cover the start of its first one.
        window = max(len(text.encode()) for text in stop) + 8
        new = chat.decode(self.of(sequence)[max(0, sequence.searched + 1 - window) :], special=True)
        there = any(end in new or "\ufffd" in end for end in stop)  # the sign of half a character
        for length in range(sequence.searched + 1, sequence.sampled + 1) if there else ():
            text = chat.decode(self.of(sequence)[max(0, length - window) : length], special=True)
            if any(end in text for end in stop):
                sequence.sampled = length
                return True
        sequence.searched = sequence.sampled
        return False

    def completion(self, sequence: Sequence, finish: Any) -> Completion:
        sampled = self.rows[sequence.slot, : sequence.sampled]
        return Completion(
            key=sequence.request.key,
            ids=sampled["token"].copy(),
            logprobs=sampled["logprob"].copy(),
            versions=sampled["version"].copy(),
            finish=finish,
            support=tuple(sequence.support[: sequence.sampled]) or None,
        )
