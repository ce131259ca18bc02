"""Qwen2-VL and Qwen2.5-VL: patch grids, three position axes, one placeholder token per merged patch. Two video frames
form one temporal layer of the grid; an image is one layer.

Patches are computed once per (content, pixel budget), cached as bytes and normalised on the device, so engine and
trainer read the same pixels. Legend: P patch side, M merge side, N patches, F frames per patch (1 for an image, which
`pixels` repeats).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from saccade.media.images import resized_size
from saccade.media.kinds import KINDS
from saccade.media.pixel_cache import DECODED, ImageCache
from saccade.types import Media, MediaSpan

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
# Size of the patch cache: about 1,700 images of a megapixel, or every image of a small task.
CACHE_BYTES = 2 << 30
Clock = Callable[[np.ndarray, float], np.ndarray]  # (temporal layers, frames per second) → temporal positions


def bind(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Mapping[str, Any]:
    tower = Tower(config["vision_config"], processor)
    area = tower.unit**2
    return {
        "axes": 3,
        "measure": tower.measure,
        "positions": partial(positions, merge=tower.merge, clock=tower.clock if tower.newer else None),
        "picture": tower.picture,
        "untouched": lambda tokens, most: _edges(area, min(tokens * area, most)),
        "cache": lambda media: tower.kept,
        # Older versions of transformers read the last two.
        "budget": lambda low, high: {"size": _edges(low, high), "min_pixels": low, "max_pixels": high},
        "media": tower.host_media,
        "features": tower.features,
        "vision": tower.arguments,
        "unit": tower.unit,
    }


def _edges(least: int, most: int) -> dict[str, int]:
    return {"shortest_edge": least, "longest_edge": most}


class Tower:
    """Preprocessing for the vision tower of one model, with a cache of patches."""

    def __init__(self, vision: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        self.patch, self.merge = int(vision.get("patch_size", 14)), int(vision.get("spatial_merge_size", 2))
        self.frames, self.unit = int(vision.get("temporal_patch_size", 2)), self.patch * self.merge
        self.newer = "fullatt_block_indexes" in vision  # Qwen2.5-VL: window attention, temporal positions in real time
        self.window, self.pace = vision.get("window_size", 112), self.frames * vision.get("tokens_per_second", 4)
        self.table = vision.get("num_position_embeddings")  # Qwen3-VL: learned positions of a square grid
        self.mean, self.std = tuple(processor.get("image_mean", CLIP_MEAN)), tuple(processor.get("image_std", CLIP_STD))
        # `make` is bound to a copy without a cache: a reference cycle would keep old patches in memory.
        self.kept = ImageCache(CACHE_BYTES, make=copy(self).patches)

    def measure(self, media: Media) -> tuple[tuple[int, int, int], int]:
        """Grid and number of placeholder tokens, without decoding the image."""
        budget = {"min_pixels": media.min_pixels, "max_pixels": media.max_pixels}
        height, width = resized_size(media.width, media.height, unit=self.unit, **budget)
        layers = max(1, len(media.frames) // self.frames)
        return (layers, height // self.patch, width // self.patch), layers * height * width // self.unit**2

    def picture(self, media: Media) -> np.ndarray:
        """uint8 [rows · P, columns · P, 3]; of a video with a leading frame axis."""
        _, rows, columns = self.measure(media)[0]
        resize = partial(resized, size=(columns * self.patch, rows * self.patch))
        return KINDS["video"].decode(media, resize) if media.kind == "video" else resize(DECODED.get(media))

    def patches(self, media: Media) -> np.ndarray:
        """uint8 [N, 3, F, P, P] in the order of the tower: by temporal layer, then merge blocks row by row, then
        patches row by row inside a block.
        """
        pixels, side, merge = self.picture(media), self.patch, self.merge
        film = pixels[None, None] if pixels.ndim == 3 else pixels.reshape(-1, self.frames, *pixels.shape[1:])
        layers, inside, rows, columns = *film.shape[:2], film.shape[2] // side, film.shape[3] // side
        blocks = film.reshape(layers, inside, rows // merge, merge, side, columns // merge, merge, side, 3)
        ordered = np.ascontiguousarray(blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7))
        return ordered.reshape(-1, 3, inside, side, side)

    def all_patches(self, spans: Sequence[MediaSpan]) -> Tensor:
        """[N, 3, F, P, P]. In a batch with videos, images are repeated F times here, otherwise on the device."""
        import torch

        made = self.kept.get_all([span.media for span in spans])
        inside = max(each.shape[2] for each in made)
        same = [np.broadcast_to(each, (*each.shape[:2], inside, *each.shape[3:])) for each in made]
        return torch.from_numpy(np.concatenate(same))

    def clock(self, layers: np.ndarray, fps: float) -> np.ndarray:
        return layers.astype(np.float32) * np.float32(self.pace / fps)  # fp32, as in transformers

    def pixels(self, flat: Tensor, dtype: torch.dtype) -> Tensor:
        """[N, 3, F, P, P] bytes → [N, 3·frames·P·P] normalised."""
        values = normalised(flat, self.mean, self.std).expand(-1, -1, self.frames, -1, -1)
        return values.reshape(len(flat), -1).to(dtype)

    def host_media(self, spans: Sequence[MediaSpan]) -> Mapping[str, Any]:
        """Patches, and the window and segment indices that the tower would otherwise compute with a device-to-host
        sync: host tensors and numbers.
        """
        import torch
        from transformers import vision_utils

        grids = torch.tensor([span.grid for span in spans])
        segments = vision_utils.get_vision_cu_seqlens(grids)
        made = {
            "patches": self.all_patches(spans),
            "grid_thw": grids,
            "position_ids": vision_utils.get_vision_position_ids(grids, self.merge),
            "cu_seqlens": segments,
            "max_seqlen": int(segments.diff().max()),
        }
        if self.newer:
            sizes = {"spatial_merge_size": self.merge, "window_size": self.window, "patch_size": self.patch}
            order, windows = vision_utils.get_vision_window_index(grids, **sizes)
            longest = int(windows.diff().max())
            made |= {"window_index": order, "cu_window_seqlens": windows, "max_window_seqlen": longest}
        if self.table:
            places, weights = vision_utils.get_vision_interpolation_indices_and_weights(
                grids, num_grid_per_side=int(self.table**0.5), align_corners=True, spatial_merge_size=self.merge
            )
            made |= {"interp_indices": places, "interp_weights": weights}
        return made

    def features(self, model: Any, media: Mapping[str, Any]) -> Tensor:
        """Features [media tokens, hidden size] of the output of `host_media`, moved to the model's device. For
        Qwen3-VL each row is followed by the deepstack features that the first decoder layers add.
        """
        import torch

        tower = model.base_model.visual
        options = {name: value for name, value in media.items() if name != "patches"}
        output = tower(self.pixels(media["patches"], tower.dtype), **options)
        deeper = getattr(output, "deepstack_features", None)
        return torch.cat([output.pooler_output, *deeper], 1) if deeper else output.pooler_output

    def arguments(self, spans: Sequence[MediaSpan], device: torch.device, dtype: torch.dtype) -> Mapping[str, Any]:
        """Pixel and grid [media, 3] arguments of transformers' own forward, for images and videos; empty for a
        batch of text.
        """
        import torch

        made: dict[str, Any] = {}
        for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            shown = [span for span in spans if span.media.kind == kind]
            if shown:
                made[name] = self.pixels(self.all_patches(shown).to(device), dtype)
                made[f"{kind}_grid_thw"] = torch.tensor([span.grid for span in shown], device=device)
        if self.newer and "video_grid_thw" in made:
            seconds = [self.frames / span.media.fps for span in spans if span.media.kind == "video"]
            made["second_per_grid_ts"] = torch.tensor(seconds, device=device)
        return made


def positions(ids: np.ndarray, media: tuple[MediaSpan, ...], *, merge: int, clock: Clock | None) -> np.ndarray:
    """M-RoPE positions [3, tokens]: text and audio advance all axes together, an image or video counts (time, row,
    column) from its start, and the next text continues after the largest of them. `clock` gives the temporal positions
    of video layers; None: one step apart.
    """
    result = np.empty((3, len(ids)), dtype=np.int64)
    token, place = 0, 0
    for span in media:
        if span.media.kind == "audio":
            continue
        result[:, token : span.start] = np.arange(place, place + span.start - token)
        place += span.start - token
        layers, rows, columns = span.grid[0], span.grid[1] // merge, span.grid[2] // merge
        axes = np.indices((layers, rows, columns)).reshape(3, -1)
        if span.media.kind == "video" and clock is not None:
            axes[0] = clock(axes[0], span.media.fps)
        result[:, span.start : span.end] = axes + place
        place += int(axes.max()) + 1
        token = span.end
    result[:, token:] = np.arange(place, place + len(ids) - token)
    return result


def patch_embedding_as_matrix(model: Any) -> None:
    """Run the patch embedding (stride = kernel size) as one matrix product, several times faster than Conv3d."""
    import torch

    class PatchMatrix(torch.nn.Conv3d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            flat = torch.nn.functional.linear(input.flatten(1), self.weight.flatten(1), self.bias)
            return flat.view(*flat.shape, 1, 1, 1)

    model.base_model.visual.patch_embed.proj.__class__ = PatchMatrix


# -- shared with other families --------------------------------------------------------------------


def resized(pixels: np.ndarray, *, size: tuple[int, int]) -> np.ndarray:
    """Resize uint8 pixels [height, width, 3] to `size` (width, height)."""
    if pixels.shape[1::-1] == size:
        return pixels
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))


def normalised(pixels: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """uint8 [N, 3, …] → fp32 of the same shape, normalised."""
    shape = (1, 3, *[1] * (pixels.ndim - 2))
    centre, spread = (_constants(values, pixels.device).view(shape) for values in (mean, std))
    return (pixels.float() * (1 / 255) - centre) / spread


@cache
def _constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Constants on the device, cached: each copy would wait for the device."""
    import torch

    return torch.tensor(values, device=device)
