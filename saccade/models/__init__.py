"""Model folders and model families.

A CUDA build of torchvision cannot load its compiled operators next to a CPU build of torch, so importing it fails
(PyPI pairs the two). Declaring two operators is enough: image transforms never call them.
"""

import gc
import sys
from importlib.machinery import PathFinder
from typing import Any

DECLARED: list[Any] = []  # empty: torchvision can also be imported in processes without saccade
# What torch and transformers make lives on: looking for garbage in it takes a seventh of the time to start.
gc.set_threshold(5_000, 20, 50)


class _BeforeTorchvision:
    """An import hook, first in sys.meta_path: runs when torchvision is imported, finds no module itself."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        found = PathFinder.find_spec("torchvision")
        if found is None or torch.version.cuda is not None:
            return
        try:
            torch.ops.load_library(f"{(found.submodule_search_locations or [''])[0]}/_C.so")
        except OSError:
            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            DECLARED.append(library)


if "torchvision" not in sys.modules:
    sys.meta_path.insert(0, _BeforeTorchvision())
