"""Read media from any source (path, URI, bytes, base64 text, mapping, image or array in memory) as an encoded file,
and make a reference to it. Encoded files are not decoded here.

    read("images/a.png", base, limits).data
"""

import base64
import hashlib
import io
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

import numpy as np
from PIL import Image

from saccade.config import DataConfig
from saccade.media.blob_file import shown_hash
from saccade.media.image_files import ORIENTATION, ImageError, upright_rgb
from saccade.types import Media

MAX_DOWNLOAD = 256 * 2**20
DOWNLOAD_SECONDS = 600
DEFAULT_LIMITS = DataConfig()


class Encoded(NamedTuple):
    """An encoded file: its name in messages, its bytes, and its path if it is on disk."""

    name: str
    data: bytes
    path: str | None = None


def read(source: Any, base: Path | None, limits: DataConfig) -> Encoded:
    """Read any source; relative paths start from `base`."""
    return READERS[source_kind(source, base)](source, base, limits)


def make_media(file: Encoded, kind: str = "image", **shown: Any) -> Media:
    """A medium in `file`; its hash covers what is shown of it."""
    content = hashlib.sha256(file.data).hexdigest()
    data = file.data if file.path is None else None
    media = Media(hash=content, kind=kind, path=file.path, data=data, **shown)
    return replace(media, hash=shown_hash(media, content))


def source_kind(source: Any, base: Path | None = None) -> str:
    """The key of `READERS` for a source."""
    if isinstance(source, str):
        scheme = next((kind for prefix, kind in SCHEMES.items() if source.startswith(prefix)), None)
        return scheme or ("base64" if _is_base64(source, base) else "path")
    for types, kind in SOURCE_TYPES:
        if isinstance(source, types):
            return kind
    raise ImageError(f"an image cannot be made from {type(source).__name__}; give a path, bytes or an array")


def _is_base64(text: str, base: Path | None) -> bool:
    """Long text in the base64 alphabet that names no file; the smallest PNG has 92 characters."""
    if len(text) < 64 or not re.fullmatch(r"[A-Za-z0-9+/\s]+={0,2}\s*", text):
        return False
    fits_a_path = len(text) < 1024 and max(map(len, text.split("/"))) < 255
    return not (fits_a_path and (base or Path()).joinpath(text).is_file())


def resolve_path(source: str | Path, base: Path | None, limits: DataConfig) -> Path:
    """Resolve a path relative to `base`; `data.allow_outside` says which paths may be outside of it."""
    if not str(source).strip():
        raise ImageError("its path is empty; give one, or leave the image out of the row")
    absolute = Path(source).is_absolute()
    if absolute and limits.allow_outside:
        return Path(source)
    folder = os.path.abspath(base or Path())
    path = os.path.normpath(os.path.join(folder, source))
    # Links are not resolved: those inside the folder were made by its owner and may point anywhere.
    if limits.allow_outside is not True and os.path.commonpath([folder, path]) != folder:
        raise ImageError(
            f"{str(source)[:200]}: leaves the folder {folder}; "
            f"data.allow_outside={'absolute' if absolute else 'true'} accepts it"
        )
    return Path(path)


def _from_path(source: str | Path, base: Path | None, limits: DataConfig, name: str | None = None) -> Encoded:
    path, name = resolve_path(source, base, limits), name or str(source)[:200]
    if not os.path.isfile(path):  # unlike Path.is_file, False for a name that no file system allows
        missing = f"file does not exist in {path.parent}"
        raise ImageError(f"{name}: {'is no regular file; give the path of one' if os.path.exists(path) else missing}")
    try:
        return Encoded(name, path.read_bytes(), str(path))
    except OSError as error:
        raise ImageError(f"{name}: cannot be read: {error.strerror}") from None


def _from_file_uri(source: str, base: Path | None, limits: DataConfig) -> Encoded:
    found = re.fullmatch(r"file://(?:localhost)?(/[^?#]*).*", source, re.DOTALL)
    if found is None:
        raise ImageError(f"{source}: a file URI holds an absolute path, for example file:///data/a.png")
    from urllib.request import url2pathname  # slow to import, and most rows do not need it

    return _from_path(url2pathname(found[1]), base, limits, source)


@cache
def _client() -> Any:
    """The process's HTTP client, shared by threads. No compression: a small reply could expand to a huge one."""
    import httpx2

    return httpx2.Client(follow_redirects=True, timeout=30, headers={"Accept-Encoding": "identity"})


def _from_http(source: str, base: Path | None, limits: DataConfig) -> Encoded:
    if not limits.allow_network:
        raise ImageError(f"{source}: needs the network; data.allow_network=true allows it")
    import httpx2  # slow to import, too

    data, began = bytearray(), time.monotonic()
    try:
        with _client().stream("GET", source) as answer:
            if answer.status_code != 200:
                raise ImageError(f"{source}: cannot be fetched: status {answer.status_code}")
            for piece in answer.iter_raw():
                data += piece
                if len(data) > MAX_DOWNLOAD:
                    raise ImageError(f"{source}: larger than {MAX_DOWNLOAD >> 20} MiB")
                if time.monotonic() - began > DOWNLOAD_SECONDS:
                    raise ImageError(f"{source}: not complete after {DOWNLOAD_SECONDS} s")
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
        raise ImageError(f"{source}: cannot be fetched: {error}") from None
    return Encoded(source, bytes(data))


def _from_data_uri(source: str, base: Path | None, limits: DataConfig) -> Encoded:
    head, comma, body = source.partition(",")
    if not comma:
        raise ImageError(f"{source[:40]}: a data URI needs a comma before its content")
    if head.endswith(";base64"):
        return _from_base64(body, base, limits, name=f"{head},...")
    return Encoded(f"{head},...", unquote_to_bytes(body))


def _from_base64(text: str, base: Path | None, limits: DataConfig, name: str = "base64 text") -> Encoded:
    try:
        return Encoded(name, base64.b64decode("".join(text.split()), validate=True))
    except ValueError as error:  # also raised for non-ASCII text
        raise ImageError(f"{name}: not base64: {error}") from None


def _from_mapping(source: Mapping[str, Any], base: Path | None, limits: DataConfig) -> Encoded:
    data, path = source.get("bytes"), source.get("path")
    data = None if isinstance(data, str | bytes | bytearray) and not data else data
    if data is None and not path:
        raise ImageError(f"record {{{', '.join(map(str, source))}}}: needs a value for 'bytes' or 'path'")
    if data is None:
        return read(path, base, limits)
    encoded = read(data, base, limits)
    return encoded._replace(name=str(path)) if path else encoded


def _from_pil(source: Image.Image, base: Path | None, limits: DataConfig) -> Encoded:
    name = f"{source.mode} image of {source.width}x{source.height}"
    try:
        upright = upright_rgb(source, source.getexif().get(ORIENTATION, 1))
    except Exception as error:  # an opened file is decoded here, see `decode`
        raise ImageError(f"{name}: cannot be decoded: {error}") from None
    buffer = io.BytesIO()
    upright.save(buffer, "PNG", compress_level=1)
    return Encoded(name, buffer.getvalue())


def _from_array(source: np.ndarray, base: Path | None, limits: DataConfig) -> Encoded:
    shape = source.shape
    grey_or_colour = source.ndim == 2 or (source.ndim == 3 and shape[2] in (1, 3, 4))
    if source.dtype != np.uint8 or not grey_or_colour or 0 in shape:
        raise ImageError(f"array of {source.dtype} {list(shape)}: give uint8 [height, width] or [height, width, 1|3|4]")
    pixels = source[:, :, 0] if source.ndim == 3 and shape[2] == 1 else source
    return _from_pil(Image.fromarray(np.ascontiguousarray(pixels)), base, limits)


SCHEMES = {"file://": "file_uri", "http://": "http", "https://": "http", "data:": "data_uri"}
SOURCE_TYPES: tuple[tuple[Any, str], ...] = (
    (Path, "path"),
    ((bytes, bytearray, memoryview), "bytes"),
    (Mapping, "mapping"),
    (Image.Image, "pil"),
    (np.ndarray, "array"),
)
READERS: dict[str, Callable[[Any, Path | None, DataConfig], Encoded]] = {
    "path": _from_path,
    "file_uri": _from_file_uri,
    "http": _from_http,
    "data_uri": _from_data_uri,
    "base64": _from_base64,
    "bytes": lambda source, base, limits: Encoded(f"image of {len(source)} bytes", bytes(source)),
    "mapping": _from_mapping,
    "pil": _from_pil,
    "array": _from_array,
}
