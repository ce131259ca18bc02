"""Shared memory for weights that other processes read: files without a name, mapped on both sides and reused for the
next copy, because allocating memory takes longer than filling it. In a process that uses CUDA it is pinned, so that
copies run at the speed of the bus. Nothing is left when the processes have ended, however they end.

    with room(size) as (path, held): ...    # in one process: bytes to write to
    held_at(path)                           # in another: the same bytes
"""

import logging
import mmap
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

log = logging.getLogger(__name__)


class _Room(NamedTuple):
    file: Any
    path: str  # by which other processes of this machine open it
    held: Tensor


class _Seen(NamedTuple):
    number: int  # inode of the file: another file may get the same path
    held: Tensor
    pinned: bool


_spare: defaultdict[int, list[_Room]] = defaultdict(list)  # by size
_seen: dict[str, _Seen] = {}  # by path


@contextmanager
def room(size: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the path and the memory of `size` bytes. After the block they may be reused for another copy."""
    mine = _spare[size].pop() if _spare[size] else _new_room(size)
    try:
        yield mine.path, mine.held
    finally:
        _spare[size].append(mine)


def _new_room(size: int) -> _Room:
    if hasattr(os, "memfd_create"):
        file: Any = os.fdopen(os.memfd_create("saccade-weights"), "w+b")
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
    else:
        file = tempfile.NamedTemporaryFile(prefix="saccade-weights-")  # noqa: SIM115 (it stays open)
        path = file.name
    file.truncate(size)
    return _Room(file, path, _mapped(file)[0])


def held_at(path: str) -> Tensor:
    """The bytes at the path of a `room`, in any process of the machine. Releases those of processes that have ended."""
    with open(path, "r+b") as file:
        number = os.fstat(file.fileno()).st_ino
        if path not in _seen or _seen[path].number != number:
            for old in [old for old in _seen if old == path or not os.path.exists(old)]:
                gone = _seen.pop(old)
                if gone.pinned:
                    torch.cuda.cudart().cudaHostUnregister(gone.held.data_ptr())
            _seen[path] = _Seen(number, *_mapped(file))
    return _seen[path].held


def _mapped(file: Any) -> tuple[Tensor, bool]:
    """The bytes of a file, and whether they are pinned."""
    held = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
    if not torch.cuda.is_initialized():
        return held, False
    refused = int(torch.cuda.cudart().cudaHostRegister(held.data_ptr(), held.nbytes, 1))  # for all GPUs
    if refused:
        log.warning(f"{held.nbytes} bytes for weights cannot be pinned (CUDA error {refused}): copies take longer")
        with suppress(RuntimeError):  # consumes CUDA's last error, which the next kernel launch would raise
            torch.ones(1, device="cuda")
    return held, not refused
