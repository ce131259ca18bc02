"""Rows with candidates: how columns are read, and how recipes view a row that prefers one of two candidates.

A candidate is a reply, or a whole conversation that ends in one; the common beginning of whole conversations
is the prompt. Reads no files and no pixels.

    >>> read_candidates("How many?", ["three", "a dog"])[1][0]
    [('assistant', ['three'])]
    >>> verdict_view(sample, seed=0).answer
    'A'
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

from saccade.data.chats import RowError, Turns, read_chat, read_reply
from saccade.data.formats import Format
from saccade.types import Media, Message, Sample

# Speakers in a whole conversation that is one string, as in Anthropic's helpful-harmless sets.
SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant):")
OTHER = {"A": "B", "B": "A", "C": "C"}  # label → label after swapping the sides
LABELS = {"1": True, "true": True, "0": False, "false": False}
ASKED = "Two {medium}s answer the same request. Compare them and say which one fits it better.\n\n"
ENDING = "\n\nThe answer is one of: {said}."


# -- columns ---------------------------------------------------------------------------------------


def read_candidates(prompt: Any, replies: Sequence[Any]) -> tuple[Turns, list[Turns]]:
    """Returns (the turns of the question, per candidate the turns that continue it)."""
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


def _spoken(reply: Any) -> Turns:
    """The turns of a candidate without a prompt; a string may hold `Human:` and `Assistant:` turns."""
    if not isinstance(reply, str) or not SPEAKER.match(reply):
        return read_reply(reply)
    _, *pieces = SPEAKER.split(reply)
    roles = {"Human": "user", "Assistant": "assistant"}
    return [(roles[who], [text.strip()]) for who, text in zip(pieces[::2], pieces[1::2], strict=True)]


def _shared(sides: Sequence[Turns]) -> Turns:
    """The longest common prefix of turns after which every side continues with a reply."""
    for length in range(min(map(len, sides)) - 1, 0, -1):
        if all(side[:length] == sides[0][:length] and side[length][0] == "assistant" for side in sides):
            return list(sides[0][:length])
    return []


def read_label(value: Any) -> bool:
    text = f"{value:g}" if isinstance(value, float) else str(value).strip().lower()
    if text not in LABELS:
        raise RowError(f"a label is 1 (good) or 0 (bad), not {value!r}")
    return LABELS[text]


def check_labels(labels: Any) -> None:
    sides = [*labels.values()] if isinstance(labels, Mapping) else []
    if not sides or not all(isinstance(side, str) and side in OTHER for side in sides):
        raise RowError(f'labels must say A, B or C for each head, not {labels!r}; write {{"preference": "A"}}')


_compared = partial(Format, read_candidates=read_candidates)
PAIRS = _compared(
    name="pairs",
    matches={"chosen", "rejected"}.issubset,
    prompt=("prompt", "question", "problem", "input", "messages", "conversations"),
    answer=("answer", "solution"),
    candidates={"chosen": ("chosen",), "rejected": ("rejected",)},
)
SIDES = _compared(
    name="sides",
    matches=lambda columns: {"a", "b"} <= set(columns) and ("labels" in columns or "extra" in columns),
    prompt=("prompt", "question", "messages"),
    answer=("answer",),
    candidates={"a": ("a",), "b": ("b",)},
    check=lambda sample: check_labels(sample.extra.get("labels")),
)
LABELLED = _compared(
    name="labels",
    matches=lambda columns: "label" in columns and ("output" in columns or "completion" in columns),
    prompt=("input", "prompt", "question", "problem", "messages", "conversations"),
    answer=("answer", "solution"),
    candidates={"output": ("output", "completion")},
    label=("label",),
    read_label=read_label,
)
STEPS = Format(  # `label`, one entry per step, stays in `extra`
    name="steps",
    matches=lambda columns: {"input", "label"} <= set(columns) and not {"output", "completion"} & set(columns),
    prompt=("input", "prompt", "messages", "conversations"),
    answer=("answer", "solution"),
)


# -- labels ----------------------------------------------------------------------------------------


def label_of(sample: Sample, head: str = "preference") -> str | None:
    """The better candidate by `head`: A or B, C for a tie, None for no label. Without labels, A or a marked tie."""
    if "labels" not in sample.extra:
        return "C" if sample.extra.get("tie") else "A"
    return sample.extra["labels"].get(head)


def chosen_first(sample: Sample) -> Sample:
    """The sample with the better candidate first; a tie is unchanged."""
    return _swapped(sample, sample.extra["labels"]) if label_of(sample) == "B" else sample


def _swapped(sample: Sample, labels: Mapping[str, str]) -> Sample:
    swapped = {head: OTHER[side] for head, side in labels.items()}
    return replace(sample, candidates=sample.candidates[::-1], extra={**sample.extra, "labels": swapped})


# -- views -----------------------------------------------------------------------------------------


def chosen_view(sample: Sample) -> Sample:
    """The conversation with the better candidate appended; a sample without candidates is unchanged."""
    for candidate in chosen_first(sample).candidates[:1]:
        if any(message.media for message in candidate):
            raise RowError("candidates are media; data.pair_view=verdict teaches to judge them")
        sample = replace(sample, messages=(*sample.messages, *candidate), candidates=())
    return sample


def verdict_view(sample: Sample, *, seed: int) -> Sample:
    """The sample as a question to a judge: which of the two candidates is better? The answer is the label of the head
    `preference`. The last assistant turn is the target for sft: the critique of the row, or the bare verdict; callers
    that ask a model leave it out.
    """
    from saccade.plugins.verifiers.short_answers import VERDICTS  # imports many files; most rows need none

    if len(sample.candidates) != 2:
        return sample
    sample = _drawn(sample, seed)
    label = label_of(sample)
    if label is None:
        raise RowError("no label of the head preference, so there is no verdict to learn")
    sides = [[part for message in candidate for part in message.parts] for candidate in sample.candidates]
    kinds = {part.kind for side in sides for part in side if isinstance(part, Media)}
    medium = kinds.pop() if len(kinds) == 1 and kinds <= VERDICTS.keys() else "response"
    critique = sample.extra.get("critique")
    *earlier, question = sample.messages
    # The prompt of a row with a critique already has the critic's instruction.
    parts = ["" if critique else ASKED.format(medium=medium), *question.parts]
    for number, side in enumerate(sides, start=1):
        parts += [f"\n\n{medium.capitalize()} {number}:\n", *side]
    parts.append("" if critique else ENDING.format(said=", ".join(VERDICTS[medium])))
    shown = str(critique) if critique else f"<answer>{VERDICTS[medium]['ABC'.index(label)]}</answer>"
    messages = (*earlier, replace(question, parts=_joined(parts)), Message(role="assistant", parts=(shown,)))
    return replace(sample, messages=messages, candidates=(), answer=label)


def _drawn(sample: Sample, seed: int) -> Sample:
    """Swap the candidates at random, so that the position does not give the label away. Rows of a mapping are already
    swapped; a critique refers to the sides as given, so its row keeps them.
    """
    if "sides" in sample.extra or sample.extra.get("critique"):
        return sample
    swapped = hashlib.sha256(f"{seed}:{sample.id}".encode()).digest()[0] % 2 == 1
    labels = sample.extra.get("labels") or {"preference": label_of(sample)}
    check_labels(labels)
    extra = {**sample.extra, "labels": labels, "sides": {"seed": seed, "swapped": swapped}}
    sample = replace(sample, extra=extra)
    return _swapped(sample, labels) if swapped else sample


def _joined(parts: Sequence[str | Media]) -> tuple[str | Media, ...]:
    """The parts with neighbouring strings joined."""
    found: list[Any] = []
    for is_text, run in groupby(parts, key=lambda part: isinstance(part, str)):
        pieces: list[Any] = list(run)
        found += ["".join(pieces)] if is_text else pieces
    return tuple(filter(None, found))
