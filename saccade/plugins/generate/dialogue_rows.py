"""Conversations with pictures in any turn, as rows to learn from: ShareGPT with images in order.

>>> dialogue_row(sample, Path("coldstart"))["conversations"][0]["value"]
'<image>Number on the bus?'
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from PIL import Image

from saccade.data.chats import escape
from saccade.media.blob_file import encoded
from saccade.media.images import decode
from saccade.types import Media, Message, Sample

SPEAKERS = {"system": "system", "user": "human", "assistant": "gpt", "tool": "tool"}


def dialogue_row(sample: Sample, folder: Path) -> dict[str, Any]:
    """A conversation as a row to learn from. Its pictures are written into `folder`/images: a crop
    as one of its own, each with its pixel budget, so the row is read back to the same tokens.
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
    """A whole picture keeps its file as it is; a crop becomes one without loss."""
    suffix = Path(media.path).suffix if media.path and media.box is None else ".png"
    name = f"images/{media.hash[:16]}{media.hash[64:]}{suffix}"
    if not (folder / name).exists():
        file = io.BytesIO()
        if media.box is None:
            file.write(encoded(media))
        else:
            Image.fromarray(decode(media)).save(file, "PNG")
        (folder / name).write_bytes(file.getvalue())
    return {"path": name, "min_pixels": media.min_pixels, "max_pixels": media.max_pixels}
