"""Finds columns with media that the format does not read: the model would be trained without its images.

>>> unread_media([{"question": "How many?", "photo": "a.jpg"}], qa, {})
('photo', 'images')
"""

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from PIL import Image

from saccade.data.formats import FOR_REWARDS, Format, columns_of
from saccade.errors import DataError
from saccade.media.image_files import OTHER_MEDIA

# First bytes of files, and endings of file names.
IMAGE = re.compile(rb"\x89PNG|\xff\xd8\xff|GIF8|RIFF.{4}WEBP|BM|II\*\0|MM\0\*|.{4}ftypavif", re.DOTALL)
BEGINNINGS = {"image": IMAGE, **OTHER_MEDIA}
ENDINGS = {"image": "png|jpe?g|webp|gif|bmp|tiff?", "video": "mp4|webm|mov|avi|mkv", "audio": "wav|mp3|flac|ogg|m4a"}
NAMES = {kind: re.compile(rf"(?is)data:{kind}/|\S.{{0,1000}}\.(?:{end})\Z") for kind, end in ENDINGS.items()}
ENCODED = "iVBORw0KGgo", "/9j/", "R0lGOD"  # images in base64
REST = "extra"  # further columns of a row that saccade wrote; its media were checked before

Rows = Iterable[Mapping[str, Any]]


def refuse_unread(path: str, rows: Rows, format: Format, keys: Mapping[str, str], samples: Any, media: bool) -> None:
    """Raise DataError if the set at `path` has such a column and no `media`; says how to use or to ignore it."""
    if not media and (found := unread_media(rows, format, keys)):
        column, role = found
        key = f"data.keys.{role}"
        raise DataError(
            f"{path}: column {column!r} holds {role}, and nobody reads it: {key}={column} shows them to the model, "
            f"{key}= does not. That is said of all sets; for this one alone: saccade check-data {path} {key}=… "
            "--fix NEW.jsonl makes a file that needs no key"
        )


def unread_media(rows: Rows, format: Format, keys: Mapping[str, str]) -> tuple[str, str] | None:
    """Returns the first such (column, role that would read it). A role in `keys`, even with an empty value, counts as
    decided by the user.
    """
    columns = columns_of(format, keys).values()
    read = {REST, *FOR_REWARDS, *(name for names in columns for name in names)}
    found: dict[str, set[str | None]] = {}
    for row in rows:
        for column, value in row.items():
            if column not in read and (held := _held(value)) is not None:
                found.setdefault(column, set()).add(_role_of(held))
    for column, roles in found.items():
        role = next(iter(roles))
        if len(roles) == 1 and role is not None and role not in keys:
            return column, role
    return None


def _held(value: Any) -> Any:
    """The value of a column, of a list its first item; None if it is empty, as some rows of a set with images may be
    text only.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):  # a list in a CSV cell
        with suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, list | tuple):
        return _held(value[0]) if value else None
    if isinstance(value, Mapping):
        return next((value for part in value.values() if _held(part) is not None), None)
    return None if isinstance(value, str | bytes) and not value else value


def _role_of(value: Any) -> str | None:
    """The role (images, videos, audios) of the medium that `value` is, or None."""
    if isinstance(value, Mapping):
        return _role_of(value.get("bytes")) or _role_of(value.get("path"))
    if isinstance(value, Image.Image) or (isinstance(value, str) and value.startswith(ENCODED)):
        return "images"
    patterns: Mapping[str, Any] = BEGINNINGS if isinstance(value, bytes) else NAMES if isinstance(value, str) else {}
    return next((f"{kind}s" for kind, pattern in patterns.items() if pattern.match(value)), None)
