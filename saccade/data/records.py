"""Samples as plain data: canonical rows, hashes of what they hold.

A canonical row is JSON that the formats of `WRITTEN` read back as the same sample.

    >>> read_row(to_row(sample), FORMATS["messages"], DataConfig(), open_image=open_media) == sample
    True
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from saccade.data.chats import escape
from saccade.media.blob_file import encoded
from saccade.types import Media, Message, Sample

WRITTEN = ("messages", "pairs", "sides", "labels")


def plain(value: Any) -> Any:
    """JSON data that stands for any value, for hashes and reports; bytes become their hash."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, bytes):
        return f"sha256:{hashlib.sha256(value).hexdigest()}"
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return value.isoformat() if hasattr(value, "isoformat") else f"<{type(value).__name__}>"


def to_row(sample: Sample) -> dict[str, Any]:
    """The canonical record of a sample, which the formats of `WRITTEN` read back."""
    row: dict[str, Any] = {
        "id": sample.id,
        "data_source": sample.data_source,
        "messages": _items(sample.messages),
        "answer": sample.answer,
        "choices": sample.choices,
        "extra": dict(sample.extra),
    }
    if sample.candidates:
        sides = ("a", "b") if "labels" in sample.extra else ("chosen", "rejected")
        roles = sides if sample.desirable is None else ("output",)
        row |= {r: _items(c) for r, c in zip(roles, sample.candidates, strict=True)}
    return row if sample.desirable is None else row | {"label": int(sample.desirable)}


def _items(messages: Iterable[Message]) -> list[dict[str, Any]]:
    return [{"role": message.role, "content": [_item(part) for part in message.parts]} for message in messages]


def _item(part: str | Media) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": escape(part)}
    assert part.box is None, "a data set holds whole images"
    item = {"type": part.kind, part.kind: _source(part), "hash": part.hash}
    if part.kind in ("audio", "series"):
        return item
    item |= {name: getattr(part, name) for name in ("width", "height", "min_pixels", "max_pixels")}
    if part.kind == "image":
        return item
    return item | ({"fps": part.fps} if part.pictures else {"frames": list(part.frames)})


def _source(media: Media) -> Any:
    if media.pictures:
        return [_source(media.pictures[frame]) for frame in media.frames]
    return media.path or "data:;base64," + base64.b64encode(encoded(media)).decode()


def content_hash(sample: Sample, *, everything: bool = False) -> str:
    """Hash of prompt, gold and choices; with `everything` also of id, source and extra columns."""
    content: list[Any] = [_content(sample.messages), sample.answer, sample.choices]
    if sample.candidates:
        content += [[_content(candidate) for candidate in sample.candidates], sample.desirable]
    if everything:
        content += [sample.id, sample.data_source, plain(sample.extra)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _content(messages: Iterable[Message]) -> list[Any]:
    return [[m.role, [p if isinstance(p, str) else p.key for p in m.parts]] for m in messages]
