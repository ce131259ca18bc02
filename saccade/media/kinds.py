"""The kinds of media as a table: how rows name each, and which functions open and decode it.

A plugin adds a row (`registry.py`); whatever reads rows asks here, and no other file lists kinds.

    media = open_any("video", "clip.gif", {"fps": 2.0}, base=folder, limits=config.data)
    decode(media)    # whatever it is
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from saccade.config import DataConfig
from saccade.media import images
from saccade.media.media_files import DEFAULT_LIMITS
from saccade.registry import Table
from saccade.types import Media

SOURCE_KEYS = ("url", "path", "base64", "bytes")  # of a content item of any kind
PIXELS = ("min_pixels", "max_pixels")
PAIR = 2  # frames of a video that a model sees as one


@dataclass(frozen=True, kw_only=True)
class MediaKind:
    article: str  # "an image": what messages call one
    open: Callable[..., Media]  # (source, base=, limits=, **options)
    decode: Callable[..., np.ndarray]
    columns: tuple[str, ...]  # of a data set that hold it; the first is also the role of data.keys
    keys: tuple[str, ...]  # of a content item that hold it, before SOURCE_KEYS
    options: tuple[str, ...] = ()  # that a row may give beside the source
    is_one: Callable[[Any], bool] = lambda value: False  # whether a list is one medium, not several


IMAGE = MediaKind(
    article="an image",
    open=images.open_media,
    decode=images.decode,
    columns=("images", "image"),
    keys=("image", "image_url"),
    options=PIXELS,
)
KINDS: Table[MediaKind] = Table("media_kinds", {"image": IMAGE})


def open_any(
    kind: str, source: Any, options: Mapping[str, Any], *, base: Path | None = None, limits: DataConfig = DEFAULT_LIMITS
) -> Media:
    """A reference to the medium in `source`. Options that its kind does not have are left out."""
    read = {name: value for name, value in options.items() if name in KINDS[kind].options}
    return KINDS[kind].open(source, base=base, limits=limits, **read)


def decode(media: Media) -> np.ndarray:
    """Pixels of an image [height, width, 3], frames of a video, samples of a sound."""
    return KINDS[media.kind].decode(media)
