"""What a processor makes of a prompt with one picture, and how it is kept: masks as bytes, numbers as the bits of
bfloat16 if that is what all models that read them round them to. A third of the memory, and of what a GPU is sent.

    narrowed(row, half=True).nbytes
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

SMALL = 1 << 16  # bytes of an array that is kept of every size


class PictureRow(dict[str, np.ndarray]):
    """What a processor makes of a prompt with one picture, in the place of an array in a cache. `ids` are those
    from its first to its last placeholder, `inside` their text, and `before` and `after` what is written around it.
    """

    ids: np.ndarray
    told: Mapping[str, np.ndarray]  # of these ids, beside what they are: see `kinds`
    grid: tuple[int, ...]  # patches that the tower sees of it: squares, rows, columns; again for others of another size
    before = inside = after = ""
    wide: Mapping[str, torch.dtype] = MappingProxyType({})  # of arrays that are narrower here than the model reads them

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.values())

    @property
    def shapes(self) -> Any:
        return tuple((name, value.shape, value.dtype.str, self.wide.get(name)) for name, value in self.items())

    def tensors(self, made: Mapping[str, np.ndarray]) -> dict[str, Mapping[str, Any]]:
        """Arrays of rows of this kind as tensors, and the types that masks are widened to on the device."""
        found = {name: torch.from_numpy(value) for name, value in made.items()}
        found |= {n: found[n].view(dtype) for n, dtype in self.wide.items() if dtype == torch.bfloat16}
        return {"inputs": found, "whole": {n: d for n, d in self.wide.items() if not d.is_floating_point}}

    def setflags(self, *, write: bool) -> None:
        for value in self.values():
            value.setflags(write=write)


def narrowed(row: PictureRow, *, half: bool) -> PictureRow:
    wide = dict[str, torch.dtype]()
    for name, value in row.items():
        if value.dtype == np.float32 and half:
            wide[name] = torch.bfloat16
            row[name] = torch.from_numpy(value).bfloat16().view(torch.int16).numpy()
        elif value.dtype == np.int64 and value.nbytes > SMALL and value.min() >= 0 and value.max() <= 1:
            wide[name] = torch.int64
            row[name] = value.astype(bool)
    row.wide = wide
    return row
