"""Image files: header, completeness, EXIF orientation, and pixels as RGB. Where the bytes come from does not
matter here.

    with open_image(data, "a.png") as image:
        upright_size(image, data, "a.png")
"""

import io
import re
from functools import cache

import numpy as np
from PIL import Image, UnidentifiedImageError

from saccade.errors import DataError

# `max_megapixels` is checked from the header before any pixel is decoded. Pillow's own limit only
# warns up to twice its value, and above that refuses images that the configuration allows.
Image.MAX_IMAGE_PIXELS = None

# A closed list: some of Pillow's other readers start external programs.
READABLE = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")

# First bytes of other kinds of files; audio is tested first.
OTHER_MEDIA = {
    "audio": re.compile(rb"RIFF.{4}WAVE|fLaC|OggS|ID3|\xff[\xf2-\xfb]|.{4}ftypM4A", re.DOTALL),
    "video": re.compile(rb"RIFF.{4}AVI |\x1aE\xdf\xa3|.{4}ftyp(?!avi|hei|mif)", re.DOTALL),
}

ENDS = {"PNG": b"IEND\xaeB`\x82", "JPEG": b"\xff\xd9", "MPO": b"\xff\xd9"}
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


@cache
def _readable() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in READABLE if name in Image.OPEN)


def open_image(data: bytes, name: str) -> Image.Image:
    if not data:
        raise ImageError(f"{name}: empty file")
    try:
        return Image.open(io.BytesIO(data), formats=_readable())
    except UnidentifiedImageError:
        kind = next((kind for kind, start in OTHER_MEDIA.items() if start.match(data)), None)
        hint = f" but {kind}, which belongs in {kind}s" if kind else f"; expected one of {', '.join(_readable())}"
        raise ImageError(f"{name}: not an image{hint}") from None
    except Exception as error:  # broken files make Pillow raise almost anything
        raise ImageError(f"{name}: damaged header: {error}") from None


def orientation(image: Image.Image, data: bytes, name: str) -> int:
    """The EXIF orientation still to be applied; Pillow already applies that of TIFF files."""
    if image.format == "TIFF" or (image.format == "PNG" and b"eXIf" not in data):
        return 1  # asking a PNG without EXIF would decode it in search of a late chunk
    try:
        return image.getexif().get(ORIENTATION, 1)
    except Exception as error:
        raise ImageError(f"{name}: damaged EXIF data: {error}") from None


def upright_size(image: Image.Image, data: bytes, name: str) -> tuple[int, int]:
    width, height = image.size
    return (height, width) if orientation(image, data, name) in (5, 6, 7, 8) else (width, height)


def is_complete(image: Image.Image, data: bytes) -> bool:
    """Whether a file is_complete with its format's end marker; formats without one count as complete."""
    if image.format == "WEBP":
        return len(data) >= 8 + int.from_bytes(data[4:8], "little")
    return data.rstrip(b"\0").endswith(ENDS.get(image.format or "", b""))


def upright_rgb(image: Image.Image, orientation: int) -> Image.Image:
    turn = UPRIGHT.get(orientation)
    return as_rgb(image) if turn is None else as_rgb(image).transpose(turn)


def as_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey: 65535 / 257 = 255
        grey = np.clip(np.asarray(image), 0, 65535).astype(np.int32)
        return Image.fromarray(((grey + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("floating-point pixels have no known range")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")
