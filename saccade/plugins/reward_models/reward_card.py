"""How a reward model reads a conversation, and its description (`RewardCard`) in config.json.

A reply is scored in the model's chat template, up to its end of turn. A candidate that shows media
is appended to the question, and the score is read where an answer would begin. A process reward model
is read at placeholders, one after each step.

    reply_trajectory("a", 0, asked, reply, family)            # a Trajectory; the scored tokens have the source POLICY
    steps_trajectory("a", with_marks(asked, response, card), family, card.placeholder)
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

SECTION = "reward_model"  # key in config.json
REWARD_FILE = "reward_head.safetensors"


@dataclass(frozen=True, kw_only=True)
class RewardCard:
    """The description of a reward model in config.json."""

    kind: str  # scalar or process
    heads: tuple[str, ...] = ()
    pooling: str = "last"
    pooling_heads: int = 1
    probe_layer: int = -1  # index of the layer whose states are scored; -1: the last
    head: str = "linear"  # or mlp
    bounded: bool = False  # scores pass through a sigmoid
    statistics: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # (mean, std) by head
    statistics_step: int | None = None  # the step whose weights gave the statistics
    placeholder: str = ""  # process only: the text after each step at which it is read
    tokens: tuple[str, ...] = ()  # process only: the verdict tokens, the best first
    chat: bool = True  # process only: question and steps are turns of a chat; else one text


def write_card(model: Any, card: RewardCard) -> None:
    """Store the card in the model's config, which is saved with the model."""
    setattr(model.config, SECTION, asdict(card))


def read_card(folder: str | Path) -> RewardCard | None:
    path = Path(folder) / "config.json"
    found = json.loads(path.read_text(encoding="utf-8")).get(SECTION) if path.is_file() else None
    if found is None:
        return None
    lists = {name: tuple(found.get(name, ())) for name in ("heads", "tokens")}
    statistics = {head: tuple(pair) for head, pair in found.get("statistics", {}).items()}
    return RewardCard(**(found | lists | {"statistics": statistics}))


def why_unusable(folder: Path) -> str:
    """Returns why a folder is not a usable reward model, or "" if it is one. Reads no tensors."""
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


def reply_trajectory(
    sample_id: str, repeat: int, asked: Sequence[Message], reply: Sequence[Message], family: Family
) -> Trajectory:
    """The conversation as a trajectory: scored tokens have the source POLICY, the rest is the trunk of the group."""
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
    """Whether a candidate contains media."""
    return any(message.media for message in reply if message.role == "assistant")


# -- steps -----------------------------------------------------------------------------------------


def steps_trajectory(sample_id: str, messages: Sequence[Message], family: Family, placeholder: str) -> Trajectory:
    """A trajectory read at every placeholder. Reads precede POLICY tokens, so one id is appended after the last."""
    chat = messages[-1].role == "assistant"
    rendered = family.render_dialogue(messages) if chat else family.render(messages)
    ids = np.append(rendered.ids, rendered.ids[-1])
    sources = np.full(len(ids), Source.PROMPT, np.int8)
    sources[_marks(rendered.ids, family, placeholder) + 1] = Source.POLICY
    rendered = Rendered(ids=ids, sources=sources, media=rendered.media)
    return written(sample_id, 0, rendered, sources, tuple(messages))


def _marks(ids: np.ndarray, family: Family, placeholder: str) -> np.ndarray:
    """Index of the last id of each placeholder. A tokenizer may encode it differently after a space."""
    found: set[int] = set()
    for text in (placeholder, f" {placeholder}"):
        mark = family.chat.encode(text)
        if len(mark) <= len(ids):
            windows = np.lib.stride_tricks.sliding_window_view(ids, len(mark))
            found |= set((np.flatnonzero((windows == mark).all(1)) + len(mark) - 1).tolist())
    return np.array(sorted(found), dtype=np.int64)


def verdict_ids(family: Family, tokens: Sequence[str]) -> tuple[int, ...]:
    """The token ids of the verdicts; each must be a single token."""
    found = {token: family.chat.encode(token).tolist() for token in tokens}
    for token, ids in found.items():
        if len(ids) != 1:
            why = f"{token!r} is {len(ids)} tokens of this tokenizer, and a verdict is one"
            raise ConfigError(f"reward_model.tokens: {why}; try reward_model.tokens=[+,-]")
    return tuple(found[token][0] for token in tokens)


def with_marks(asked: Sequence[Message], response: str, card: RewardCard) -> tuple[Message, ...]:
    """The conversation with a placeholder after every line of the response. Those in the given texts are removed: a
    policy could write some to be read more often.
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
    while card.placeholder in text:  # removing one may join its surroundings into another
        text = text.replace(card.placeholder, "")
    return text
