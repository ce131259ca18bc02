"""What the engine has sampled, slot by slot, until a sequence ends and becomes a completion."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from saccade.engines.embedded.sequences import Sequence
from saccade.models.chat import Chat
from saccade.types import Completion


class Outputs:
    """tokens, logprobs and versions: [slots, sampled]."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.tokens = np.zeros((0, 0), dtype=np.int64)
        self.logprobs = np.zeros((0, 0), dtype=np.float32)
        self.versions = np.zeros((0, 0), dtype=np.int32)

    def resize(self, slots: int, longest: int) -> None:
        rows, columns = self.tokens.shape
        if slots > rows or longest > columns:
            for name in ("tokens", "logprobs", "versions"):
                old = getattr(self, name)
                new = np.zeros((max(slots, rows), max(longest, columns)), dtype=old.dtype)
                new[:rows, :columns] = old
                setattr(self, name, new)

    def note(self, sequences: SequenceOf[Sequence], ids: np.ndarray, logprobs: np.ndarray, version: int) -> None:
        """Append ids and log-probs [steps, sequences]; an id is -1 where a sequence had ended."""
        slots = np.array([s.slot for s in sequences])
        places = np.array([s.sampled for s in sequences])
        for line, line_logprobs in zip(ids, logprobs, strict=True):
            drawn = line >= 0
            at = slots[drawn], places[drawn]
            self.tokens[at], self.logprobs[at] = line[drawn], line_logprobs[drawn]
            self.versions[at] = version
            places += drawn
        for sequence, drawn in zip(sequences, (ids >= 0).sum(0).tolist(), strict=True):
            sequence.add(drawn)

    def last(self, sequences: SequenceOf[Sequence]) -> np.ndarray:
        return self.tokens[[s.slot for s in sequences], [s.sampled - 1 for s in sequences]]

    def of(self, sequence: Sequence) -> np.ndarray:
        return self.tokens[sequence.slot, : sequence.sampled]

    def ended(self, sequences: SequenceOf[Sequence], chat: Chat) -> list[tuple[Sequence, str]]:
        """Sequences that end with their last tokens, and how they end."""
        last = self.last(sequences).tolist()
        ways = [self._finish(s, chat, id_) for s, id_ in zip(sequences, last, strict=True)]
        return [(s, way) for s, way in zip(sequences, ways, strict=True) if way]

    def _finish(self, sequence: Sequence, chat: Chat, last: int) -> str | None:
        sampling = sequence.request.sampling
        if sequence.aborted:
            return "aborted"
        if sampling.stop and self._reaches_stop(sequence, chat):
            return "stop"
        if last in chat.eos_ids and not sampling.ignore_eos:
            return "stop"
        return "length" if not sequence.remaining else None

    def _reaches_stop(self, sequence: Sequence, chat: Chat) -> bool:
        """Search each new token for stop strings; what was drawn after one is forgotten."""
        stop = sequence.request.sampling.stop
        # A stop string has at most one token per byte; a few more cover the start of its first one.
        window = max(len(text.encode()) for text in stop) + 8
        for length in range(sequence.searched + 1, sequence.sampled + 1):
            text = chat.decode(self.of(sequence)[max(0, length - window) : length], special=True)
            if any(end in text for end in stop):
                sequence.end_at(length)
                return True
        sequence.searched = sequence.sampled
        return False

    def completion(self, sequence: Sequence, finish: Any) -> Completion:
        slot, n = sequence.slot, sequence.sampled
        return Completion(
            key=sequence.request.key,
            ids=self.tokens[slot, :n].copy(),
            logprobs=self.logprobs[slot, :n].copy(),
            versions=self.versions[slot, :n].copy(),
            finish=finish,
            support=tuple(sequence.support[:n]) or None,
        )
