"""Share GPU weights with another process of this machine that sees the same GPU: it reads the trainer's tensors in
place (CUDA IPC), without a copy.

    handle = describe(parameter)    # in the trainer
    tensor = opened_tensor(handle)  # in the other process; None if it cannot be opened

Handles and opened tensors are cached: torch counts open handles, and memory that is not freed can be read again.
"""

import json
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

_described: dict[tuple[Any, ...], str] = {}  # by address and shape


def describe(tensor: Tensor) -> str:
    """A handle for another process to open the tensor, valid as long as the tensor keeps its address."""
    key = (tensor.data_ptr(), tensor.shape, tensor.dtype)
    if key not in _described:
        _, (_, size, stride, offset, _, dtype, device, handle, *sizes, _, counter, counted, event, waits) = (
            reduce_tensor(tensor.detach())
        )
        hidden = [part.hex() for part in (handle, counter, event)]
        row = (_gpu(device), [*size], [*stride], offset, str(dtype), sizes, counted, waits, hidden)
        _described[key] = json.dumps(row)
    return _described[key]


@cache
def opened_tensor(described: str) -> Tensor | None:
    """The tensor of another process; None if this process does not see its GPU or cannot open its memory."""
    gpu, size, stride, offset, dtype, sizes, counted, waits, hidden = json.loads(described)
    device = next((index for index in range(torch.cuda.device_count()) if _gpu(index) == gpu), None)
    if device is None:
        return None
    handle, counter, event = map(bytes.fromhex, hidden)
    kind, number = torch.storage.TypedStorage, getattr(torch, dtype.removeprefix("torch."))
    what = (torch.Tensor, tuple(size), tuple(stride), offset, kind, number)
    where = (device, handle, *sizes, False, counter, counted, event, waits)
    try:
        return rebuild_cuda_tensor(*what, *where)
    except RuntimeError:  # a container may forbid it
        return None


@cache
def _gpu(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
