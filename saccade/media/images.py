"""Images as references: find them, check them from their header, decode them, crop them.

`open_media` takes every kind of source that a data set may hold and returns a `Media`: hash, upright size, location of
the encoded file. Only `decode` decodes pixels, so a bad file is refused before it costs memory. `resized_size` is the
arithmetic that engine and trainer share; the resizing itself is done by the model family.

    >>> resized_size(640, 480, unit=28, min_pixels=3136, max_pixels=1_003_520)
    (476, 644)
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from saccade.config import DataConfig
from saccade.media.blob_file import encoded
from saccade.media.image_files import ImageError, is_complete, open_image, orientation, upright_rgb, upright_size
from saccade.media.media_files import DEFAULT_LIMITS, make_media, read
from saccade.types import Media, root_hash

MAX_ASPECT = 200


def open_media(
    source: Any,
    *,
    base: Path | None = None,
    limits: DataConfig = DEFAULT_LIMITS,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
) -> Media:
    """A reference to the image in `source`; relative paths start from `base`."""
    file = read(source, base, limits)
    name, data, _ = file
    with open_image(data, name) as image:
        millions = image.width * image.height / 1e6
        if millions > limits.max_megapixels:
            seen = f"{image.width}x{image.height} is {millions:.0f} megapixels"
            raise ImageError(f"{name}: {seen}, data.max_megapixels is {limits.max_megapixels:g}")
        width, height = upright_size(image, data, name)
        complete = is_complete(image, data)
    size = _padded_size(width, height)
    if size != (width, height) and limits.aspect == "reject":
        raise ImageError(f"{name}: {width}x{height} is longer than {MAX_ASPECT}:1; data.aspect=pad accepts it")
    low, high = min_pixels or limits.min_pixels, max_pixels or limits.max_pixels
    if low > high:
        raise ImageError(f"{name}: min_pixels {low} is above max_pixels {high}")
    media = make_media(file, width=size[0], height=size[1], min_pixels=low, max_pixels=high)
    if not complete:  # rare, so let the decoder say whether pixels are missing
        decode(media)
    return media


def decode(media: Media) -> np.ndarray:
    """Upright RGB pixels, uint8 [height, width, 3]: first frame, alpha on white, box cut out."""
    name = media.path or f"image {media.hash[:12]}"
    data = encoded(media)
    with open_image(data, name) as image:
        size = _padded_size(*upright_size(image, data, name))
        try:
            if image.format == "PNG":  # Pillow decodes it even if a checksum is wrong
                open_image(data, name).verify()
            rgb = upright_rgb(image, orientation(image, data, name))
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


def crop(media: Media, box: tuple[int, int, int, int]) -> Media:
    """A reference to the part inside `box`: x0, y0, x1, y1 in pixels of `media`."""
    x0, y0, x1, y1 = (int(value) for value in box)
    if not (0 <= x0 < x1 <= media.width and 0 <= y0 < y1 <= media.height):
        raise ImageError(f"box {(x0, y0, x1, y1)} is empty or leaves the image of {media.width}x{media.height}")
    width, height = x1 - x0, y1 - y0
    if _padded_size(width, height) != (width, height):
        raise ImageError(f"box {(x0, y0, x1, y1)} has an aspect ratio above {MAX_ASPECT}")
    left, top = media.box[:2] if media.box else (0, 0)
    inside = (left + x0, top + y0, left + x1, top + y1)
    name = f"{root_hash(media.hash, media.box)}-{'.'.join(map(str, inside))}"
    return replace(media, hash=name, width=width, height=height, box=inside, parent=media.hash)


def resized_size(width: int, height: int, *, unit: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """(height, width) that the model sees: multiples of `unit` within the pixel budget."""
    rows, columns = (max(unit, round(side / unit) * unit) for side in (height, width))
    if rows * columns > max_pixels:
        shrink = math.sqrt(width * height / max_pixels)
        rows, columns = (max(unit, math.floor(side / shrink / unit) * unit) for side in (height, width))
    elif rows * columns < min_pixels:
        grow = math.sqrt(min_pixels / (width * height))
        rows, columns = (math.ceil(side * grow / unit) * unit for side in (height, width))
    return rows, columns


def _padded_size(width: int, height: int) -> tuple[int, int]:
    return max(width, -(-height // MAX_ASPECT)), max(height, -(-width // MAX_ASPECT))
