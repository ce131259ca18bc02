"""Circular evaluation: asks each multiple-choice question once per option, rotating the options by one each time.

A preference for a letter gains nothing: `all_rotations` is the share of questions that were right every time.

    rotated(dataset).samples
"""

from dataclasses import replace
from itertools import accumulate
from typing import Any

from saccade.data.dataset import ROTATION_OF, Dataset
from saccade.data.formats import LETTERS
from saccade.data.prompts import reordered
from saccade.errors import ConfigError
from saccade.types import Message, Sample


def rotated(dataset: Dataset) -> Dataset:
    """The data set with all rotations; those of a question are adjacent. A question without options is asked once."""
    turned = [rotations(sample) for sample in dataset.samples]
    ends = [0, *accumulate(map(len, turned))]
    again: dict[str, Any] = {
        name: tuple(value for value, rows in zip(getattr(dataset, name), turned, strict=True) for _ in rows)
        for name in ("lengths", "row_numbers")
        if getattr(dataset, name)
    }
    parts = tuple(replace(part, start=ends[part.start], stop=ends[part.stop]) for part in dataset.parts)
    return replace(dataset, samples=tuple(row for rows in turned for row in rows), parts=parts, **again)


def rotations(sample: Sample) -> list[Sample]:
    """The sample, then its rotations; options are also rotated in the text, where the prompt lists them."""
    found, places = [], range(len(sample.choices))
    for turn in range(max(1, len(places))):
        row = reordered(sample, [*places[turn:], *places[:turn]])
        messages = tuple(_swapped(message, sample, row.choices) for message in row.messages) if turn else row.messages
        if turn and messages == sample.messages:
            why = "does not list its options as (A) … in lines, so they cannot be turned"
            raise ConfigError(f"eval.suites: row {sample.id} {why}; leave :circular or prompt.template out")
        id = f"{sample.id}~{turn}" if turn else sample.id
        found.append(replace(row, id=id, messages=messages, extra={**sample.extra, ROTATION_OF: sample.id}))
    return found


def _swapped(message: Message, sample: Sample, choices: tuple[str, ...]) -> Message:
    before, after = (
        "\n".join(f"({letter}) {choice}" for letter, choice in zip(LETTERS, each, strict=False))
        for each in (sample.choices, choices)
    )
    parts = (part.replace(before, after) if isinstance(part, str) else part for part in message.parts)
    return replace(message, parts=tuple(parts))
