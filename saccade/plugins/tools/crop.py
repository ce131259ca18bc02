"""The zoom tool: turns a box in one of the episode's images into a reference to a new image.

Crops, also those of crops, are cut from the original image at full resolution and resized for the model
afterwards. This module decodes no pixels, and knows nothing of turns, tags or messages.

    >>> views = EpisodeImages(["a.png of 200x100"])
    >>> zoom({"bbox_2d": [0, 0, 0.5, 1], "source": "original_image"}, views, EnvConfig(), unit=28)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from saccade.config import EnvConfig
from saccade.media.images import MAX_ASPECT, crop, resized_size
from saccade.plugins.tools.calls import CallError
from saccade.types import Media

MARGIN = 0.05  # share of a side: a box that exceeds the image by less is clipped, by more refused
WHOLE = 0.95  # share of the source's area above which a crop counts as a no-op
ROUNDING = 1e-6  # pixels of tolerance for float errors: 0.7 · 10 is 7.000000000000001


class EpisodeImages:
    """The images of an episode by name. Only images that were shown are numbered as observations."""

    def __init__(self, media: Sequence[Media]) -> None:
        self.media: dict[str, Media] = {}
        self.lineage: dict[str, tuple[str, ...]] = {}
        self.aliases: dict[str, str] = {}
        self.shown = 0
        pictures = [m for m in media if m.kind == "image"]
        for number, picture in enumerate(pictures, 1):
            name = "original_image" if len(pictures) == 1 else f"original_image_{number}"
            self.media[name], self.lineage[name] = picture, ()
            self.aliases |= {f"original_image_{number}": name, f"image_{number}": name}
        if pictures:
            self.aliases["original_image"] = next(iter(self.media))

    def find(self, source: Any) -> str:
        """Resolve a source to the name of an image, as listed to the policy; raises CallError if it is unknown."""
        name = self.aliases.get(source, source) if isinstance(source, str) else None
        if name not in self.media:
            raise CallError("source", source=str(source)[:40], known=", ".join(self.media) or "no pictures at all")
        return name

    def add(self, media: Media, source: str | None = None) -> tuple[int, str]:
        """Add an image that the policy sees; returns (observation number, name)."""
        self.shown += 1
        name = f"observation_{self.shown}"
        self.media[name] = media
        self.lineage[name] = (*self.lineage[source], source) if source else ()
        return self.shown, name


def zoom(arguments: Mapping[str, Any], views: EpisodeImages, env: EnvConfig, unit: int) -> tuple[Media, dict[str, Any]]:
    """Returns (crop, facts about it for the record). `unit`: pixels per side of an image token, used for absolute
    coordinates.
    """
    source = views.find(arguments.get("source"))
    media = views.media[source]
    box = _fractions(arguments.get("bbox_2d"), _size(media, env.coordinates, unit))
    x0, y0, x1, y1 = edges = _pixels(box, media)
    width, height = x1 - x0, y1 - y0
    if min(width, height) < env.min_crop_px:
        raise CallError("too_small", width=width, height=height, least=env.min_crop_px)
    if max(width, height) >= MAX_ASPECT * min(width, height):
        raise CallError("aspect", width=width, height=height)
    made = replace(crop(media, edges), min_pixels=env.min_pixels, max_pixels=env.max_pixels)
    area = width * height / (media.width * media.height)
    return made, {
        "source": source,
        "box": [round(edge, 6) for edge in box],
        "pixels": list(made.box or ()),  # box in the original image
        "area": area,  # share of the source
        "noop": area > WHOLE,
    }


def _fractions(box: Any, size: tuple[float, float]) -> tuple[float, ...]:
    """The box as fractions (x0, y0, x1, y1) of the source, sorted and clipped."""
    if not isinstance(box, list) or len(box) != 4 or any(type(n) not in (int, float) for n in box):
        raise CallError("box")
    width, height = size
    x0, x1 = sorted((box[0] / width, box[2] / width))
    y0, y1 = sorted((box[1] / height, box[3] / height))
    if min(x0, y0) < -MARGIN or max(x1, y1) > 1 + MARGIN:
        raise CallError("outside", right=f"{width:g}", bottom=f"{height:g}")
    return tuple(min(1.0, max(0.0, edge)) for edge in (x0, y0, x1, y1))


def _pixels(box: Sequence[float], media: Media) -> tuple[int, int, int, int]:
    """The box in whole pixels, rounded outwards."""
    x0, y0 = (math.floor(edge * side + ROUNDING) for edge, side in zip(box, (media.width, media.height), strict=False))
    x1, y1 = (
        math.ceil(edge * side - ROUNDING) for edge, side in zip(box[2:], (media.width, media.height), strict=True)
    )
    return x0, y0, x1, y1


def _size(media: Media, coordinates: str, unit: int) -> tuple[float, float]:
    """(width, height) of an image in the coordinates that the policy writes."""
    if coordinates == "absolute":
        limits = {"min_pixels": media.min_pixels, "max_pixels": media.max_pixels}
        height, width = resized_size(media.width, media.height, unit=unit, **limits)
        return width, height
    return (1000, 1000) if coordinates == "milli" else (1, 1)
