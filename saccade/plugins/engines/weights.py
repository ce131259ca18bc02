"""Weights on their way from the trainer to an engine: pieces in files, checksums, and the names of
a model folder.

For other processes they are written once, as safetensors in pieces of about PIECE bytes, so that
nothing else of the size of the model is allocated. The copy lies in memory without a file name and
is freed with the last process that has it open. Embedded engines that see the trainer's GPU read its
own tensors instead.

    with shared(backend, turn=version) as (offer, checksums): ...     # here
    load_by_name(model, Mapped(offer["paths"]))                       # there
"""

import json
import os
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from saccade.engines import WeightSource
from saccade.errors import EnvironmentProblem
from saccade.models.files import INDEX, SINGLE, described, require_intact, require_same
from saccade.plugins.engines.gpu_handles import describe

PIECE = 256 << 20
SAMPLED = 16  # every 16th tensor is compared, others at the next turn
CHUNK = 1 << 22  # elements of a checksum at a time
NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextmanager
def shared(
    source: WeightSource, *, turn: int, direct: bool = False
) -> Iterator[tuple[dict[str, Any], Mapping[str, int]]]:
    """Yield where a copy is, as long as the block, for processes of this machine, and checksums of some
    of the trainer's tensors; another `turn` compares others. `direct`: parameters on a GPU are not copied.
    """
    checksums: dict[str, int] = {}
    handles: dict[str, str] = {}

    def noted() -> Iterator[tuple[str, Tensor]]:
        for index, (name, tensor) in enumerate(source.weights()):
            if index % SAMPLED == turn % SAMPLED:
                checksums[name] = checksum(tensor)
            if direct and tensor.is_cuda and isinstance(tensor, nn.Parameter):  # others are made for this
                handles[name] = describe(tensor)
            else:
                yield name, tensor

    with in_memory(noted()) as paths:
        if handles:
            torch.cuda.synchronize()
        yield {"paths": paths, "handles": handles}, checksums


@contextmanager
def in_memory(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, ...]]:
    """Yield paths of pieces that exist as long as the block, and survive no crash."""
    with ExitStack() as stack:
        paths = []
        for piece in pieces(weights):
            file, path = nameless(stack)
            _write(piece, file)
            paths.append(path)
        yield tuple(paths)


def nameless(stack: ExitStack) -> tuple[Any, str]:
    """A file in memory, and a path by which other processes of this machine open it."""
    if hasattr(os, "memfd_create"):
        file: Any = stack.enter_context(os.fdopen(os.memfd_create("saccade-weights"), "wb"))
        return file, f"/proc/{os.getpid()}/fd/{file.fileno()}"
    file = stack.enter_context(tempfile.NamedTemporaryFile(prefix="saccade-weights-"))  # noqa: SIM115 (the stack is one)
    return file, file.name


def in_folder(weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write pieces with names, for an engine that reads model folders only."""
    for number, piece in enumerate(pieces(weights)):
        with (folder / f"model-{number:05}.safetensors").open("wb") as file:
            _write(piece, file)


def pieces(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Weights in parts of about PIECE bytes."""
    piece: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        if piece and size + tensor.nbytes > PIECE:
            yield piece
            piece, size = {}, 0
        piece[name] = tensor.detach()
        size += tensor.nbytes
    yield piece


def _write(tensors: Mapping[str, Tensor], file: Any) -> None:
    """By hand, tensor by tensor: the writer of safetensors copies a piece several times."""
    header: dict[str, Any] = {}
    size = 0
    # Wide types first: each tensor then lies at a multiple of its width.
    order = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    for name, tensor in order:
        shape, end = list(tensor.shape), size + tensor.nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": shape, "data_offsets": [size, end]}
        size = end
    head = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    head += b" " * (-len(head) % 8)
    file.write(struct.pack("<Q", len(head)) + head)
    for _, tensor in order:
        file.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    file.flush()


def checksum(tensor: Tensor) -> int:
    """A checksum of the bits and their places, the same on every device."""
    bits = tensor.detach().contiguous().reshape(-1).view(BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), CHUNK):
        part = bits[start : start + CHUNK].to(torch.int64)
        places = torch.arange(start, start + len(part), device=bits.device)
        total += (part * (2 * places + 1)).sum()  # modulo 2**64, in any order
    return int(total)


@dataclass(frozen=True)
class Mapped:
    """The shared copy as a source of weights, and tensors of the trainer. Files are read when they are asked for."""

    paths: Sequence[str]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors.items()
        for path in self.paths:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (it is no mapping)
                    yield name, file.get_tensor(name)


def require_checksums(weights: Iterable[tuple[str, Tensor]], checksums: Mapping[str, int]) -> None:
    """Refuse weights that differ from the trainer's."""
    found = {name: checksum(tensor) for name, tensor in weights if name in checksums}
    wrong = sorted(name for name in checksums if found.get(name) != checksums[name])
    if wrong:
        problem = f"weights changed on their way to the engine: {', '.join(wrong[:5])} differ from the trainer's"
        raise EnvironmentProblem(f"{problem}; generate in its process with rollout.replicas=0")


@torch.no_grad()
def load_by_name(model: nn.Module, source: WeightSource) -> None:
    """Copy every weight, after comparing names and shapes both ways."""
    mine = dict(model.named_parameters())
    require_same("the trainer's weights", mine.items(), source.weights())
    for name, tensor in source.weights():
        mine[name].copy_(tensor)


Shapes = Mapping[str, tuple[int, ...]]


class HandOver:
    """One pass of weights into an engine that has loaded a folder, under the names of that folder:
    iterate over it, then ask for its `drift`. `renamed` gives what names of one tensor have in
    common; empty: the engine ignores it.
    """

    def __init__(self, weights: Iterable[tuple[str, Tensor]], shapes: Shapes, renamed: Callable[[str], str]) -> None:
        self.weights, self.shapes, self.renamed = weights, shapes, renamed
        self.left = {known: name for name in shapes if (known := renamed(name))}
        self.unexpected: list[str] = []

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self.weights:
            known = self.renamed(name)
            if self.shapes.get(self.left.get(known, "")) == tuple(weight.shape):
                yield self.left.pop(known), weight.detach()
            else:
                self.unexpected.append(f"{name} {list(weight.shape)}")

    def drift(self) -> str:
        """Names and shapes that differ; empty if none do. Some folders hold a tied head twice."""
        missing = [f"{name} {list(self.shapes[name])}" for name in self.left.values() if name != "lm_head.weight"]
        if not missing and not self.unexpected:
            return ""
        listed = (", ".join(sorted(names)[:5]) or "none" for names in (missing, self.unexpected))
        return "missing: {}; not expected: {}".format(*listed)


def stored_form(
    folder: str, auto_class: str, names: Iterable[str], *, trust_remote_code: bool = False
) -> tuple[Callable[[Iterable[tuple[str, Tensor]]], Iterator[tuple[str, Tensor]]], set[str]]:
    """How a folder with tensors of these names holds the weights of a trainer: under other names, and some in parts,
    as those of all experts of a layer. What transformers did to load them is done backwards. Also the names of its
    tensors that are no weights.
    """
    import transformers
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key, revert_weight_conversion

    def renamed(steps: Sequence[Any], name: str, *known: Any, reverse: bool = False) -> str:
        converters = [step for step in steps if isinstance(step, WeightConverter)]
        renamings: Any = [step for step in steps if not isinstance(step, WeightConverter)]
        base, tensors = known or (None, None)
        return rename_source_key(name, renamings, converters, base, tensors, reverse)[0]

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = getattr(transformers, auto_class).from_config(config, trust_remote_code=trust_remote_code)
    steps, known = get_model_conversion_mapping(model), (model.base_model_prefix, model.state_dict())
    buffers = {name for name, _ in model.named_buffers()}
    constant = {name for name in names if renamed(steps, name, *known) in buffers}
    model._weight_conversions = [step for step in steps if step.was_used()] or None
    backwards = [step.reverse_transform() for step in (model._weight_conversions or ())[::-1]]
    together = Counter(renamed(backwards, name, reverse=True) for name, _ in model.named_parameters())

    def stored(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        waiting: dict[str, dict[str, Tensor]] = {}
        for name, weight in weights:
            whole = renamed(backwards, name, reverse=True)
            waiting.setdefault(whole, {})[name] = weight.detach()
            if len(waiting[whole]) >= together[whole]:
                yield from revert_weight_conversion(model, waiting.pop(whole)).items()
        for parts in waiting.values():  # some of them are missing, which who compares names will tell
            yield from parts.items()

    return stored, constant


def folder_shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a model folder, from the headers of its files. A damaged
    checkpoint is refused.
    """
    require_intact(Path(folder))
    shapes: dict[str, tuple[int, ...]] = {}
    for file in folder_files(Path(folder)):
        with safe_open(file, framework="pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    if not shapes:
        raise EnvironmentProblem(f"{folder} holds no *.safetensors to compare names with; save it with save_pretrained")
    return shapes


def folder_files(folder: Path) -> list[Path]:
    """The files that are loaded: adapters or other copies of the weights may lie beside them."""
    if named := described(folder, INDEX).get("weight_map"):
        return [folder / name for name in sorted(set(named.values()))]
    return [folder / SINGLE] if (folder / SINGLE).is_file() else sorted(folder.glob("*.safetensors"))
