"""Writes samples as canonical rows, JSON that the formats of `data.records.CANONICAL` read back as the same samples,
or as conversations for sft: ShareGPT with images in any turn.

>>> read_row(to_row(sample), FORMATS["messages"], DataConfig(), open_image=open_media) == sample
True
"""

import base64
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image

from saccade.data.chats import escape
from saccade.errors import DataError
from saccade.media.blob_file import encoded
from saccade.media.images import decode
from saccade.types import Media, Message, Sample


def to_row(sample: Sample) -> dict[str, Any]:
    """The canonical record of a sample, which the formats of `CANONICAL` read back."""
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


def convert(samples: Sequence[Sample], path: Path) -> None:
    """Write samples as canonical JSONL, which the `messages` format reads back as the same samples."""
    for sample in samples:  # fail for a row that cannot be written before creating the file
        _line(replace(sample, messages=(), candidates=()))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(map(_line, samples))  # lazily: a line may hold encoded media


def _line(sample: Sample) -> str:
    try:
        return json.dumps(to_row(sample), ensure_ascii=False, default=_json_value) + "\n"
    except TypeError as error:
        raise DataError(f"row {sample.id}: a column cannot be written as JSON: {error}") from None


def _json_value(value: Any) -> Any:
    for method in ("tolist", "isoformat"):  # arrays, dates
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError(f"{type(value).__name__} is no JSON value")


# -- conversations ----------------------------------------------------------------------------------

SPEAKERS = {"system": "system", "user": "human", "assistant": "gpt", "tool": "tool"}


def dialogue_row(sample: Sample, folder: Path) -> dict[str, Any]:
    """A conversation as a row for sft. Its images are written into `folder`/images, a crop as its own file. The row has
    each image's pixel budget, so it is read back to the same tokens.
    """

    def said(message: Message) -> str:
        return "".join(escape(part) if isinstance(part, str) else "<image>" for part in message.parts)

    (folder / "images").mkdir(parents=True, exist_ok=True)
    return {
        "id": sample.id,
        "data_source": sample.data_source,
        "conversations": [{"from": SPEAKERS[message.role], "value": said(message)} for message in sample.messages],
        "images": [_stored(media, folder) for media in sample.media],
        "answer": sample.answer,
        **sample.extra,
    }


def _stored(media: Media, folder: Path) -> dict[str, Any]:
    """Write an image and return its record. A whole image keeps its encoded bytes; a crop is written as PNG."""
    suffix = Path(media.path).suffix if media.path and media.box is None else ".png"
    name = f"images/{media.hash[:16]}{media.hash[64:]}{suffix}"
    file = folder / name
    if not file.exists() and media.box is None:
        file.write_bytes(encoded(media))
    elif not file.exists():
        Image.fromarray(decode(media)).save(file)
    return {"path": name, "min_pixels": media.min_pixels, "max_pixels": media.max_pixels}
