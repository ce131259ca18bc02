"""Triton kernels, each in a file that is imported where it is used: none of this exists without a
GPU, and every kernel has a plain counterpart that is its reference in tests/gpu.

    if available(device): from saccade.forest.kernels.logits import read
"""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def available(device: torch.device) -> bool:
    return device.type == "cuda" and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
