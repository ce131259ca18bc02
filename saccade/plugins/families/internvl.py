"""InternVL: a picture is stretched over the grid of tiles that is most like it in shape, and shown
once more as a whole where that has several. Four patches are one token.

The pixel budget of a picture says how many tiles there may be, within what the model's processor
allows. Its token stands between a start and an end that the template does not write.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np

from saccade.errors import EnvironmentProblem
from saccade.media.pixel_cache import DECODED
from saccade.models.families import FamilySpec
from saccade.models.families.pixels import resized
from saccade.plugins.families import squares
from saccade.types import Media

MOST_TILES = 12  # of a processor that does not say
ALLOWED = "allowed_patches"  # in what a run saved: the limits that the model came with


def bind(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Mapping[str, Any]:
    vision = config["vision_config"]
    height, side = squares.pair(processor.get("size") or vision.get("image_size", 448))
    patch = squares.pair(vision.get("patch_size", 14))[1]
    merge = round(1 / config.get("downsample_ratio", 0.5))
    if height != side or side % (patch * merge):
        raise EnvironmentProblem(
            f"preprocessor_config.json: tiles of {side}x{height} pixels, and this family is known "
            f"with squares of a multiple of {patch * merge}; set size to 448x448"
        )
    usual = (processor.get("min_patches") or 1, processor.get("max_patches") or MOST_TILES)
    limits = tuple(processor.get(ALLOWED) or usual)
    grid = partial(grid_of, side=side, limits=limits)
    bound = squares.bound(
        processor,
        measure=partial(measure, grid=grid, patches=side // patch, merge=merge),
        cut=partial(cut, grid=grid, side=side),
        unit=patch * merge,
    )
    return {**bound, "budget": partial(budget, side=side, limits=limits)}


def measure(media: Media, *, grid: Any, patches: int, merge: int) -> tuple[tuple[int, int, int], int]:
    """Tiles with their patches, and placeholder count, from the header alone."""
    columns, rows = grid(media)
    tiles = columns * rows + (columns * rows > 1)
    return (tiles, patches, patches), tiles * (patches // merge) ** 2


def grid_of(media: Media, *, side: int, limits: tuple[int, int]) -> tuple[int, int]:
    """(columns, rows) of tiles."""
    least, most = tiles_within(media.min_pixels, media.max_pixels, side=side, limits=limits)
    return best_grid(media.width, media.height, side, least, most)


def tiles_within(low: int, high: int, *, side: int, limits: tuple[int, int]) -> tuple[int, int]:
    """They have min_pixels to max_pixels together, what is shown of the whole apart; one tile is
    always allowed.
    """
    most = min(limits[1], max(1, high // side**2))
    return min(most, max(limits[0], -(-low // side**2))), most


def budget(low: int, high: int, *, side: int, limits: tuple[int, int]) -> Mapping[str, Any]:
    """What the model allows is kept, so that a later run may show more again."""
    least, most = tiles_within(low, high, side=side, limits=limits)
    return {"min_patches": least, "max_patches": most, ALLOWED: list(limits)}


@lru_cache(maxsize=16_384)
def best_grid(width: int, height: int, side: int, least: int, most: int) -> tuple[int, int]:
    """The grid whose shape is nearest; among equal ones the largest that has less than twice the
    pixels of the picture.
    """
    sizes = range(1, most + 1)
    grids = [(c, r) for c in sizes for r in sizes if least <= c * r <= most]
    best, nearest = (1, 1), float("inf")
    for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        distance = abs(width / height - columns / rows)
        larger = width * height > 0.5 * side**2 * columns * rows
        if distance < nearest or (distance == nearest and larger):
            best, nearest = (columns, rows), distance
    return best


def cut(media: Media, *, grid: Any, side: int) -> np.ndarray:
    """[tiles, side, side, 3] row by row, the whole picture last."""
    columns, rows = grid(media)
    pixels = DECODED.get(media)
    canvas = resized(pixels, size=(columns * side, rows * side))
    tiles = canvas.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
    if len(tiles) == 1:
        return tiles
    return np.concatenate([tiles, resized(pixels, size=(side, side))[None]])


SPEC = FamilySpec(
    auto_class="AutoModelForImageTextToText",
    towers={
        "projector": ("model.multi_modal_projector.",),
        "vision": ("model.vision_tower.",),
        "llm": ("model.language_model.",),
    },
    bind=bind,
    placeholders=("image_token_id",),
    media_tokens={"image": "image_token_id"},
    brackets=("<img>", "</img>"),
    whole=False,
)
