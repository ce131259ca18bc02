"""The trainer's weights for engines in other processes of this machine: written once into shared
memory, read by all of them from there.

They lie as safetensors in pieces of about PIECE bytes, so nothing of the size of the model is
allocated at once besides the shared copy itself, which is freed with the last process that has it
open. Also replicas on the trainer's own GPU read it from there: CUDA's handles for memory of
another process are not used, because a replica that dies with one open would keep the trainer's
memory.

    with shared(backend, turn=version) as copy: ...      # here
    load_by_name(model, Mapped(copy.paths))              # there
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from saccade.engines import WeightSource
from saccade.errors import EnvironmentProblem

PIECE = 256 << 20
SAMPLED = 16  # every 16th tensor is compared, others at the next turn
NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Where the pieces can be read, and checksums of some tensors as the trainer has them."""

    paths: tuple[str, ...]
    checksums: Mapping[str, int]


@contextmanager
def shared(source: WeightSource, *, turn: int) -> Iterator[Shared]:
    """The copy exists as long as the block; another `turn` compares other tensors."""
    checksums: dict[str, int] = {}
    paths: list[str] = []
    with ExitStack() as stack:
        piece: dict[str, Tensor] = {}
        for index, (name, tensor) in enumerate(source.weights()):
            if index % SAMPLED == turn % SAMPLED:
                checksums[name] = checksum(tensor)
            if piece and sum(t.nbytes for t in piece.values()) + tensor.nbytes > PIECE:
                paths.append(stack.enter_context(_written(piece)))
                piece = {}
            piece[name] = tensor.detach()
        paths.append(stack.enter_context(_written(piece)))
        yield Shared(paths=tuple(paths), checksums=checksums)


@contextmanager
def _written(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """A safetensors file that no crash leaves behind, as a path."""
    header: dict[str, Any] = {}
    size = 0
    # Wide types first: each tensor then lies at a multiple of its own width.
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        end = size + tensor.nbytes
        shape = list(tensor.shape)
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": shape, "data_offsets": [size, end]}
        size = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with _nameless() as (file, path):
        file.write(struct.pack("<Q", len(head)) + head)
        for name in header:
            file.write(_bytes(tensors[name]))
        file.flush()
        yield path


@contextmanager
def _nameless() -> Iterator[tuple[Any, str]]:
    """A file in memory, and where other processes find it as long as it is open."""
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("saccade-weights"), "wb") as file:
            yield file, f"/proc/{os.getpid()}/fd/{file.fileno()}"
    else:
        with tempfile.NamedTemporaryFile(prefix="saccade-weights-") as named:
            yield named, named.name


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def checksum(tensor: Tensor) -> int:
    return zlib.crc32(_bytes(tensor))


@dataclass(frozen=True)
class Mapped:
    """The shared copy as a source of weights. Tensors are read when they are asked for."""

    paths: Sequence[str]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for path in self.paths:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (it is no mapping)
                    yield name, file.get_tensor(name)


def require_checksums(weights: Iterable[tuple[str, Tensor]], checksums: Mapping[str, int]) -> None:
    """What is here is what the trainer has."""
    found = {name: checksum(tensor) for name, tensor in weights if name in checksums}
    wrong = sorted(name for name in checksums if found.get(name) != checksums[name])
    if wrong:
        raise EnvironmentProblem(
            f"weights changed on their way to the engine: {', '.join(wrong[:5])} differ from the "
            "trainer's; generate in its process with rollout.replicas=0"
        )


@torch.no_grad()
def load_by_name(model: nn.Module, source: WeightSource) -> None:
    """Copies every weight; names and shapes are compared both ways before the first one moves."""
    mine = dict(model.named_parameters())
    require_same(
        {name: tuple(p.shape) for name, p in mine.items()},
        {name: tuple(t.shape) for name, t in source.weights()},
    )
    for name, tensor in source.weights():
        mine[name].copy_(tensor)


def require_same(
    wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]
) -> None:
    """Names with shapes: of the engine, and of the trainer."""
    sides = {
        "missing": wanted.keys() - found.keys(),
        "unexpected": found.keys() - wanted.keys(),
        "of another shape": {n for n in wanted.keys() & found.keys() if wanted[n] != found[n]},
    }
    if any(sides.values()):
        listed = "; ".join(
            f"{kind}: {', '.join(sorted(names)[:5])}{' …' if len(names) > 5 else ''}"
            for kind, names in sides.items()
            if names
        )
        raise EnvironmentProblem(
            f"the trainer's weights are not those of the engine ({listed}); nothing was loaded. "
            "Give both the same model folder, with the same version of transformers"
        )
