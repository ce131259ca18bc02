"""How a process reward model reads a conversation: at marks, one behind each step.

stepped("a", 0, with_marks(asked, response, card), family, card.placeholder)  # a Trajectory
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from saccade.errors import ConfigError
from saccade.models.families import Family
from saccade.plugins.reward_models.reward_card import Card, written
from saccade.types import Message, Rendered, Source, Trajectory


def stepped(sample_id: str, repeat: int, messages: Sequence[Message], family: Family, placeholder: str) -> Trajectory:
    """A read at every placeholder. What it would predict comes behind it, so one id is added."""
    chat = messages[-1].role == "assistant"
    rendered = family.render_dialogue(messages) if chat else family.render(messages)
    ids = np.append(rendered.ids, rendered.ids[-1])
    sources = np.full(len(ids), Source.PROMPT, np.int8)
    sources[_marks(rendered.ids, family, placeholder) + 1] = Source.POLICY
    rendered = Rendered(ids=ids, sources=sources, media=rendered.media)
    return written(sample_id, repeat, rendered, sources, tuple(messages))


def _marks(ids: np.ndarray, family: Family, placeholder: str) -> np.ndarray:
    """The last id of each placeholder. A tokenizer may write it differently after a blank."""
    found: set[int] = set()
    for text in (placeholder, f" {placeholder}"):
        mark = family.chat.encode(text)
        if len(mark) <= len(ids):
            windows = np.lib.stride_tricks.sliding_window_view(ids, len(mark))
            found |= set((np.flatnonzero((windows == mark).all(1)) + len(mark) - 1).tolist())
    return np.array(sorted(found), dtype=np.int64)


def verdict_ids(family: Family, tokens: Sequence[str]) -> list[int]:
    """The ids of the words that name a verdict, one each."""
    found = [family.chat.encode(token).tolist() for token in tokens]
    for token, ids in zip(tokens, found, strict=True):
        if len(ids) != 1:
            raise ConfigError(
                f"reward_model.tokens: {token!r} is {len(ids)} tokens of this tokenizer, and a "
                "verdict is one; try reward_model.tokens=[+,-]"
            )
    return [ids[0] for ids in found]


def with_marks(asked: Sequence[Message], response: str, card: Card) -> tuple[Message, ...]:
    """A response with a mark behind every line, as the model learned to read it. Marks in what it
    is given go: a policy could write some to be read more often.
    """
    asked = [replace(m, parts=tuple(_unmarked(p, card) if isinstance(p, str) else p for p in m.parts)) for m in asked]
    response = _unmarked(response, card)
    lines = [line.rstrip() for line in response.splitlines() if line.strip()] or [response]
    text = "\n".join(f"{line} {card.placeholder}" for line in lines)
    if card.chat:
        return (*asked, Message(role="assistant", parts=(text,)))
    parts = tuple(part for message in asked for part in message.parts)
    return (Message(role="user", parts=(*parts, f"\n{text}")),)


def _unmarked(text: str, card: Card) -> str:
    while card.placeholder in text:  # what is left around one may be another
        text = text.replace(card.placeholder, "")
    return text
