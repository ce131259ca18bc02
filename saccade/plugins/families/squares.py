"""Towers that see squares of one size. One position axis, as in text.

InternVL: a picture is stretched over the grid of tiles that is most like it in shape, and shown once
more as a whole where that has several. Four patches are one token. The pixel budget of a picture
says how many tiles there may be, within what the model's processor allows. Its token stands between
a start and an end that the template does not write.

LLaVA 1.5: a picture is the square in its middle, or all of it where the processor pads or stretches;
every patch of it is a token. It has one size whatever the pixel budget says. Features are read from
a layer before the last: those behind it have no use and are not run.

The squares of a picture are made once per (content, pixel budget). The tower and the projector are
run by the model's own `get_image_features`. Legend: N squares of all pictures, S their side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from saccade.errors import EnvironmentProblem
from saccade.media.pixel_cache import DECODED, ImageCache
from saccade.models.families import FamilySpec
from saccade.models.families.qwen_vl import CACHE_BYTES, CLIP_MEAN, CLIP_STD, normalised, resized
from saccade.types import Media, MediaSpan

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BICUBIC = 3  # in numbers of Pillow


def bound(
    processor: Mapping[str, Any],
    *,
    measure: Callable[[Media], tuple[tuple[int, int, int], int]],
    cut: Callable[[Media], np.ndarray],
    unit: int,
) -> Mapping[str, Any]:
    """`measure`: a picture → (squares, rows and columns of patches in each) and its tokens; `cut`:
    its squares, [squares, S, S, 3] bytes.
    """
    resample = processor.get("resample", BICUBIC)
    if resample != BICUBIC:
        raise EnvironmentProblem(
            f"preprocessor_config.json: resample is {resample}, and pictures are resized with "
            f"{BICUBIC} (bicubic) here; set it to that if the model may be used so"
        )
    kept = ImageCache(
        CACHE_BYTES,
        make=lambda media: np.ascontiguousarray(cut(media).transpose(0, 3, 1, 2)),
        key=lambda media: media.key,
    )
    pixels = partial(
        normalised, mean=tuple(processor.get("image_mean", CLIP_MEAN)), std=tuple(processor.get("image_std", CLIP_STD))
    )
    return {
        "measure": measure,
        "cache": lambda media: kept,
        "media": partial(host_media, kept=kept),
        "features": partial(features, pixels=pixels),
        "vision": partial(forward_arguments, kept=kept, pixels=pixels),
        "unit": unit,
    }


def pair(size: Any) -> tuple[int, int]:
    """(height, width) of what a config spells as a number, two of them or a record."""
    if isinstance(size, Mapping):
        return int(size["height"]), int(size["width"])
    height, width = size if isinstance(size, Sequence) else (size, size)
    return int(height), int(width)


# -- tensors ---------------------------------------------------------------------------------------


def host_media(spans: Sequence[MediaSpan], *, kept: ImageCache) -> Mapping[str, Any]:
    """[N, 3, S, S] bytes."""
    import torch

    return {"squares": torch.from_numpy(np.concatenate(kept.get_all([s.media for s in spans])))}


def features(model: Any, media: Mapping[str, Any], *, pixels: Callable[[Tensor], Tensor]) -> Tensor:
    """[media tokens, hidden size] of what `host_media` made, once it is on the model's device."""
    import torch

    inner = model.base_model
    made = inner.get_image_features(pixels(media["squares"]).to(inner.dtype), return_dict=True)
    squares = made.pooler_output  # a tensor, or a list of those of each square
    return squares.flatten(0, 1) if isinstance(squares, torch.Tensor) else torch.cat(squares)


def forward_arguments(
    spans: Sequence[MediaSpan],
    device: torch.device,
    dtype: torch.dtype,
    *,
    kept: ImageCache,
    pixels: Callable[[Tensor], Tensor],
) -> Mapping[str, Any]:
    """pixel_values [N, 3, S, S] of transformers' own forward; nothing for a batch of text."""
    if not spans:
        return {}
    squares = host_media(spans, kept=kept)["squares"]
    return {"pixel_values": pixels(squares.to(device)).to(dtype)}


# -- InternVL --------------------------------------------------------------------------------------

MOST_TILES = 12  # of a processor that does not say
ALLOWED = "allowed_patches"  # in what a run saved: the limits that the model came with


def bind_internvl(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Mapping[str, Any]:
    vision = config["vision_config"]
    height, side = pair(processor.get("size") or vision.get("image_size", 448))
    patch = pair(vision.get("patch_size", 14))[1]
    merge = round(1 / config.get("downsample_ratio", 0.5))
    if height != side or side % (patch * merge):
        raise EnvironmentProblem(
            f"preprocessor_config.json: tiles of {side}x{height} pixels, and this family is known "
            f"with squares of a multiple of {patch * merge}; set size to 448x448"
        )
    usual = (processor.get("min_patches") or 1, processor.get("max_patches") or MOST_TILES)
    limits = tuple(processor.get(ALLOWED) or usual)
    grid = partial(grid_of, side=side, limits=limits)
    made = bound(
        processor,
        measure=partial(measure_tiles, grid=grid, patches=side // patch, merge=merge),
        cut=partial(cut_tiles, grid=grid, side=side),
        unit=patch * merge,
    )
    return {**made, "budget": partial(budget, side=side, limits=limits)}


def measure_tiles(media: Media, *, grid: Any, patches: int, merge: int) -> tuple[tuple[int, int, int], int]:
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


def cut_tiles(media: Media, *, grid: Any, side: int) -> np.ndarray:
    """[tiles, side, side, 3] row by row, the whole picture last."""
    columns, rows = grid(media)
    pixels = DECODED.get(media)
    canvas = resized(pixels, size=(columns * side, rows * side))
    tiles = canvas.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
    if len(tiles) == 1:
        return tiles
    return np.concatenate([tiles, resized(pixels, size=(side, side))[None]])


INTERNVL = FamilySpec(
    auto_class="AutoModelForImageTextToText",
    towers={
        "projector": ("model.multi_modal_projector.",),
        "vision": ("model.vision_tower.",),
        "llm": ("model.language_model.",),
    },
    bind=bind_internvl,
    placeholders=("image_token_id",),
    media_tokens={"image": "image_token_id"},
    brackets=("<img>", "</img>"),
    whole=False,
)


# -- LLaVA -----------------------------------------------------------------------------------------

# Tokens beside patches, by the type of a tower.
CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}


def bind_llava(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Mapping[str, Any]:
    vision = config["vision_config"]
    kind = vision.get("model_type", "clip_vision_model")
    if kind not in CLASS_TOKENS:
        raise EnvironmentProblem(
            f"config.json: a LLaVA with a vision tower of type {kind!r} is not known; use one with "
            f"{' or '.join(CLASS_TOKENS)}"
        )
    # What is as in a plain tower may be left out of a config.
    side = int(vision.get("image_size", 224))
    patch = int(vision.get("patch_size", 32 if kind.startswith("clip") else 16))
    dropped = config.get("vision_feature_select_strategy", "default") == "default"
    patches = side // patch
    _require_side(processor, side)
    return bound(
        processor,
        measure=partial(measure_whole, patches=patches, tokens=patches**2 + CLASS_TOKENS[kind] - dropped),
        cut=partial(cut_whole, side=side, stretched=_stretched(processor), padding=_padding(processor)),
        unit=patch,
    )


def measure_whole(media: Media, *, patches: int, tokens: int) -> tuple[tuple[int, int, int], int]:
    return (1, patches, patches), tokens


def cut_whole(media: Media, *, side: int, stretched: bool, padding: tuple[int, ...] | None) -> np.ndarray:
    """[1, side, side, 3]."""
    pixels = DECODED.get(media)
    if padding is not None:
        pixels = padded(pixels, padding)
    height, width = pixels.shape[:2]
    if stretched:
        return resized(pixels, size=(side, side))[None]
    wide, high = max(side, int(side * width / height)), max(side, int(side * height / width))
    left, top = (wide - side) // 2, (high - side) // 2
    return resized(pixels, size=(wide, high))[None, top : top + side, left : left + side]


def padded(pixels: np.ndarray, colour: tuple[int, ...]) -> np.ndarray:
    """In the middle of a square."""
    height, width = pixels.shape[:2]
    side = max(height, width)
    canvas = np.full((side, side, 3), colour, np.uint8)
    top, left = (side - height) // 2, (side - width) // 2
    canvas[top : top + height, left : left + width] = pixels
    return canvas


# -- what a processor says -------------------------------------------------------------------------


def _stretched(processor: Mapping[str, Any]) -> bool:
    size = processor.get("size", {})
    return isinstance(size, Mapping) and "height" in size


def _padding(processor: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The colour around a picture, as transformers rounds it."""
    kind = processor.get("image_processor_type", "")
    if not kind.startswith("LlavaImageProcessor") or not processor.get("do_pad"):
        return None
    return tuple(int(share * 255) for share in processor.get("image_mean", CLIP_MEAN))


def _require_side(processor: Mapping[str, Any], side: int) -> None:
    """A processor that does not say is taken to fit the tower."""
    given = {"size": processor.get("size", side)}
    if not _stretched(processor):
        given["crop_size"] = processor.get("crop_size", side)
    for name, size in given.items():
        edges = size.values() if isinstance(size, Mapping) else [size]
        if set(edges) != {side}:
            raise EnvironmentProblem(
                f"preprocessor_config.json: {name} is {size}, and the vision tower sees squares of "
                f"{side} pixels; set size and crop_size to that"
            )


# -- layers that are not read ----------------------------------------------------------------------


def layers_read(layers: int, chosen: int | list[int]) -> int:
    """How many layers run for the hidden states that are chosen, of which the first are no
    layer's.
    """
    all_chosen = [chosen] if isinstance(chosen, int) else chosen
    return max(index if index >= 0 else layers + 1 + index for index in all_chosen)


def skip_unread_layers(model: Any) -> None:
    """Their weights stay, for whoever loads what is saved; so do those of a pooling head."""
    tower = model.base_model.vision_tower
    layers = list(tower.encoder.layers)
    unread = layers[layers_read(len(layers), model.config.vision_feature_layer) :]
    for part in (*unread, *([tower.head] if hasattr(tower, "head") else [])):
        kind: Any = type(part)
        part.__class__ = _unread(kind)


@cache
def _unread(kind: Any) -> type:
    def forward(self: Any, hidden_states: Any, *arguments: Any, **options: Any) -> Any:
        return hidden_states

    return type(f"Unread{kind.__name__}", (kind,), {"forward": forward, "unread": True})


LLAVA = replace(
    INTERNVL,
    bind=bind_llava,
    placeholders=("image_token_index",),
    media_tokens={"image": "image_token_index"},
    brackets=None,
    prepare=skip_unread_layers,
)
