"""Encoded media files embedded in rows: stored on disk, not in memory, until they are read.

While rows are loaded, `Spill` appends them to one temporary file per data set, each content once, and a medium holds
an `Extent` of it. The file has no name: no other process can delete it, and it is freed when the process ends, even
by a crash. Other processes are sent the bytes that they need.

    media = Spill()(open_media(data))
    encoded(media)    # the same bytes, wherever they are stored, or an error
"""

import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from saccade.errors import EnvironmentProblem
from saccade.media.image_files import ImageError
from saccade.types import Extent, Media, root_hash

IN_MEMORY = 64 << 20  # bytes of a data set that stay in memory: a small one needs no file


def encoded(media: Media) -> bytes:
    """The encoded bytes of a medium, wherever they are stored; a video made of images has none. A file on disk may
    have been replaced since it was opened, so its content is compared with the hash.
    """
    if media.data is not None:
        if isinstance(media.data, bytes):
            return media.data
        file, start, length = media.data
        data = os.pread(file.fileno(), length, start)
        assert len(data) == length, f"{len(data)} of {length} bytes"
        return data
    data = _read(media, lambda file: file.read())
    _require(media, hashlib.sha256(data))
    return data


def require_unchanged(media: Media) -> None:
    """The check of `encoded` for code that reads the file itself; does not load it into memory."""
    _require(media, _read(media, lambda file: hashlib.file_digest(file, "sha256")))


def _read(media: Media, read: Callable[[Any], Any]) -> Any:
    assert media.path is not None, f"media {media.hash}: no file, but images"
    try:
        with open(media.path, "rb") as file:
            return read(file)
    except OSError as error:
        raise ImageError(f"{media.path}: cannot be read: {error.strerror}") from None


def _require(media: Media, content: Any) -> None:
    if shown_hash(media, content.hexdigest()) != root_hash(media.hash, media.box):
        raise ImageError(f"{media.path}: changed after it was read")


def shown_hash(media: Media, content: str) -> str:
    """The hash of an uncropped medium whose file has the hash `content`; covers which part of it is shown."""
    if media.kind == "image":
        return content
    shown = f"{list(media.frames)} {media.fps!r}" if media.kind == "video" else f"{media.width}"
    return hashlib.sha256(f"{content} {shown}".encode()).hexdigest()


class Spill:
    """Moves embedded media of one data set from memory to a temporary file, except the first IN_MEMORY bytes. The
    file only grows; its space is freed when no medium refers to it.
    """

    def __init__(self) -> None:
        self._room, self._size = IN_MEMORY, 0
        self._file: Any = None
        self._known: dict[str, Extent] = {}

    def __call__(self, media: Media) -> Media:
        if media.pictures:
            return replace(media, pictures=tuple(map(self, media.pictures)))
        if not isinstance(media.data, bytes):
            return media
        self._room -= len(media.data)
        if self._room >= 0:
            return media
        try:
            return replace(media, data=self._known.get(media.hash) or self._append(media.hash, media.data))
        except OSError as error:
            what = f"{_folder()}: {error.strerror}; media that came inside of rows lie there"
            hint = "set TMPDIR to a folder that exists and has room for all of them, such as TMPDIR=/data/tmp"
            raise EnvironmentProblem(f"{what}: {hint}") from None

    def _append(self, name: str, data: bytes) -> Extent:
        """Append the content with the hash `name`."""
        self._file = self._file or tempfile.TemporaryFile(dir=_folder(), buffering=0)  # noqa: SIM115 - stays open
        done = 0
        while done < len(data):
            done += os.pwrite(self._file.fileno(), memoryview(data)[done:], self._size + done)
        self._known[name] = Extent(self._file, self._size, len(data))
        self._size += len(data)
        return self._known[name]


def _folder() -> str:
    """TMPDIR if set, even if it cannot be written to: the user may have set it because other disks are full. Else
    /var/tmp, which is meant for large files: /tmp is in memory on many systems.
    """
    usual = "/var/tmp" if os.access("/var/tmp", os.W_OK | os.X_OK) else tempfile.gettempdir()
    return os.environ.get("TMPDIR") or usual
