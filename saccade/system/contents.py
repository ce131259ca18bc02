"""What goes into a folder, apart from writing it: files by their relative path, each with the
function that writes it.

Collected between two steps. With `copy` a file holds its tensors as they are now, in main memory,
and may be written while training changes them; without, it has to be written before that.

    files = [("optimizer.safetensors", tensor_file(host_copies(optimizer.state(), copy=True)))]
    write_files(folder, files)

The memory of a copy is kept for the next one: pages that are new to a process cost many times what
it takes to write them.
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
File = tuple[str, Writer]  # a path of "" is the folder itself, for what writes several

LEAST_SPARE = 1 << 20  # bytes of a copy; less is not worth a mapping of its own
_SPARE: defaultdict[int, list[mmap.mmap]] = defaultdict(list)  # bytes → blocks that nothing uses


def write_files(folder: Path, files: Iterable[File]) -> None:
    for path, writer in files:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        writer(target)
        for made in target.glob("*.safetensors") if target.is_dir() else [target]:
            made.chmod(made.parent.stat().st_mode & 0o666)  # safetensors writes for its user alone


def text_file(text: str) -> Writer:
    return partial(Path.write_text, data=text, encoding="utf-8")


def tensor_file(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Writer:
    def write(path: Path) -> None:
        from safetensors.torch import save_file

        dense = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        save_file(dense, path, metadata=dict(metadata) if metadata else None)

    return write


def pretrained(model: Any, tensors: Mapping[str, Tensor]) -> Writer:
    """A Hugging Face folder with these weights. How they are named and split there transformers
    reads from the model and its config; what is done to those later changes nothing.
    """
    outline = _outline(model)
    for name in ("config", "generation_config"):
        setattr(outline, name, deepcopy(getattr(model, name, None)))
    return partial(outline.save_pretrained, state_dict=dict(tensors))


def _outline(module: Any) -> Any:
    """The same modules once more, around the same tensors."""
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
    view = memoryview(block)  # which the tensor refers to, and all that are made of it
    weakref.finalize(view, blocks.append, block).atexit = False
    place = torch.frombuffer(view, dtype=tensor.dtype).view(tensor.shape)
    return place.copy_(tensor.detach())


def new_block(size: int) -> mmap.mmap:
    """Zeros."""
    block = mmap.mmap(-1, size)
    for name in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # fewer pages to make, none for a child
        with suppress(OSError):  # a kernel without it
            if hasattr(mmap, name):
                block.madvise(getattr(mmap, name))
    return block


def spare_bytes() -> int:
    """Main memory that waits for the next copy."""
    return sum(size * len(blocks) for size, blocks in _SPARE.items())


def host_copies(tensors: Mapping[str, Tensor], *, copy: bool) -> dict[str, Tensor]:
    """Copies in main memory, tied weights as one tensor, which is written once. Without `copy` the
    tensors themselves: whoever writes a file moves no more than that file at a time.
    """
    copies: dict[Any, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        start = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
        place = (*start, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if place not in copies:
            copies[place] = on_host(tensor, copy=True)
        return copies[place]

    return {name: once(t) if copy else t.detach() for name, t in tensors.items()}
