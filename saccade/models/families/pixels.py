"""What families do alike with pictures: resize them as Pillow does, keep bytes, normalise on the
device. So the engine and the trainer read the same pixels.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
# Kept in memory: about 1,700 images of a megapixel, or every image of a small task.
CACHE_BYTES = 2 << 30


def resized(pixels: np.ndarray, *, size: tuple[int, int]) -> np.ndarray:
    """[height, width, 3] bytes of a (width, height)."""
    if pixels.shape[1::-1] == size:
        return pixels
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))


def normalised(pixels: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """[N, 3, …] bytes → as many numbers around 0."""
    shape = (1, 3, *[1] * (pixels.ndim - 2))
    centre, spread = (_constants(values, pixels.device).view(shape) for values in (mean, std))
    return (pixels.float() * (1 / 255) - centre) / spread


@cache
def _constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    """On the device once: to copy them is to wait for it."""
    import torch

    return torch.tensor(values, device=device)
