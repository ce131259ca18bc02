"""Qwen2-VL and Qwen2.5-VL: grids of patches, three position axes, one placeholder token per merged
patch.

An image becomes patches once per (content, pixel budget): they are kept as bytes and normalised on
the device, so the engine and the trainer read the same pixels. Legend: P patch side, M merge side,
N patches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

from saccade.images import DECODED, resized_size
from saccade.types import Media, MediaSpan

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
# Patches kept in memory: about 1,700 images of a megapixel, or every image of a small task.
CACHE_BYTES = 2 << 30


def bind(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Mapping[str, Any]:
    vision = config["vision_config"]
    patch, merge = int(vision.get("patch_size", 14)), int(vision.get("spatial_merge_size", 2))
    mean = processor.get("image_mean", CLIP_MEAN)
    std = processor.get("image_std", CLIP_STD)
    return {
        "axes": 3,
        "measure": partial(measure, patch=patch, merge=merge),
        "positions": partial(positions, merge=merge),
        "vision": _pixels(patch, merge, int(vision.get("temporal_patch_size", 2)), mean, std),
    }


def measure(media: Media, *, patch: int, merge: int) -> tuple[tuple[int, int, int], int]:
    """Grid and placeholder count from the header alone."""
    height, width = resized_size(
        media.width,
        media.height,
        unit=patch * merge,
        min_pixels=media.min_pixels,
        max_pixels=media.max_pixels,
    )
    rows, columns = height // patch, width // patch
    return (1, rows, columns), rows * columns // merge**2


def positions(length: int, media: tuple[MediaSpan, ...], *, merge: int) -> np.ndarray:
    """[3, length] M-RoPE: text counts on all axes at once, a medium on (time, row, column) from
    where it starts.
    """
    result = np.empty((3, length), dtype=np.int64)
    token, place = 0, 0
    for span in media:
        result[:, token : span.start] = np.arange(place, place + span.start - token)
        place += span.start - token
        frames, rows, columns = span.grid[0], span.grid[1] // merge, span.grid[2] // merge
        result[:, span.start : span.end] = (
            np.indices((frames, rows, columns)).reshape(3, -1) + place
        )
        place += max(rows, columns)
        token = span.end
    result[:, token:] = np.arange(place, place + length - token)
    return result


def patches(media: Media, grid: tuple[int, int, int], *, patch: int, merge: int) -> np.ndarray:
    """[N, 3, P, P] uint8 in the order of the tower: merge blocks row by row, patches row by row
    inside a block.
    """
    _, rows, columns = grid
    pixels = DECODED.get(media)
    if pixels.shape[:2] != (rows * patch, columns * patch):
        size = (columns * patch, rows * patch)
        pixels = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))
    blocks = pixels.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
    return np.ascontiguousarray(blocks.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(-1, 3, patch, patch)


def _pixels(
    patch: int, merge: int, frames: int, mean: Sequence[float], std: Sequence[float]
) -> Callable[..., Mapping[str, Any]]:
    cache: OrderedDict[Any, np.ndarray] = OrderedDict()
    used = 0

    def cached(span: MediaSpan) -> np.ndarray:
        nonlocal used
        key = span.media.key
        if key in cache:
            cache.move_to_end(key)
            return cache[key]
        made = cache[key] = patches(span.media, span.grid, patch=patch, merge=merge)
        used += made.nbytes
        while used > CACHE_BYTES and len(cache) > 1:
            used -= cache.popitem(last=False)[1].nbytes
        return made

    def vision(spans: Sequence[MediaSpan], device: Any, dtype: Any) -> Mapping[str, Any]:
        """pixel_values [N, 3·frames·P·P] and image_grid_thw [images, 3]; nothing for a batch of
        text.
        """
        import torch

        if not spans:
            return {}
        flat = torch.from_numpy(np.concatenate([cached(span) for span in spans])).to(device)
        centre = torch.tensor(mean, device=device).view(1, 3, 1, 1)
        spread = torch.tensor(std, device=device).view(1, 3, 1, 1)
        values = (flat.float() * (1 / 255) - centre) / spread
        values = values[:, :, None].expand(-1, -1, frames, -1, -1).reshape(len(flat), -1)
        grids = torch.tensor([span.grid for span in spans], device=device)
        return {"pixel_values": values.to(dtype), "image_grid_thw": grids}

    return vision


def patch_embedding_as_matrix(model: Any) -> None:
    """A convolution whose stride is its kernel is one matrix product, and several times slower as a
    Conv3d.
    """
    import torch

    class PatchMatrix(torch.nn.Conv3d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            flat = torch.nn.functional.linear(input.flatten(1), self.weight.flatten(1), self.bias)
            return flat.view(*flat.shape, 1, 1, 1)

    model.model.visual.patch_embed.proj.__class__ = PatchMatrix
