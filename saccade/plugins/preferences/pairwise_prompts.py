"""Two candidates in one prompt that asks which is better: rows for a judge, to learn and to answer.

The answer is the label of the head `preference`. A last assistant turn shows what to say: the
critique of the row, or the bare verdict; where a model is asked it is left out.

    >>> judged(sample, seed=0).answer
    'A'
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from saccade.data.chats import RowError
from saccade.plugins.preferences.preference_rows import OTHER, check_labels, label_of
from saccade.plugins.verifiers.short_answers import VERDICTS
from saccade.types import Media, Message, Sample

ASKED = "Two {medium}s answer the same request. Compare them and say which one fits it better.\n\n"
ENDING = "\n\nThe answer is one of: {said}."


def judged(sample: Sample, *, seed: int) -> Sample:
    """The sample as a question about its candidates; one without two of them stays as it is."""
    if len(sample.candidates) != 2:
        return sample
    sample = _drawn(sample, seed)
    label = label_of(sample)
    if label is None:
        raise RowError("no label of the head preference, so there is no verdict to learn")
    sides = [_parts(candidate) for candidate in sample.candidates]
    kinds = {part.kind for side in sides for part in side if isinstance(part, Media)}
    medium = kinds.pop() if len(kinds) == 1 and kinds <= VERDICTS.keys() else "response"
    verdict = VERDICTS[medium]["ABC".index(label)]
    critique = sample.extra.get("critique")
    *earlier, question = sample.messages
    # A row with a critique holds the instruction that the critic was given.
    intro = "" if critique else ASKED.format(medium=medium)
    said = ", ".join(VERDICTS[medium])
    parts = [intro, *question.parts]
    for number, side in enumerate(sides, start=1):
        parts += [f"\n\n{medium.capitalize()} {number}:\n", *side]
    parts.append("" if critique else ENDING.format(said=said))
    shown = str(critique) if critique else f"<answer>{verdict}</answer>"
    messages = (*earlier, replace(question, parts=_joined(parts)), Message(role="assistant", parts=(shown,)))
    return replace(sample, messages=messages, candidates=(), answer=label)


def _drawn(sample: Sample, seed: int) -> Sample:
    """A set that always names the better one first would tell the label by the place. Rows of a
    mapping have their sides, and a critique names them as they were given.
    """
    if "sides" in sample.extra or sample.extra.get("critique"):
        return sample
    swapped = hashlib.sha256(f"{seed}:{sample.id}".encode()).digest()[0] % 2 == 1
    labels = sample.extra.get("labels") or {"preference": label_of(sample)}
    check_labels(labels)
    labels = {head: OTHER[side] if swapped else side for head, side in labels.items()}
    extra = {"labels": labels, "sides": {"seed": seed, "swapped": swapped}}
    order = -1 if swapped else 1
    return replace(sample, candidates=sample.candidates[::order], extra={**sample.extra, **extra})


def _parts(candidate: Sequence[Message]) -> list[str | Media]:
    return [part for message in candidate for part in message.parts]


def _joined(parts: Sequence[str | Media]) -> tuple[str | Media, ...]:
    """Neighbouring texts as one."""
    found: list[str | Media] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, str) and isinstance(last, str):
            found[-1] = last + part
        elif part:
            found.append(part)
    return tuple(found)
