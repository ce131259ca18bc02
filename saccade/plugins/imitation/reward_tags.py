"""Answers learned with their reward: `sft.reward_tag` is written behind the question.

>>> reward_tagged(sample, "<reward {reward:.1f}>").messages[0].text
'What is 1 + 1?<reward 1.0>'
"""

from dataclasses import replace

from saccade.data.chats import RowError
from saccade.data.datasets import Dataset
from saccade.recipes.questions import map_samples
from saccade.types import Sample


def reward_tagged(sample: Sample, tag: str, reward: float | None = None) -> Sample:
    """The reward, or that of the row, after the question, which is the last one that is answered."""
    messages = list(sample.messages)
    last = max(index for index, message in enumerate(messages) if message.role == "user")
    text = tag.format(reward=reward_of(sample) if reward is None else reward)
    messages[last] = replace(messages[last], parts=(*messages[last].parts, text))
    return replace(sample, messages=tuple(messages))


def asking_for_the_best(tag: str, data: Dataset, sets: dict[str, Dataset]) -> dict[str, Dataset]:
    """Questions that name the highest reward of the answers that were learned."""
    best = max(reward_of(sample) for sample in data.samples)
    return {name: map_samples(part, lambda s: reward_tagged(s, tag, best)) for name, part in sets.items()}


def reward_of(sample: Sample) -> float:
    """What the row says of its answer."""
    value = sample.desirable
    for column in ("reward", "label"):
        value = sample.extra.get(column) if value is None else value
    if not isinstance(value, bool | int | float):
        raise RowError("no number in the column reward or label, which sft.reward_tag shows")
    return float(value)
