"""Towers that see squares of one size: a picture is one of them, or several. One position axis, as
in text.

The squares of a picture are made once per (content, pixel budget). The tower and the projector are
run by the model's own `get_image_features`. Legend: N squares of all pictures, S their side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from saccade.errors import EnvironmentProblem
from saccade.media.images import ImageError
from saccade.media.kinds import KINDS
from saccade.media.pixel_cache import ImageCache
from saccade.models.families.pixels import CACHE_BYTES, CLIP_MEAN, CLIP_STD, normalised
from saccade.models.families.text import positions
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
        "axes": 1,
        "measure": partial(_measured, measure=measure),
        "positions": positions,
        "picture": _no_one_size,
        "untouched": _no_one_size,
        "cache": lambda media: kept,
        "media": partial(host_media, cache=kept),
        "features": partial(features, pixels=pixels),
        "vision": partial(forward_arguments, cache=kept, pixels=pixels),
        "unit": unit,
    }


def pair(size: Any) -> tuple[int, int]:
    """(height, width) of what a config spells as a number, two of them or a record."""
    if isinstance(size, Mapping):
        return int(size["height"]), int(size["width"])
    height, width = size if isinstance(size, Sequence) else (size, size)
    return int(height), int(width)


def _measured(
    media: Media, *, measure: Callable[[Media], tuple[tuple[int, int, int], int]]
) -> tuple[tuple[int, int, int], int]:
    if media.kind != "image":
        raise ImageError(
            f"this model sees images alone, but a row holds {KINDS[media.kind].article} "
            f"({media.path or media.hash[:12]})"
        )
    return measure(media)


def _no_one_size(*arguments: Any) -> NoReturn:
    raise AssertionError("engines that process pictures themselves are refused")


# -- tensors ---------------------------------------------------------------------------------------


def host_media(spans: Sequence[MediaSpan], *, cache: ImageCache) -> Mapping[str, Any]:
    """[N, 3, S, S] bytes."""
    import torch

    return {"squares": torch.from_numpy(np.concatenate(cache.get_all([s.media for s in spans])))}


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
    cache: ImageCache,
    pixels: Callable[[Tensor], Tensor],
) -> Mapping[str, Any]:
    """pixel_values [N, 3, S, S] of transformers' own forward; nothing for a batch of text."""
    if not spans:
        return {}
    squares = host_media(spans, cache=cache)["squares"]
    return {"pixel_values": pixels(squares.to(device)).to(dtype)}
