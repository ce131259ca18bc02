"""From the host to the device without waiting: a plain copy would first let the GPU run dry.

ids = to_device(batch.ids, torch.device("cuda"))
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Through pinned memory, which is given back for reuse when the copy is done."""
    tensor = array if isinstance(array, Tensor) else torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
