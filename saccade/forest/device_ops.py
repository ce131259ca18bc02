"""What every part does on a device: copies from the host without waiting, as a plain copy would first
let the GPU run dry, and the table of kernels that a GPU runs instead of plain torch.

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

KERNELS: Table[Any] = Table("kernels", {})  # each has a plain counterpart that is its reference in tests/gpu


def to_device(array: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Through pinned memory, which is given back for reuse when the copy is done."""
    tensor = array if isinstance(array, Tensor) else torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@cache
def has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("triton") is not None
