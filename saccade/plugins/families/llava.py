"""LLaVA 1.5: a picture is the square in its middle, or all of it where the processor pads or
stretches; every patch of it is a token.

It has one size whatever the pixel budget says. Features are read from a layer before the last:
those behind it have no use and are not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from saccade.errors import EnvironmentProblem
from saccade.media.pixel_cache import DECODED
from saccade.models.families.pixels import CLIP_MEAN, resized
from saccade.plugins.families import internvl, squares
from saccade.types import Media

# Tokens beside patches, by the type of a tower.
CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}


def bind(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Mapping[str, Any]:
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
    return squares.bound(
        processor,
        measure=partial(measure, patches=patches, tokens=patches**2 + CLASS_TOKENS[kind] - dropped),
        cut=partial(cut, side=side, stretched=_stretched(processor), padding=_padding(processor)),
        unit=patch,
    )


def measure(media: Media, *, patches: int, tokens: int) -> tuple[tuple[int, int, int], int]:
    return (1, patches, patches), tokens


def cut(media: Media, *, side: int, stretched: bool, padding: tuple[int, ...] | None) -> np.ndarray:
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


SPEC = replace(
    internvl.SPEC,
    bind=bind,
    placeholders=("image_token_index",),
    media_tokens={"image": "image_token_index"},
    brackets=None,
    prepare=skip_unread_layers,
)
