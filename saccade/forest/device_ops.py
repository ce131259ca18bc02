"""Asynchronous copies from the host (a synchronous one would stall until the GPU is idle), and the table
of kernels that a GPU runs instead of plain torch.

    ids = to_device(batch.ids, torch.device("cuda"))
    if has_kernels(device): KERNELS["sum_rows"](…)
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.registry import Table

KERNELS: Table[Any] = Table("kernels", {})  # each has a version in plain torch, its reference in tests/gpu


def to_device(array: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Copy to the device through pinned memory, which is reused when the copy is done."""
    tensor = array if isinstance(array, Tensor) else torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@cache
def has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("triton") is not None
