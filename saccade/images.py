"""Images as references: find them, check them from their header, decode them, crop them.

`open_media` takes every kind of source that a data set may hold and returns a `Media`: hash,
upright size, where the encoded file is. Pixels are made by `decode` alone, so a bad file is
refused before it costs memory. Knows nothing of models: `resized_size` is the arithmetic that
engine and trainer share, the resizing itself is the model family's.

    >>> resized_size(640, 480, unit=28, min_pixels=3136, max_pixels=1_003_520)
    (476, 644)
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import math
import os
import re
import threading
import urllib.request
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes, urlsplit
from urllib.request import url2pathname

import numpy as np
from PIL import Image, UnidentifiedImageError

from saccade.config import DataConfig
from saccade.errors import DataError
from saccade.types import Media

# `max_megapixels` is checked from the header before any pixel is decoded, whatever this limit
# says. Pillow's own one
# would only warn between its limit and twice that, and refuse images that the configuration allows.
Image.MAX_IMAGE_PIXELS = None

MAX_ASPECT = 200
MAX_DOWNLOAD = 256 * 2**20
DEFAULT_LIMITS = DataConfig()

# A closed list: some of Pillow's other readers start external programs.
READABLE = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")

# How files begin that stand in the wrong column.
OTHER_MEDIA = {
    "a sound, which belongs into audios": re.compile(
        rb"RIFF.{4}WAVE|fLaC|OggS|ID3|\xff[\xf2-\xfb]|.{4}ftypM4A", re.DOTALL
    ),
    "a video, which belongs into videos": re.compile(
        rb"RIFF.{4}AVI |\x1aE\xdf\xa3|.{4}ftyp(?!avi|hei|mif)", re.DOTALL
    ),
}

ORIENTATION = 0x0112
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class ImageError(DataError):
    """An image that cannot be used; the message names the file and the reason."""


class Encoded(NamedTuple):
    """An image file: how messages call it, its bytes, and its path when it lies on disk."""

    name: str
    data: bytes
    path: str | None = None


# -- opening ---------------------------------------------------------------------------------------


def open_media(
    source: Any,
    *,
    base: Path | None = None,
    limits: DataConfig = DEFAULT_LIMITS,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
) -> Media:
    """A reference to the image in `source`; relative paths start from `base` and stay inside it."""
    name, data, path = READERS[source_kind(source, base)](source, base, limits)
    with opened(data, name) as image:
        pixels = image.width * image.height
        if pixels > limits.max_megapixels * 1e6:
            raise ImageError(
                f"{name}: {image.width}x{image.height} is {pixels / 1e6:.0f} megapixels, "
                f"data.max_megapixels is {limits.max_megapixels:g}"
            )
        width, height = _upright_size(image, data, name)
        complete = ENDS.get(image.format or "", _assume)(data)
    size = _padded_size(width, height)
    if size != (width, height) and limits.aspect == "reject":
        raise ImageError(
            f"{name}: {width}x{height} is longer than {MAX_ASPECT}:1; data.aspect=pad accepts it"
        )
    media = Media(
        hash=hashlib.sha256(data).hexdigest(),
        width=size[0],
        height=size[1],
        path=path,
        data=data if path is None else None,
        min_pixels=min_pixels or limits.min_pixels,
        max_pixels=max_pixels or limits.max_pixels,
    )
    if media.min_pixels > media.max_pixels:
        raise ImageError(
            f"{name}: min_pixels {media.min_pixels} is above max_pixels {media.max_pixels}"
        )
    if not complete:  # No end mark: rare, so let the decoder say whether pixels are missing.
        decode(media)
    return media


def source_kind(source: Any, base: Path | None = None) -> str:
    """Which of the kinds of `READERS` a source is."""
    if isinstance(source, str):
        scheme = next((kind for prefix, kind in SCHEMES.items() if source.startswith(prefix)), None)
        return scheme or ("base64" if _is_base64(source, base) else "path")
    for types, kind in KINDS:
        if isinstance(source, types):
            return kind
    raise ImageError(
        f"an image cannot be made from {type(source).__name__}; give a path, bytes or an array"
    )


def _is_base64(text: str, base: Path | None) -> bool:
    """Long text in the base64 alphabet that names no file; the smallest PNG has 92 characters."""
    if len(text) < 64 or not re.fullmatch(r"[A-Za-z0-9+/\s]+={0,2}\s*", text):
        return False
    fits_a_path = len(text) < 1024 and max(map(len, text.split("/"))) < 255
    return not (fits_a_path and (base or Path()).joinpath(text).is_file())


def _from_path(source: str | Path, base: Path | None, limits: DataConfig) -> Encoded:
    return _from_file(located(source, base, limits), str(source)[:200])


def located(source: str | Path, base: Path | None, limits: DataConfig) -> Path:
    """A relative path starts from `base` and stays inside it."""
    if Path(source).is_absolute():
        return Path(source)
    folder = os.path.abspath(base or Path())
    path = os.path.normpath(os.path.join(folder, source))
    # Compared as text: links inside the folder were put there by its owner and may point anywhere.
    if os.path.commonpath([folder, path]) != folder and not limits.allow_outside:
        raise ImageError(
            f"{str(source)[:200]}: leaves the folder {folder}; data.allow_outside=true accepts it"
        )
    return Path(path)


def _from_file(path: Path, name: str) -> Encoded:
    if not os.path.isfile(path):  # unlike Path.is_file, False for a name that no disk can hold
        raise ImageError(f"{name}: file does not exist in {path.parent}")
    try:
        return Encoded(name, path.read_bytes(), str(path))
    except OSError as error:
        raise ImageError(f"{name}: cannot be read: {error.strerror}") from None


def _from_file_uri(source: str, base: Path | None, limits: DataConfig) -> Encoded:
    parts = urlsplit(source)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ImageError(
            f"{source}: a file URI holds an absolute path, for example file:///data/a.png"
        )
    return _from_file(Path(url2pathname(parts.path)), source)


def _from_http(source: str, base: Path | None, limits: DataConfig) -> Encoded:
    if not limits.allow_network:
        raise ImageError(f"{source}: needs the network; data.allow_network=true allows it")
    try:
        with urllib.request.urlopen(source, timeout=30) as answer:
            data = answer.read(MAX_DOWNLOAD + 1)
    except (OSError, ValueError) as error:
        raise ImageError(f"{source}: cannot be fetched: {error}") from None
    if len(data) > MAX_DOWNLOAD:
        raise ImageError(f"{source}: larger than {MAX_DOWNLOAD >> 20} MiB")
    return Encoded(source, data)


def _from_data_uri(source: str, base: Path | None, limits: DataConfig) -> Encoded:
    head, comma, body = source.partition(",")
    if not comma:
        raise ImageError(f"{source[:40]}: a data URI needs a comma before its content")
    if head.endswith(";base64"):
        return _from_base64(body, base, limits, name=f"{head},...")
    return Encoded(f"{head},...", unquote_to_bytes(body))


def _from_base64(
    text: str, base: Path | None, limits: DataConfig, name: str = "base64 text"
) -> Encoded:
    try:
        return Encoded(name, base64.b64decode("".join(text.split()), validate=True))
    except binascii.Error as error:
        raise ImageError(f"{name}: not base64: {error}") from None


def _from_bytes(
    source: bytes | bytearray | memoryview, base: Path | None, limits: DataConfig
) -> Encoded:
    return Encoded(f"image of {len(source)} bytes", bytes(source))


def _from_mapping(source: Mapping[str, Any], base: Path | None, limits: DataConfig) -> Encoded:
    data, path = source.get("bytes"), source.get("path")
    if data is None and path is None:
        raise ImageError(
            f"image {{{', '.join(map(str, source))}}}: needs a value for 'bytes' or 'path'"
        )
    if data is None:
        return READERS[source_kind(path, base)](path, base, limits)
    encoded = READERS[source_kind(data, base)](data, base, limits)
    return encoded._replace(name=str(path)) if path else encoded


def _from_pil(source: Image.Image, base: Path | None, limits: DataConfig) -> Encoded:
    name = f"{source.mode} image of {source.width}x{source.height}"
    try:
        turn = UPRIGHT.get(source.getexif().get(ORIENTATION, 1))
        upright = as_rgb(source) if turn is None else as_rgb(source).transpose(turn)
    except Exception as error:  # an opened file is decoded here, see `decode`
        raise ImageError(f"{name}: cannot be decoded: {error}") from None
    buffer = io.BytesIO()
    upright.save(buffer, "PNG", compress_level=1)
    return Encoded(name, buffer.getvalue())


def _from_array(source: np.ndarray, base: Path | None, limits: DataConfig) -> Encoded:
    shape = source.shape
    grey_or_colour = source.ndim == 2 or (source.ndim == 3 and shape[2] in (1, 3, 4))
    if source.dtype != np.uint8 or not grey_or_colour or 0 in shape:
        raise ImageError(
            f"array of {source.dtype} {list(shape)}: give uint8 [height, width] "
            "or [height, width, 1|3|4]"
        )
    pixels = source[:, :, 0] if source.ndim == 3 and shape[2] == 1 else source
    return _from_pil(Image.fromarray(np.ascontiguousarray(pixels)), base, limits)


SCHEMES = {"file://": "file_uri", "http://": "http", "https://": "http", "data:": "data_uri"}
KINDS: tuple[tuple[Any, str], ...] = (
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
    "bytes": _from_bytes,
    "mapping": _from_mapping,
    "pil": _from_pil,
    "array": _from_array,
}


# -- header ----------------------------------------------------------------------------------------


@cache
def _readable() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in READABLE if name in Image.OPEN)


def opened(data: bytes, name: str) -> Image.Image:
    if not data:
        raise ImageError(f"{name}: empty file")
    try:
        return Image.open(io.BytesIO(data), formats=_readable())
    except UnidentifiedImageError:
        other = next(
            (f" but {what}" for what, start in OTHER_MEDIA.items() if start.match(data)), ""
        )
        hint = other or f"; readable are {', '.join(_readable())}"
        raise ImageError(f"{name}: not an image{hint}") from None
    except Exception as error:  # broken files make Pillow raise almost anything
        raise ImageError(f"{name}: damaged header: {error}") from None


def _orientation(image: Image.Image, data: bytes, name: str) -> int:
    """The EXIF orientation that is still to be applied: Pillow turns TIFF itself."""
    if image.format == "TIFF" or (image.format == "PNG" and b"eXIf" not in data):
        return 1  # asking a PNG without EXIF would decode it in search of a late chunk
    try:
        return image.getexif().get(ORIENTATION, 1)
    except Exception as error:
        raise ImageError(f"{name}: damaged EXIF data: {error}") from None


def _upright_size(image: Image.Image, data: bytes, name: str) -> tuple[int, int]:
    width, height = image.size
    return (height, width) if _orientation(image, data, name) in (5, 6, 7, 8) else (width, height)


def _padded_size(width: int, height: int) -> tuple[int, int]:
    return max(width, -(-height // MAX_ASPECT)), max(height, -(-width // MAX_ASPECT))


def _jpeg_ends(data: bytes) -> bool:
    """An end mark behind the first scan; segments before it may hold a thumbnail with its own."""
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        if data[at + 1] == 0xDA:
            return data.find(b"\xff\xd9", at) >= 0
        is_fill = data[at + 1] == 0xFF
        at += 1 if is_fill else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return False


def _webp_ends(data: bytes) -> bool:
    return len(data) >= 8 + int.from_bytes(data[4:8], "little")


def _assume(data: bytes) -> bool:
    return True


ENDS: dict[str, Callable[[bytes], bool]] = {
    "PNG": lambda data: data.rfind(b"IEND") >= 0,
    "JPEG": _jpeg_ends,
    "MPO": _jpeg_ends,
    "WEBP": _webp_ends,
}


# -- pixels ----------------------------------------------------------------------------------------


def decode(media: Media) -> np.ndarray:
    """Upright RGB pixels, uint8 [height, width, 3]: first frame, alpha on white, box cut out. Of a
    video its frames, of a sound and of a time series its samples.
    """
    if media.kind != "image":
        from saccade import series, sounds, videos

        return {"video": videos, "audio": sounds, "series": series}[media.kind].decode(media)
    name = media.path or f"image {media.hash[:12]}"
    data = media.data if media.path is None else _from_file(Path(media.path), name).data
    assert data is not None
    with opened(data, name) as image:
        size = _padded_size(*_upright_size(image, data, name))
        wanted = media.box[2:] if media.box else (media.width, media.height)
        fits = size[0] >= wanted[0] and size[1] >= wanted[1]
        if not fits or (media.box is None and size != wanted):
            raise ImageError(f"{name}: is {size[0]}x{size[1]} now, so it changed after it was read")
        try:
            turn = UPRIGHT.get(_orientation(image, data, name))
            rgb = as_rgb(image) if turn is None else as_rgb(image).transpose(turn)
        except Exception as error:  # broken files make Pillow raise almost anything
            raise ImageError(f"{name}: cannot be decoded: {error}") from None
    if rgb.size != size:
        # Content stays at the top left, so boxes given for the file keep their meaning.
        canvas = Image.new("RGB", size, "white")
        canvas.paste(rgb)
        rgb = canvas
    pixels = np.array(rgb.crop(media.box) if media.box else rgb)
    assert pixels.shape == (media.height, media.width, 3), name
    return pixels


def as_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey: 65535 / 257 = 255
        grey = np.clip(np.asarray(image), 0, 65535).astype(np.int32)
        return Image.fromarray(((grey + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("floating-point pixels have no known range")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def crop(media: Media, box: tuple[int, int, int, int]) -> Media:
    """A reference to the part inside `box`: x0, y0, x1, y1 in pixels of `media`."""
    x0, y0, x1, y1 = (int(value) for value in box)
    if not (0 <= x0 < x1 <= media.width and 0 <= y0 < y1 <= media.height):
        raise ImageError(
            f"box {(x0, y0, x1, y1)} is empty or leaves the image of {media.width}x{media.height}"
        )
    width, height = x1 - x0, y1 - y0
    if _padded_size(width, height) != (width, height):
        raise ImageError(f"box {(x0, y0, x1, y1)} has an aspect ratio above {MAX_ASPECT}")
    left, top = media.box[:2] if media.box else (0, 0)
    inside = (left + x0, top + y0, left + x1, top + y1)
    name = f"{root_hash(media)}-{'.'.join(map(str, inside))}"
    return replace(media, hash=name, width=width, height=height, box=inside, parent=media.hash)


def root_hash(media: Media) -> str:
    """The hash of the file: a crop is called by the hash of its root and its box."""
    return media.hash.rpartition("-")[0] if media.box else media.hash


def resized_size(
    width: int, height: int, *, unit: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """(height, width) that the model sees: multiples of `unit` within the pixel budget."""
    rows, columns = (max(unit, round(side / unit) * unit) for side in (height, width))
    if rows * columns > max_pixels:
        shrink = math.sqrt(width * height / max_pixels)
        rows, columns = (
            max(unit, math.floor(side / shrink / unit) * unit) for side in (height, width)
        )
    elif rows * columns < min_pixels:
        grow = math.sqrt(min_pixels / (width * height))
        rows, columns = (math.ceil(side * grow / unit) * unit for side in (height, width))
    return rows, columns


class ImageCache:
    """Decoded images, or what `make` makes of them; the least recently used ones dropped first.

    Each array is made once however many threads ask. Memory stays bounded: what is kept never
    exceeds `max_bytes` (a larger array is handed out and not kept); beside it there is only what
    callers still hold or make. Arrays are shared, hence read-only.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        make: Callable[[Media], np.ndarray] = decode,
        key: Callable[[Media], Any] = lambda media: media.key[:2],  # the budget matters later
    ) -> None:
        self.max_bytes, self.make, self.key = max_bytes, make, key
        self.bytes = 0
        self._entries: OrderedDict[Any, Future[np.ndarray]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, media: Media) -> np.ndarray:
        key = self.key(media)
        with self._lock:
            entry = self._entries.get(key)
            first = entry is None
            if entry is None:
                entry = self._entries[key] = Future()
            self._entries.move_to_end(key)
        if first:
            self._fill(key, entry, media)
        return entry.result()

    def peek(self, key: Any) -> np.ndarray | None:
        """What is kept under that key, if it is there."""
        with self._lock:
            entry = self._entries.get(key)
        return entry.result() if entry is not None and entry.done() else None

    def get_all(self, media: Sequence[Media]) -> list[np.ndarray]:
        """Several threads make what is missing."""
        return list(_workers().map(self.get, media))

    def prefetch(self, media: Iterable[Media]) -> None:
        """Begin, and do not wait. What fails now fails again for who asks for it."""
        for item in media:
            _workers().submit(self.get, item)

    def _fill(self, key: Any, entry: Future[np.ndarray], media: Media) -> None:
        try:
            pixels = self.make(media)
        except BaseException as error:
            with self._lock:
                del self._entries[key]
            entry.set_exception(error)
            return
        pixels.setflags(write=False)
        with self._lock:
            entry.set_result(pixels)
            self.bytes += pixels.nbytes
            while self.bytes > self.max_bytes:
                oldest = next(key for key, other in self._entries.items() if other.done())
                self.bytes -= self._entries.pop(oldest).result().nbytes


@cache
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="images")


def _decode_once(media: Media) -> np.ndarray:
    """A crop of a picture that is decoded already is cut from it."""
    whole = DECODED.peek((root_hash(media), None))
    if media.box is None or whole is None:
        return decode(media)
    x0, y0, x1, y1 = media.box
    return whole[y0:y1, x0:x1].copy()


# What this process has decoded: the vision tower and the stored rollouts look at the same pixels.
DECODED = ImageCache(max_bytes=512 << 20, make=_decode_once)
