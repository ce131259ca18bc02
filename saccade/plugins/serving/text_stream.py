"""Incremental decoding of a growing sequence of tokens.

A character may span several tokens and a stop string several pieces, so text that could still change is
held back. The pieces add up to the text of the whole sequence.

    stream = TextStream(family.decode)
    stream.add(ids_so_far)      # the new text
"""

from collections.abc import Callable, Sequence

import numpy as np

BROKEN = "\ufffd"  # a decoder's output for an incomplete character
LATEST = 3  # last tokens in which an incomplete character can begin
CONTEXT = 8  # earlier tokens that are decoded again with new ones: some decoders depend on them


class TextStream:
    def __init__(self, decode: Callable[[np.ndarray], str], stop: Sequence[str] = ()) -> None:
        """`stop`: strings that end the text and are not part of it."""
        self._decode, self._stop = decode, stop
        self._read = 0  # number of ids decoded into `_text`
        self._text = ""
        self._shown = 0  # characters of `_text` that were returned
        self.stopped_by: str | None = None

    def add(self, ids: np.ndarray) -> str:
        """Returns the new text, given all ids so far."""
        if self.stopped_by is None:
            self._take(ids)
        held = max((len(end) for end in self._stop), default=1) - 1
        return self._show(max(self._shown, len(self._text) - held))

    def finish(self, ids: np.ndarray) -> str:
        """Returns the remaining text, given all ids of the finished sequence."""
        self._text = self._text[: self._shown] + self._decode(ids)[self._shown :]
        self._cut()
        return self._show(len(self._text))

    def _take(self, ids: np.ndarray) -> None:
        start = max(0, self._read - CONTEXT)
        before = self._decode(ids[start : self._read])
        for held in range(LATEST + 1):  # a character that began earlier is invalid, not incomplete
            end = max(self._read, len(ids) - held)
            after = self._decode(ids[start:end])
            if not after.endswith(BROKEN):
                break
        self._text += after[len(before) :]
        self._read = end
        self._cut()

    def _cut(self) -> None:
        if found := [(self._text.find(end), end) for end in self._stop if end in self._text]:
            at, self.stopped_by = min(found)
            self._text = self._text[:at]

    def _show(self, end: int) -> str:
        piece = self._text[self._shown : end]
        self._shown += len(piece)
        return piece
