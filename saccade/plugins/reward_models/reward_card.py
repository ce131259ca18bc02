"""How a reward model reads a conversation, and what its folder says about it.

A reply is judged in the model's template, up to its end of turn. A candidate that shows media
is judged as part of the question: it stands behind it, and the score is read where an answer would
begin. A process reward model reads at marks, one behind each step.

    judged("a", 0, asked, reply, family)            # a Trajectory; POLICY: what is judged
    stepped("a", 0, with_marks(asked, response, card), family, card.placeholder)
    card = read_card("runs/rm/checkpoints/step-100")
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from saccade.errors import ConfigError
from saccade.models.families import Family
from saccade.models.files import SINGLE, header_of, shards
from saccade.recipes.to_trajectory import from_turn, written
from saccade.types import Message, Rendered, Source, Trajectory

SECTION = "reward_model"  # of config.json
REWARD_FILE = "reward_head.safetensors"


@dataclass(frozen=True, kw_only=True)
class RewardCard:
    """What config.json says of a reward model."""

    kind: str  # scalar or process
    heads: tuple[str, ...] = ()
    pooling: str = "last"
    pooling_heads: int = 1  # the defaults of this and the next are what older folders mean
    probe_layer: int = -1  # the last block
    head: str = "linear"  # or mlp
    bounded: bool = False  # scores are sigmoids
    statistics: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # (mean, std)
    statistics_step: int | None = None  # whose weights gave them
    placeholder: str = ""  # of a process: the mark behind each step
    tokens: tuple[str, ...] = ()  # its verdicts, the best first
    chat: bool = True  # question and steps are turns of a chat; else one text


def write_card(model: Any, card: RewardCard) -> None:
    """Into the model's config, which is saved with it."""
    setattr(model.config, SECTION, asdict(card))


def read_card(folder: str | Path) -> RewardCard | None:
    path = Path(folder) / "config.json"
    found = json.loads(path.read_text(encoding="utf-8")).get(SECTION) if path.is_file() else None
    if found is None:
        return None
    lists = {name: tuple(found.get(name, ())) for name in ("heads", "tokens")}
    statistics = {head: tuple(pair) for head, pair in found.get("statistics", {}).items()}
    return RewardCard(**(found | lists | {"statistics": statistics}))


def flaw(folder: Path) -> str:
    """What keeps a folder from being a reward model; empty: nothing. Reads no tensor."""
    if not (folder / "config.json").is_file():
        return f"{folder} has no config.json; give the folder of a reward model"
    try:
        card = read_card(folder)
    except (ValueError, TypeError) as error:
        return f"{folder / 'config.json'} cannot be read: {error}"
    if card is None or not (card.heads or card.tokens):
        why = f"its config.json has no `{SECTION}` with heads or tokens"
        return f"{folder} is no reward model: {why}; give a checkpoint of `saccade reward-model`"
    weights = [name for name in shards(folder) if name != REWARD_FILE] or [SINGLE]
    for name in [*weights, *([REWARD_FILE] if card.kind == "scalar" else [])]:
        if isinstance(wrong := header_of(folder / name), str):
            return f"{folder / name} {wrong}"
    return ""


# -- whole replies ---------------------------------------------------------------------------------


def judged(
    sample_id: str, repeat: int, asked: Sequence[Message], reply: Sequence[Message], family: Family
) -> Trajectory:
    """What is judged is POLICY, so that members of a group share the rest as a trunk."""
    messages = (*asked, *reply)
    if not shows_media(reply):
        rendered = family.render_dialogue(messages)
        earlier = sum(message.role == "assistant" for message in asked)
        return written(sample_id, repeat, rendered, from_turn(rendered.sources, earlier), messages)
    shown = tuple(part for message in reply for part in message.parts)
    before = asked[-1].parts if asked[-1].role == "user" else ()
    kept = asked[:-1] if before else asked
    rendered = family.render((*kept, Message(role="user", parts=(*before, *shown))))
    sources = rendered.sources.copy()
    sources[rendered.media[sum(len(message.media) for message in asked)].start :] = Source.POLICY
    return written(sample_id, repeat, rendered, sources, messages)


def shows_media(reply: Sequence[Message]) -> bool:
    """Whether a candidate is a medium rather than a reply."""
    return any(message.media for message in reply if message.role == "assistant")


# -- steps -----------------------------------------------------------------------------------------


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


def verdict_ids(family: Family, tokens: Sequence[str]) -> tuple[int, ...]:
    """The ids of the words that name a verdict, one each."""
    found = {token: family.chat.encode(token).tolist() for token in tokens}
    for token, ids in found.items():
        if len(ids) != 1:
            why = f"{token!r} is {len(ids)} tokens of this tokenizer, and a verdict is one"
            raise ConfigError(f"reward_model.tokens: {why}; try reward_model.tokens=[+,-]")
    return tuple(found[token][0] for token in tokens)


def with_marks(asked: Sequence[Message], response: str, card: RewardCard) -> tuple[Message, ...]:
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


def _unmarked(text: str, card: RewardCard) -> str:
    while card.placeholder in text:  # what is left around one may be another
        text = text.replace(card.placeholder, "")
    return text
