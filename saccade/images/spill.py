"""Encoded files that came inside of rows: on disk until they are read, not in memory.

While rows are loaded, `Spill` appends such files to one that the process has for it, each content
once, and a medium keeps an `Extent` of it. Every process of this machine can read an extent while
the one that wrote it lives; then the file is deleted.

    media = Spill()(open_media(data))
    encoded(media)    # the same bytes, wherever they lie
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
import threading
import weakref
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

from saccade.errors import EnvironmentProblem
from saccade.images.files import ImageError
from saccade.types import Extent, Media

IN_MEMORY = 64 << 20  # bytes of a data set that stay there: a small one needs no file
# With the machine's name: locks on a shared disk may be known to one machine only.
PREFIX = f"saccade-media-{socket.gethostname()}-"


def encoded(media: Media) -> bytes:
    """The file of a medium, wherever it lies; a video of pictures has none."""
    if media.data is not None:
        return media.data if isinstance(media.data, bytes) else _read(media.data)
    assert media.path is not None, f"media {media.hash}: no file, but pictures"
    try:
        return Path(media.path).read_bytes()
    except OSError as error:
        raise ImageError(f"{media.path}: cannot be read: {error.strerror}") from None


def _read(extent: Extent) -> bytes:
    try:
        with open(extent.file, "rb") as file:
            file.seek(extent.start)
            data = file.read(extent.length)
    except OSError as error:
        raise ImageError(
            f"{extent.file}: {error.strerror}; media that came inside of rows can be read while "
            "the process that loaded them lives"
        ) from None
    if len(data) != extent.length:
        raise ImageError(f"{extent.file}: somebody cut it off after {extent.start + len(data)}")
    return data


class Spill:
    """Takes what the media of one data set hold out of memory, but for the first of them."""

    def __init__(self) -> None:
        self._room = IN_MEMORY

    def __call__(self, media: Media) -> Media:
        if media.pictures:
            return replace(media, pictures=tuple(map(self, media.pictures)))
        if not isinstance(media.data, bytes):
            return media
        self._room -= len(media.data)
        if self._room >= 0:
            return media
        try:
            place = _file_of(os.getpid()).append(media.hash, media.data)
        except OSError as error:
            raise EnvironmentProblem(
                f"{_folder()}: {error.strerror}; media that came inside of rows lie there while "
                "they are used, so set TMPDIR to a folder that has room for all of them, such as "
                "TMPDIR=/data/tmp"
            ) from None
        return replace(media, data=place)


def _folder() -> str:
    """/tmp is memory on many systems; /var/tmp is for large files."""
    folders = (os.environ.get("TMPDIR"), "/var/tmp", tempfile.gettempdir())
    return next(folder for folder in folders if folder and os.access(folder, os.W_OK | os.X_OK))


@cache
def _file_of(process: int) -> _File:
    """A fork has one of its own: both would write to the same place."""
    return _File()


class _File:
    """Grows, and is deleted when its process ends."""

    def __init__(self) -> None:
        folder = _folder()
        _sweep(Path(folder))
        self._handle, self._path = tempfile.mkstemp(prefix=PREFIX, dir=folder)
        with suppress(OSError):  # not every disk has locks; there nothing is swept
            fcntl.flock(self._handle, fcntl.LOCK_EX)
        self._lock, self._size = threading.Lock(), 0
        self._known: dict[str, Extent] = {}
        weakref.finalize(self, _remove, self._handle, self._path, os.getpid())

    def append(self, name: str, data: bytes) -> Extent:
        """`name` is the hash of the content, which is written once."""
        with self._lock:
            if name not in self._known:
                done = 0
                while done < len(data):
                    done += os.pwrite(self._handle, memoryview(data)[done:], self._size + done)
                self._known[name] = Extent(self._path, self._size, len(data))
                self._size += len(data)
            return self._known[name]


def _remove(handle: int, path: str, owner: int) -> None:
    if os.getpid() == owner:
        os.close(handle)
        Path(path).unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    """Files of processes that were killed: nobody holds their lock. An empty one may be about to be
    locked.
    """
    for path in folder.glob(f"{PREFIX}*"):
        with suppress(OSError), path.open("rb+") as file:
            if path.stat().st_size:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
