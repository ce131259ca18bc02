"""Towers that see squares of one size. One position axis, as in text.

InternVL: an image is stretched over the grid of tiles that is most like it in shape, and shown once
more as a whole where that has several. Four patches are one token. The pixel budget of an image
says how many tiles there may be, within what the model's processor allows. Its token stands between
a start and an end that the template does not write.

LLaVA 1.5: an image is the square in its middle, or all of it where the processor pads or stretches;
every patch of it is a token. It has one size whatever the pixel budget says. Features are read from
a layer before the last: those behind it have no use and are not run.

The squares of an image are made once per (content, pixel budget). The tower and the projector are
run by the model's own `get_image_features`. Legend: N squares of all images, S their side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from saccade.errors import EnvironmentProblem
from saccade.media.pixel_cache import DECODED, ImageCache
from saccade.models.chat import Measure
from saccade.models.families import FamilySpec
from saccade.models.families.qwen_vl import CACHE_BYTES, CLIP_MEAN, CLIP_STD, normalised, resized
from saccade.types import Media, MediaSpan

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BICUBIC = 3  # in numbers of Pillow


def bound(
    processor: Mapping[str, Any], *, measure: Measure, cut: Callable[[Media], np.ndarray], unit: int
) -> Mapping[str, Any]:
    """`measure`: an image → (squares, rows and columns of patches in each) and its tokens; `cut`:
    its squares, [squares, S, S, 3] bytes.
    """
    if (resample := processor.get("resample", BICUBIC)) != BICUBIC:
        why = f"resample is {resample}, and images are resized with {BICUBIC} (bicubic) here"
        raise EnvironmentProblem(f"preprocessor_config.json: {why}; set it to that if the model may be used so")
    mean, std = tuple(processor.get("image_mean", CLIP_MEAN)), tuple(processor.get("image_std", CLIP_STD))
    tiles = ImageCache(CACHE_BYTES, make=lambda media: np.ascontiguousarray(cut(media).transpose(0, 3, 1, 2)))

    def host_media(spans: Sequence[MediaSpan]) -> Mapping[str, Tensor]:
        """[N, 3, S, S] bytes."""
        import torch

        return {"squares": torch.from_numpy(np.concatenate(tiles.get_all([s.media for s in spans])))}

    def features(model: Any, media: Mapping[str, Tensor]) -> Tensor:
        """[media tokens, hidden size] of what `host_media` made, once it is on the model's device."""
        import torch

        inner = model.base_model
        pixels = normalised(media["squares"], mean, std).to(inner.dtype)
        squares = inner.get_image_features(pixels, return_dict=True).pooler_output  # a tensor, or one for each square
        return squares.flatten(0, 1) if isinstance(squares, torch.Tensor) else torch.cat(squares)

    def arguments(spans: Sequence[MediaSpan], device: torch.device, dtype: torch.dtype) -> Mapping[str, Tensor]:
        """pixel_values [N, 3, S, S] of transformers' own forward; nothing for a batch of text."""
        if not spans:
            return {}
        return {"pixel_values": normalised(host_media(spans)["squares"].to(device), mean, std).to(dtype)}

    return {
        "measure": measure,
        "picture": DECODED.get,  # which the processor of another engine cuts
        "cache": lambda media: tiles,
        "media": host_media,
        "features": features,
        "vision": arguments,
        "unit": unit,
    }


def pair(size: Any) -> tuple[int, int]:
    """(height, width) of what a config spells as a number, two of them or a record."""
    if isinstance(size, Mapping):
        size = (size["height"], size["width"])
    height, width = size if isinstance(size, Sequence) else (size, size)
    return int(height), int(width)


# -- InternVL --------------------------------------------------------------------------------------

MOST_TILES = 12  # of a processor that does not say
ALLOWED = "allowed_patches"  # in what a run saved: the limits that the model came with


def bind_internvl(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Mapping[str, Any]:
    vision = config["vision_config"]
    height, side = pair(processor.get("size") or vision.get("image_size", 448))
    patch = pair(vision.get("patch_size", 14))[1]
    unit = patch * round(1 / config.get("downsample_ratio", 0.5))
    if height != side or side % unit:
        why = f"tiles of {side}x{height} pixels, and this family has squares of a multiple of {unit}"
        raise EnvironmentProblem(f"preprocessor_config.json: {why}; set size to 448x448")
    usual = (processor.get("min_patches") or 1, processor.get("max_patches") or MOST_TILES)
    fewest, largest = processor.get(ALLOWED) or usual

    def tiles_within(low: int, high: int) -> tuple[int, int]:
        """They have min_pixels to max_pixels together, what is shown of the whole apart; one tile is
        always allowed.
        """
        most = min(largest, max(1, high // side**2))
        return min(most, max(fewest, -(-low // side**2))), most

    def grid(media: Media) -> tuple[int, int]:
        """(columns, rows) of tiles."""
        from transformers.models.got_ocr2 import image_processing_pil_got_ocr2 as theirs

        limits = tiles_within(media.min_pixels, media.max_pixels)
        return theirs.get_optimal_tiled_canvas((media.height, media.width), (side, side), *limits)

    def measure(media: Media) -> tuple[tuple[int, int, int], int]:
        """Tiles with their patches, and placeholder count, from the header alone."""
        columns, rows = grid(media)
        tiles = columns * rows + (columns * rows > 1)
        return (tiles, side // patch, side // patch), tiles * (side // unit) ** 2

    def cut(media: Media) -> np.ndarray:
        """[tiles, side, side, 3] row by row, the whole image last."""
        columns, rows = grid(media)
        pixels = DECODED.get(media)
        canvas = resized(pixels, size=(columns * side, rows * side))
        tiles = canvas.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
        return tiles if len(tiles) == 1 else np.concatenate([tiles, resized(pixels, size=(side, side))[None]])

    def budget(low: int, high: int) -> Mapping[str, Any]:
        """What the model allows is kept, so that a later run may show more again."""
        least, most = tiles_within(low, high)
        return {"min_patches": least, "max_patches": most, ALLOWED: [fewest, largest]}

    return {**bound(processor, measure=measure, cut=cut, unit=unit), "budget": budget}


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
        why = f"a LLaVA with a vision tower of type {kind!r} is not supported"
        other = f"use one with {' or '.join(CLASS_TOKENS)}, or model.family=generic"
        raise EnvironmentProblem(f"config.json: {why}; {other}")
    # What is as in a plain tower may be left out of a config.
    side = int(vision.get("image_size", 224))
    patch = int(vision.get("patch_size", 32 if kind.startswith("clip") else 16))
    dropped = config.get("vision_feature_select_strategy", "default") == "default"
    patches = side // patch
    measured = (1, patches, patches), patches**2 + CLASS_TOKENS[kind] - dropped
    size = processor.get("size", side)  # a processor that does not say is taken to fit the tower
    stretched = isinstance(size, Mapping) and "height" in size
    for name, given in (("size", size), ("crop_size", side if stretched else processor.get("crop_size", side))):
        if set(given.values() if isinstance(given, Mapping) else [given]) != {side}:
            why = f"{name} is {given}, and the vision tower sees squares of {side} pixels"
            raise EnvironmentProblem(f"preprocessor_config.json: {why}; set size and crop_size to that")
    pads = processor.get("image_processor_type", "").startswith("LlavaImageProcessor") and processor.get("do_pad")
    colour = [int(share * 255) for share in processor.get("image_mean", CLIP_MEAN)]  # as transformers rounds it

    def cut(media: Media) -> np.ndarray:
        """[1, side, side, 3]."""
        pixels = padded(DECODED.get(media), colour) if pads else DECODED.get(media)
        if stretched:
            return resized(pixels, size=(side, side))[None]
        height, width = pixels.shape[:2]
        wide, high = max(side, int(side * width / height)), max(side, int(side * height / width))
        left, top = (wide - side) // 2, (high - side) // 2
        return resized(pixels, size=(wide, high))[None, top : top + side, left : left + side]

    found = bound(processor, measure=lambda media: measured, cut=cut, unit=patch)
    return {**found, "picture": lambda media: cut(media)[0]}


def padded(pixels: np.ndarray, colour: Sequence[int]) -> np.ndarray:
    """In the middle of a square."""
    height, width = pixels.shape[:2]
    side = max(height, width)
    canvas = np.full((side, side, 3), colour, np.uint8)
    top, left = (side - height) // 2, (side - width) // 2
    canvas[top : top + height, left : left + width] = pixels
    return canvas


def skip_unread_layers(model: Any) -> None:
    """Layers behind those that the config reads features from are not run, nor is a pooling head.
    Their weights are kept and saved.
    """
    tower, chosen = model.base_model.vision_tower, model.config.vision_feature_layer
    layers = list(tower.encoder.layers)
    # Of the hidden states that are chosen from, the first are no layer's.
    states = [chosen] if isinstance(chosen, int) else chosen
    read = max(index if index >= 0 else len(layers) + 1 + index for index in states)
    for part in (*layers[read:], *([tower.head] if hasattr(tower, "head") else [])):
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
