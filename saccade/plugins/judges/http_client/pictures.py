"""Images as an endpoint takes them: type and base64 text, of at most the medium's pixel budget.

A file that is fine as it is travels byte by byte; one that is too large, lies on its side, is a
crop, or has a format that few endpoints read, is written anew as PNG.

    kind, data = Pictures()(media)
"""

from __future__ import annotations

import base64
import io
import math
import threading
from functools import lru_cache

from PIL import Image

from saccade.media.blob_file import encoded
from saccade.media.image_files import ORIENTATION
from saccade.media.images import ImageError, decode
from saccade.types import Media

COMMON = ("PNG", "JPEG", "WEBP")
KEPT = 64


class Pictures:
    """Encodes each image once, however many threads ask, and several images at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks = lru_cache(maxsize=KEPT)(lambda media: threading.Lock())
        self._encoded = lru_cache(maxsize=KEPT)(encode)

    def __call__(self, media: Media) -> tuple[str, str]:
        with self._lock:
            mine = self._locks(media)
        with mine:
            return self._encoded(media)


def encode(media: Media) -> tuple[str, str]:
    if media.kind != "image":
        raise ImageError(f"{media.path or media.hash}: endpoints are sent images, and no {media.kind}")
    small = media.width * media.height <= media.max_pixels
    data = encoded(media)
    with Image.open(io.BytesIO(data)) as image:
        kind, size = image.format or "", image.size
        upright = image.getexif().get(ORIENTATION, 1) == 1
    if not (small and upright and kind in COMMON and size == (media.width, media.height)):
        kind, data = "PNG", _fitted(media)
    return f"image/{kind.lower()}", base64.b64encode(data).decode()


def _fitted(media: Media) -> bytes:
    image = Image.fromarray(decode(media))
    scale = math.sqrt(media.max_pixels / (media.width * media.height))
    if scale < 1:
        size = (max(1, int(media.width * scale)), max(1, int(media.height * scale)))
        image = image.resize(size, Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
