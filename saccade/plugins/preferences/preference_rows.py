"""Candidates of a row: what stands in `chosen` and `rejected`, or in `output` beside a label.

A candidate is a reply, or the whole conversation that ends in it; what whole conversations have in
common is the prompt. Knows nothing of columns, files or pixels.

    >>> read_candidates("How many?", ["three", "a dog"])[1][0]
    [('assistant', ['three'])]
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from saccade.data.chats import RowError, Turns, read_chat, read_reply
from saccade.types import Sample

# One text for a whole conversation, as the helpful-harmless sets write it.
SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant):")
OTHER = {"A": "B", "B": "A", "C": "C"}  # what a label says once the sides are swapped
LABELS = {"1": True, "true": True, "0": False, "false": False}


def read_candidates(prompt: Any, replies: Sequence[Any]) -> tuple[Turns, list[Turns]]:
    """The question, and how each candidate goes on from it."""
    asked = [] if prompt is None else read_chat(prompt)
    sides = [_spoken(reply) if prompt is None else read_reply(reply) for reply in replies]
    repeats = [side[0][0] != "assistant" for side in sides]
    if any(repeats):
        if not all(repeats):
            raise RowError("one candidate repeats the prompt and the other does not")
        shared = _shared(sides)
        if asked and shared[-len(asked) :] != asked:
            raise RowError("the candidates are whole conversations, and not of this prompt")
        asked, sides = shared, [side[len(shared) :] for side in sides]
    if not asked:
        raise RowError("no prompt, and the candidates do not begin with one")
    for side in sides:
        if side[-1][0] != "assistant":
            raise RowError(f"a candidate ends with a {side[-1][0]} message, not with a reply")
        said = [piece for role, pieces in side if role == "assistant" for piece in pieces]
        if not any(piece.strip() if isinstance(piece, str) else piece for piece in said):
            raise RowError("a candidate is empty")
    return asked, sides


def read_label(value: Any) -> bool:
    text = f"{value:g}" if isinstance(value, float) else str(value).strip().lower()
    if text not in LABELS:
        raise RowError(f"a label is 1 (good) or 0 (bad), not {value!r}")
    return LABELS[text]


def check_labels(labels: Any) -> None:
    sides = [*labels.values()] if isinstance(labels, Mapping) else []
    good = sides and all(isinstance(side, str) and side in OTHER for side in sides)
    if not good:
        raise RowError(f'labels must say A, B or C for each head, not {labels!r}; write {{"preference": "A"}}')


def label_of(sample: Sample, head: str = "preference") -> str | None:
    """The better candidate, A or B, or C for a tie. Rows without labels have it first."""
    if "labels" not in sample.extra:
        return "C" if sample.extra.get("tie") else "A"
    return sample.extra["labels"].get(head)


def chosen_first(sample: Sample) -> Sample:
    """With the better candidate first; ties as they are."""
    if label_of(sample) != "B":
        return sample
    labels = {head: OTHER[side] for head, side in sample.extra["labels"].items()}
    candidates, extra = sample.candidates[::-1], {**sample.extra, "labels": labels}
    return replace(sample, candidates=candidates, extra=extra)


def _spoken(reply: Any) -> Turns:
    """A text without a prompt beside it names its speakers."""
    if not isinstance(reply, str) or not SPEAKER.match(reply):
        return read_reply(reply)
    _, *pieces = SPEAKER.split(reply)
    roles = {"Human": "user", "Assistant": "assistant"}
    return [(roles[who], [text.strip()]) for who, text in zip(pieces[::2], pieces[1::2], strict=True)]


def _shared(sides: Sequence[Turns]) -> Turns:
    """The longest common beginning after which every side goes on with a reply."""
    length = min(len(side) for side in sides) - 1
    while length and not (
        all(side[:length] == sides[0][:length] for side in sides)
        and all(side[length][0] == "assistant" for side in sides)
    ):
        length -= 1
    return list(sides[0][:length])
