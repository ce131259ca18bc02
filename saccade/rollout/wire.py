"""Messages and samples as JSON, for environments that live in another process. Nothing is pickled.
The bytes of a picture cross once: what both sides know (by the hash of its file) is only named.

>>> messages_of(json.loads(json.dumps(plain_messages([Message(role="user", parts=("Hi",))]))))
(Message(role='user', parts=('Hi',)),)
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from saccade.media.blob_file import encoded
from saccade.media.images import root_hash
from saccade.types import Media, Message, Sample

FIELDS = tuple(field.name for field in fields(Media))
NOTHING: Mapping[str, Media] = {}


def line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, default=_plain).encode() + b"\n"


def _plain(value: Any) -> Any:
    """Arrays become lists; what JSON has no word for arrives as its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


Known = Mapping[str, Media]


def files_of(sample: Sample) -> Known:
    """The pictures that both sides know."""
    return {root_hash(media): media for media in sample.media}


def plain_messages(messages: Sequence[Message], known: Known = NOTHING) -> list[Any]:
    return [
        [m.role, [part if isinstance(part, str) else _plain_media(part, known) for part in m.parts]]
        for m in messages
    ]


def messages_of(rows: Sequence[Any], known: Known = NOTHING) -> tuple[Message, ...]:
    return tuple(
        Message(
            role=role, parts=tuple(p if isinstance(p, str) else _media(p, known) for p in parts)
        )
        for role, parts in rows
    )


def plain_sample(sample: Sample) -> dict[str, Any]:
    return {
        "id": sample.id,
        "messages": plain_messages(sample.messages),
        "answer": sample.answer,
        "data_source": sample.data_source,
        "choices": sample.choices,
        "extra": dict(sample.extra),
    }


def sample_of(row: Mapping[str, Any]) -> Sample:
    answer = tuple(row["answer"]) if isinstance(row["answer"], list) else row["answer"]
    shaped = {"messages": messages_of(row["messages"]), "choices": tuple(row["choices"])}
    return Sample(**{**row, **shaped, "answer": answer})


def _plain_media(media: Media, known: Known) -> dict[str, Any]:
    row = {name: getattr(media, name) for name in FIELDS}
    if (root := root_hash(media)) in known:
        return row | {"path": None, "data": None, "pictures": (), "known": root}
    pictures = [_plain_media(picture, NOTHING) for picture in media.pictures]
    data = None if media.data is None else base64.b64encode(encoded(media)).decode()
    return row | {"data": data, "pictures": pictures}


def _media(row: Mapping[str, Any], known: Known) -> Media:
    row = {**row, "box": row["box"] and tuple(row["box"]), "frames": tuple(row["frames"])}
    if (root := row.pop("known", None)) is not None:
        return Media(**row | {n: getattr(known[root], n) for n in ("path", "data", "pictures")})
    pictures = tuple(_media(picture, NOTHING) for picture in row["pictures"])
    data = None if row["data"] is None else base64.b64decode(row["data"])
    return Media(**row | {"data": data, "pictures": pictures})
