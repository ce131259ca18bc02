"""Text of tokens that are still coming in.

A character may be spread over tokens and a stop string over pieces, so what could still change is
held back until it cannot; the pieces together are the text of the whole.

    stream = TextStream(family.decode)
    stream.add(ids_so_far)      # the new text
"""

from collections.abc import Callable, Sequence

import numpy as np

BROKEN = "\ufffd"  # what a decoder shows for a character that is not complete
LATEST = 3  # tokens in which the beginning of such a character can lie
CONTEXT = 8  # tokens that are decoded again beside new ones: some decoders look back


class TextStream:
    def __init__(self, decode: Callable[[np.ndarray], str], stop: Sequence[str] = ()) -> None:
        """`stop`: strings that end the text and do not belong to it."""
        self._decode, self._stop = decode, stop
        self._read = 0  # ids that are in `_text`
        self._text = ""  # of them
        self._shown = 0  # characters of it that were given out
        self.stopped_by: str | None = None

    def add(self, ids: np.ndarray) -> str:
        """The text that is new, given all ids so far."""
        if self.stopped_by is None:
            self._take(ids)
        held = max((len(end) for end in self._stop), default=1) - 1
        return self._show(max(self._shown, len(self._text) - held))

    def finish(self, ids: np.ndarray) -> str:
        """What is left, given all ids there will be."""
        self._text = self._text[: self._shown] + self._decode(ids)[self._shown :]
        self._cut()
        return self._show(len(self._text))

    def _take(self, ids: np.ndarray) -> None:
        start = max(0, self._read - CONTEXT)
        before = self._decode(ids[start : self._read])
        for held in range(LATEST + 1):  # what is broken before the latest tokens too will stay so
            end = max(self._read, len(ids) - held)
            after = self._decode(ids[start:end])
            if not after.endswith(BROKEN):
                break
        self._text += after[len(before) :]
        self._read = end
        self._cut()

    def _cut(self) -> None:
        found = [(self._text.find(end), end) for end in self._stop if end in self._text]
        if found:
            at, self.stopped_by = min(found)
            self._text = self._text[:at]

    def _show(self, end: int) -> str:
        piece = self._text[self._shown : end]
        self._shown += len(piece)
        return piece
