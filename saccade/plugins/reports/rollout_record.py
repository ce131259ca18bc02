"""A rollout as JSON with named fields, from which each file for users takes its columns.

Exact copies for programs (checkpoints, messages between processes) go through `system.codec` instead, and rewards
get a `RewardSample`. A file lists its columns as {column name: field name}.

    >>> rollout_row({"answer": "gold", **same("reward", "response")}, group, trajectory, family)
    {'answer': '7', 'reward': 1.0, 'response': 'It is 7.'}
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from saccade.models.families import Family
from saccade.plugins.serving.text_stream import TextStream
from saccade.rewards.reward_sample import image_records
from saccade.system.codec import encode
from saccade.types import ALWAYS_EXCLUDED, Group, Media, Message, Source, Trajectory


class _Rollout(NamedTuple):
    group: Group
    trajectory: Any  # a Trajectory
    family: Any  # a Family


def rollout_row(
    columns: Mapping[str, str], group: Group, trajectory: Trajectory | None = None, family: Family | None = None
) -> dict[str, Any]:
    """The fields of a rollout by the names in `columns` (column -> field). Fields of the sample need no
    trajectory; only `response`, `segments` and `think_prefilled` need a family.
    """
    rollout = _Rollout(group, trajectory, family)
    return {column: FIELDS[name](rollout) for column, name in columns.items()}


def same(*names: str) -> dict[str, str]:
    """Columns with the names of their fields."""
    return {name: name for name in names}


def message_record(message: Message, name: Callable[[Media], str]) -> dict[str, Any]:
    """A message as JSON, its parts in order; a medium is replaced by its `name`."""
    named = [("text", part) if isinstance(part, str) else (part.kind, name(part)) for part in message.parts]
    return {"role": message.role, "content": [{"type": kind, kind: value} for kind, value in named]}


def picture_name(media: Media) -> str:
    """Equal names mean equal pixels: the name includes the box, as a crop may have the hash of its source image."""
    box = "" if media.box is None else "-" + "-".join(str(edge) for edge in media.box)
    return safe_name(media.hash) + box


def safe_name(name: str) -> str:
    """A name from the data as a file name that cannot point outside its folder."""
    return re.sub(r"[^\w.=+-]|^\.+", "_", name) or "_"


# -- fields ----------------------------------------------------------------------------------------


def _media(rollout: _Rollout) -> list[dict[str, Any]]:
    media = rollout.group.sample.media
    return [facts | encode(each) for each, facts in zip(media, image_records(media), strict=True)]


def _segments(rollout: _Rollout) -> Iterator[dict[str, Any]]:
    """Runs of tokens from one source, split around images; all placeholders of an image are one entry."""
    trajectory = rollout.trajectory
    spans = {span.start: span for span in trajectory.media}
    inside = np.zeros(len(trajectory.ids), bool)
    for span in trajectory.media:
        inside[span.start : span.end] = True
    changes = np.flatnonzero((np.diff(trajectory.sources) != 0) | np.diff(inside)) + 1
    # Two images can be adjacent, so each start is a cut of its own.
    for start, end in pairwise(sorted({0, *changes.tolist(), *spans, len(trajectory.ids)})):
        ids = trajectory.ids[start:end].tolist()
        source = Source(int(trajectory.sources[start])).name.lower()
        if start in spans:
            yield {"source": source, "image": picture_name(spans[start].media), "id": ids[0], "tokens": end - start}
            continue
        segment = {"source": source, "text": rollout.family.decode(ids), "ids": ids}
        if source == "policy":
            segment["logp"] = trajectory.logprobs[start:end]
            segment["sizes"] = token_sizes(trajectory.ids[start:end], segment["text"], rollout.family.decode)
        yield segment


def token_sizes(ids: np.ndarray, text: str, decode: Callable[[Any], str]) -> list[int]:
    """Characters of the text for each token; a character of several tokens counts for the last."""
    pieces = {token: decode([token]) for token in set(ids.tolist())}
    if "".join(pieces[token] for token in ids.tolist()) == text:
        return [len(pieces[token]) for token in ids.tolist()]
    stream = TextStream(decode)  # slower: for tokens that only decode together
    sizes = [len(stream.add(ids[:end])) for end in range(1, len(ids) + 1)]
    return [*sizes[:-1], sizes[-1] + len(stream.finish(ids))]


def _advantage(rollout: _Rollout) -> Any:
    """The advantages of the tokens; one number if all are equal, as with outcome estimators."""
    values = rollout.trajectory.advantages
    if values is None or len(values) == 0:
        return None
    return values[0] if (values == values[0]).all() else values


def _tokens(rollout: _Rollout) -> dict[str, int]:
    trajectory = rollout.trajectory
    return {
        "prompt": trajectory.prompt_length,
        "response": trajectory.response_length,
        "vision": sum(span.length for span in trajectory.media),
        "total": len(trajectory.ids),
    }


FIELDS: Mapping[str, Callable[[_Rollout], Any]] = {
    **{name: attrgetter(f"group.sample.{name}") for name in ("id", "data_source")},
    "gold": attrgetter("group.sample.answer"),
    "choices": lambda r: list(r.group.sample.choices),
    "extra": lambda r: dict(r.group.sample.extra),
    "prompt": lambda r: "\n".join(message.text for message in r.group.sample.messages),
    "media": _media,
    "group": lambda r: r.group.uid or r.group.sample.id,
    # the episode
    **{name: attrgetter(f"trajectory.{name}") for name in ("repeat", "turns", "end_reason", "status", "info")},
    "response": lambda r: r.family.decode(r.trajectory.response_ids),
    "response_tokens": attrgetter("trajectory.response_length"),
    "tokens": _tokens,
    "think_prefilled": attrgetter("family.chat.think_prefilled"),
    "said": lambda r: [m.text for m in r.trajectory.messages[r.trajectory.context :] if m.role == "assistant"],
    "tool_calls": lambda r: r.trajectory.info.get("tool_calls") or [],
    "messages": lambda r: [
        message_record(message, picture_name) for message in r.trajectory.messages or r.group.sample.messages
    ],
    "segments": lambda r: list(_segments(r)),
    "prompt_ids_hash": lambda r: hashlib.sha256(
        r.trajectory.ids[: r.trajectory.prompt_length].astype("<i8").tobytes()
    ).hexdigest()[:16],
    # its score
    **{name: attrgetter(f"trajectory.{name}") for name in ("extracted", "reward", "outcome", "turn_rewards", "reason")},
    "parts": lambda r: dict(r.trajectory.parts),
    "advantage": _advantage,
    "overturn": lambda r: r.trajectory.status == "overturn",
    "void": lambda r: r.trajectory.status == "void",
    "masked": lambda r: r.trajectory.status in ALWAYS_EXCLUDED or not r.trajectory.trained,
}
