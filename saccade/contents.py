"""What goes into a folder, apart from writing it: files by their relative path, each with the
function that writes it.

Collected between two steps. With `copy` a file holds its tensors as they are now, in main memory,
and may be written while training changes them; without, it has to be written before that.

    files = [("optimizer.safetensors", tensor_file(held(optimizer.state(), copy=True)))]
    write_files(folder, files)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Writer = Callable[[Path], object]
File = tuple[str, Writer]  # a path of "" is the folder itself, for what writes several


def write_files(folder: Path, files: Iterable[File]) -> None:
    for path, writer in files:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        writer(target)


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
    return tensor.detach().to("cpu", copy=copy)


def held(tensors: Mapping[str, Tensor], *, copy: bool) -> dict[str, Tensor]:
    """With `copy` in main memory, tied weights as one tensor, which is written once. Without, where
    they are: whoever writes a file moves no more than that file at a time.
    """
    known: dict[Any, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        start = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
        place = (*start, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if place not in known:
            known[place] = on_host(tensor, copy=True)
        return known[place]

    return {name: once(t) if copy else t.detach() for name, t in tensors.items()}
