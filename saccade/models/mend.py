"""A torchvision that was linked against CUDA cannot load its operators beside a torch for CPUs, and
dies when it is imported: PyPI pairs the two. Declared and never called, two of them are enough, for
images are transformed without them. Acts when torchvision is imported, and only where its operators
are missing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

_DECLARED: list[Any] = []  # gone as soon as nobody holds them


class _BeforeTorchvision:
    """Stands in front of the import machinery, and finds nothing itself."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            _declare()


def _declare() -> None:
    import torch

    found = PathFinder.find_spec("torchvision")
    if found is None or torch.version.cuda is not None:
        return
    try:
        torch.ops.load_library(f"{(found.submodule_search_locations or [''])[0]}/_C.so")
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _DECLARED.append(library)


def acted() -> bool:
    """Whether this torchvision works here alone, and not in a process that does without us."""
    return bool(_DECLARED)


def before_torchvision() -> None:
    if "torchvision" not in sys.modules:
        sys.meta_path.insert(0, _BeforeTorchvision())
