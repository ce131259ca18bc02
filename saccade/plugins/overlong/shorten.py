"""Policies (data.overlong) for prompts over the token limit. Media are shrunk or removed whole, never cropped.

A policy takes a sample, the function that counts its tokens and the limit; it returns a sample that fits, or None.

    >>> drop_turns(sample, length, 4096)
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import replace

from saccade.types import Media, Message, Sample

Length = Callable[[Sample], int]
SHRINK_STEP = 0.8


def shrink(sample: Sample, length: Length, limit: int) -> Sample | None:
    """Lower the pixel limit of all media step by step, down to min_pixels; the largest shrink first."""
    media = [one for one in sample.every_media if one.kind in ("image", "video")]
    if not media:
        return None
    budget = max(one.max_pixels for one in media)  # also above its own pixels, where a model enlarges a picture
    floor = min(one.min_pixels for one in media)
    while budget > floor:
        budget = max(floor, int(budget * SHRINK_STEP))
        smaller = _with_budget(sample, budget)
        if length(smaller) <= limit:
            return smaller
    return None


def _with_budget(sample: Sample, budget: int) -> Sample:
    def fit(part: str | Media) -> str | Media:
        if isinstance(part, str):
            return part
        return replace(part, max_pixels=max(part.min_pixels, min(part.max_pixels, budget)))

    def smaller(messages: Iterable[Message]) -> tuple[Message, ...]:
        return tuple(replace(m, parts=tuple(fit(part) for part in m.parts)) for m in messages)

    return replace(sample, messages=smaller(sample.messages), candidates=tuple(map(smaller, sample.candidates)))


def drop_turns(sample: Sample, length: Length, limit: int) -> Sample | None:
    """Remove the oldest turns (a user message with its replies), but no system message and not the last turn."""
    users = [index for index, message in enumerate(sample.messages) if message.role == "user"]
    for start in users[1:]:
        kept = [message for n, message in enumerate(sample.messages) if n >= start or message.role == "system"]
        shorter = replace(sample, messages=tuple(kept))
        if length(shorter) <= limit:
            return shorter
    return None


def truncate_text(sample: Sample, length: Length, limit: int) -> Sample | None:
    """Remove text from the front, as the question is usually last; keeps system messages and media."""
    spoken = [message for message in sample.messages if message.role != "system"]
    total = sum(len(part) for message in spoken for part in message.parts if isinstance(part, str))
    fits = bisect_left(range(1, total), True, key=lambda gone: length(_without_front(sample, gone)) <= limit)
    if fits + 1 >= total:  # nothing would be left to ask
        return None
    return _without_front(sample, fits + 1)


def _without_front(sample: Sample, characters: int) -> Sample:
    messages = []
    for message in sample.messages:
        parts: list[str | Media] = []
        for part in message.parts:
            if isinstance(part, str) and message.role != "system":
                characters, part = max(0, characters - len(part)), part[characters:]
            parts += [part] if part else []
        messages.append(replace(message, parts=tuple(parts)))
    return replace(sample, messages=tuple(messages))
