"""How a reward model reads a conversation, and what its folder says about it.

A reply is judged in the model's own template, up to its end of turn. A candidate that shows media
is judged as part of the question: it stands behind it, and the score is read where an answer would
begin.

    judged("a", 0, asked, reply, family)            # a Trajectory; POLICY: what is judged
    card = read_card("runs/rm/checkpoints/step-100")
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from saccade.models.families import Family
from saccade.models.files import SINGLE, header_of, shards
from saccade.types import Message, Rendered, Source, Trajectory

SECTION = "reward_model"  # of config.json
REWARD_FILE = "reward_head.safetensors"


@dataclass(frozen=True, kw_only=True)
class Card:
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


def write_card(model: Any, card: Card) -> None:
    """Into the model's config, which is saved with it."""
    setattr(model.config, SECTION, asdict(card))


def read_card(folder: str | Path) -> Card | None:
    path = Path(folder) / "config.json"
    found = json.loads(path.read_text(encoding="utf-8")).get(SECTION) if path.is_file() else None
    if found is None:
        return None
    lists = {name: tuple(found.get(name, ())) for name in ("heads", "tokens")}
    statistics = {head: tuple(pair) for head, pair in found.get("statistics", {}).items()}
    return Card(**(found | lists | {"statistics": statistics}))


def flaw(folder: Path) -> str:
    """What keeps a folder from being a reward model; empty: nothing. Reads no tensor."""
    if not (folder / "config.json").is_file():
        return f"{folder} has no config.json; give the folder of a reward model"
    try:
        card = read_card(folder)
    except (ValueError, TypeError) as error:
        return f"{folder / 'config.json'} cannot be read: {error}"
    if card is None:
        return (
            f"{folder} is no reward model: its config.json has no `{SECTION}`; give a checkpoint "
            "of `saccade reward-model`"
        )
    if not (card.heads or card.tokens):
        return f"{folder / 'config.json'}: `{SECTION}` names neither heads nor tokens"
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
    rendered, sources = _judged(asked, reply, family)
    return written(sample_id, repeat, rendered, sources, (*asked, *reply))


def shows_media(reply: Sequence[Message]) -> bool:
    """Whether a candidate is a medium rather than a reply."""
    return any(message.media for message in reply if message.role == "assistant")


def judged_length(asked: Sequence[Message], reply: Sequence[Message], family: Family) -> int:
    return len(_judged(asked, reply, family)[0])


def _judged(asked: Sequence[Message], reply: Sequence[Message], family: Family) -> tuple[Rendered, np.ndarray]:
    if not shows_media(reply):
        rendered = family.render_dialogue((*asked, *reply))
        earlier = sum(message.role == "assistant" for message in asked)
        return rendered, from_turn(rendered.sources, earlier)
    shown = tuple(part for message in reply for part in message.parts)
    before = asked[-1].parts if asked[-1].role == "user" else ()
    kept = asked[:-1] if before else asked
    rendered = family.render((*kept, Message(role="user", parts=(*before, *shown))))
    first = sum(len(message.media) for message in asked)
    sources = rendered.sources.copy()
    sources[rendered.media[first].start :] = Source.POLICY
    return rendered, sources


def from_turn(sources: np.ndarray, first: int) -> np.ndarray:
    """Trained from the assistant's turn number `first` on; negative ones count from the end."""
    policy = np.flatnonzero(sources == Source.POLICY)
    starts = policy[np.diff(policy, prepend=-2) > 1]
    earlier = (sources == Source.POLICY) & (np.arange(len(sources)) < starts[first])
    return np.where(earlier, Source.PROMPT, sources)


def written(
    sample_id: str, repeat: int, rendered: Rendered, sources: np.ndarray, messages: tuple[Message, ...]
) -> Trajectory:
    """As if somebody else had sampled it."""
    return Trajectory(
        sample_id=sample_id,
        repeat=repeat,
        ids=rendered.ids,
        sources=sources,
        logprobs=np.full(len(rendered), np.nan, np.float32),
        versions=np.full(len(rendered), -1, np.int32),
        media=rendered.media,
        messages=messages,
    )
