"""Files to be written to a folder: pairs of a relative path and a function that writes the file.

Collected between two steps. With `copy` the tensors are copied to main memory and may be written while training goes
on; without it, they have to be written before training changes them.

    files = [("optimizer.safetensors", tensor_file(host_copies(optimizer.state(), copy=True)))]
    write_files(folder, files)

The memory of a copy is reused by the next one: page faults on new memory cost many times more than filling it.
"""

from __future__ import annotations

import mmap
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Writer = Callable[[Path], object]
File = tuple[str, Writer]  # the path "" is the folder itself, for writers of several files

LEAST_SPARE = 1 << 20  # bytes; smaller copies do not get a memory mapping of their own
_SPARE: defaultdict[int, list[mmap.mmap]] = defaultdict(list)  # size in bytes → unused blocks


def write_files(folder: Path, files: Iterable[File]) -> None:
    for path, writer in files:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        writer(target)
        for made in target.glob("*.safetensors") if target.is_dir() else [target]:
            made.chmod(made.parent.stat().st_mode & 0o666)  # safetensors makes files private to the user


def text_file(text: str) -> Writer:
    return partial(Path.write_text, data=text, encoding="utf-8")


def tensor_file(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Writer:
    def write(path: Path) -> None:
        from safetensors.torch import save_file

        dense = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        save_file(dense, path, metadata=dict(metadata) if metadata else None)

    return write


def pretrained(model: Any, tensors: Mapping[str, Tensor]) -> Writer:
    """Writer of a Hugging Face folder with these weights. transformers takes names and shards from the model and its
    config, which are copied now, so later changes to them have no effect.
    """
    outline = _outline(model)
    for name in ("config", "generation_config"):
        setattr(outline, name, deepcopy(getattr(model, name, None)))
    return partial(outline.save_pretrained, state_dict=dict(tensors))


def _outline(module: Any) -> Any:
    """A copy of the module tree that shares its tensors."""
    if module is None:
        return None
    twin, own = object.__new__(type(module)), vars(module)
    vars(twin).update(own)
    vars(twin)["_parameters"] = dict(own["_parameters"])
    vars(twin)["_buffers"] = dict(own["_buffers"])
    vars(twin)["_modules"] = {name: _outline(part) for name, part in own["_modules"].items()}
    return twin


# -- tensors ---------------------------------------------------------------------------------------


def on_host(tensor: Tensor, *, copy: bool) -> Tensor:
    if not copy or tensor.nbytes < LEAST_SPARE:
        return tensor.detach().to("cpu", copy=copy)
    import torch

    blocks = _SPARE[tensor.nbytes]
    block = blocks.pop() if blocks else new_block(tensor.nbytes)
    view = memoryview(block)  # referenced by the tensor and by all views of it
    weakref.finalize(view, blocks.append, block).atexit = False
    place = torch.frombuffer(view, dtype=tensor.dtype).view(tensor.shape)
    return place.copy_(tensor.detach())


def new_block(size: int) -> mmap.mmap:
    """A new block of zeros."""
    block = mmap.mmap(-1, size)
    for name in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # fewer page faults; not inherited by child processes
        with suppress(OSError):  # a kernel without it
            if hasattr(mmap, name):
                block.madvise(getattr(mmap, name))
    return block


def spare_bytes() -> int:
    """Bytes of main memory that are held for the next copy."""
    return sum(size * len(blocks) for size, blocks in _SPARE.items())


def host_copies(tensors: Mapping[str, Tensor], *, copy: bool) -> dict[str, Tensor]:
    """Copies in main memory; tied weights are one tensor, which is written once. Without `copy` the tensors themselves:
    the writer of a file moves only that file's tensors to main memory at a time.
    """
    copies: dict[Any, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        start = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
        place = (*start, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if place not in copies:
            copies[place] = on_host(tensor, copy=True)
        return copies[place]

    return {name: once(t) if copy else t.detach() for name, t in tensors.items()}
