"""Model folders and model families.

A torchvision that was linked against CUDA cannot load its operators beside a torch for CPUs, and
fails when it is imported (PyPI pairs the two). Two operators that are declared and never called are
enough, since images are transformed without them.
"""

import sys
from importlib.machinery import PathFinder
from typing import Any

DECLARED: list[Any] = []  # empty: torchvision works in processes without saccade, too


class _BeforeTorchvision:
    """The first finder of imports: acts when torchvision is imported, and finds nothing itself."""

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
