"""The table of media kinds: how rows name each, and which functions open and decode it.

Plugins add rows (`registry.py`); no other file lists the kinds.

    media = open_any("video", "clip.gif", {"fps": 2.0}, base=folder, limits=config.data)
    decode(media)    # of any kind
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

SOURCE_KEYS = ("url", "path", "base64", "bytes")  # keys of a content item of any kind
PIXELS = ("min_pixels", "max_pixels")
PAIR = 2  # video frames that a model merges into one


@dataclass(frozen=True, kw_only=True)
class MediaKind:
    article: str  # "an image": what messages call one
    open: Callable[..., Media]  # (source, base=, limits=, **options)
    decode: Callable[..., np.ndarray]
    columns: tuple[str, ...]  # data set columns that hold it; the first is also its role in data.keys
    keys: tuple[str, ...]  # content item keys that hold it, tried before SOURCE_KEYS
    options: tuple[str, ...] = ()  # settings that a row may give with the source
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
    """Pixels of an image [height, width, 3], frames of a video, or samples of audio."""
    return KINDS[media.kind].decode(media)
