"""Transfer weights from the trainer to an engine: pieces in files, checksums, and the tensor names of
a model folder.

For other processes weights are written once, as safetensors in pieces of about PIECE bytes, into shared
memory that is reused for the next update (kept_memory.py). Embedded engines that see the trainer's GPU read
its own tensors instead.

    with shared(trainer, turn=version) as (offer, checksums): ...     # in the trainer
    load_by_name(model, Mapped(offer["paths"]))                       # in the engine's process
"""

import json
import struct
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
from saccade.models.files import INDEX, SINGLE, model_json, require_intact, require_same
from saccade.plugins.engines.gpu_handles import describe
from saccade.plugins.engines.kept_memory import held_at, room

PIECE = 256 << 20
SAMPLED = 16  # every 16th tensor is compared, others at the next turn
WORD = 8  # bytes per word of a checksum
CHUNK = 1 << 16  # words summed at a time, to fit into a CPU cache; on a GPU 64 times as many
NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


@contextmanager
def shared(
    source: WeightSource, *, turn: int, direct: bool = False
) -> Iterator[tuple[dict[str, Any], Mapping[str, int]]]:
    """Share the weights with processes of this machine while the block runs. Yields where they are, and checksums
    of some tensors, of others at another `turn`. `direct`: GPU parameters are shared by handle, not copied.
    """
    checksums: dict[str, int] = {}
    handles: dict[str, str] = {}

    def noted() -> Iterator[tuple[str, Tensor]]:
        for index, (name, tensor) in enumerate(source.weights()):
            if index % SAMPLED == turn % SAMPLED:
                checksums[name] = checksum(tensor)
            if direct and tensor.is_cuda and isinstance(tensor, nn.Parameter):  # other tensors are temporary
                handles[name] = describe(tensor)
            else:
                yield name, tensor

    with in_memory(noted()) as paths:
        if handles:
            torch.cuda.synchronize()
        yield {"paths": paths, "handles": handles}, checksums


@contextmanager
def in_memory(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, ...]]:
    """Copy weights to shared memory. Yields the paths of the pieces, which stay unchanged while the block runs."""
    with ExitStack() as stack:
        paths = []
        for piece in pieces(weights):
            head, order, size = _arranged(piece)
            path, held = stack.enter_context(room(size))
            held[: len(head)] = torch.frombuffer(head, dtype=torch.uint8)
            place = len(head)
            for tensor in order:
                held[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
                place += tensor.nbytes
            paths.append(path)
        yield tuple(paths)


def in_folder(weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write weights as files of a model folder, for an engine that reads nothing else."""
    for number, piece in enumerate(pieces(weights)):
        head, order, _ = _arranged(piece)
        with (folder / f"model-{number:05}.safetensors").open("wb") as file:
            file.write(head)
            for tensor in order:  # by hand: the writer of safetensors copies a piece several times
                file.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


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


def _arranged(tensors: Mapping[str, Tensor]) -> tuple[bytearray, list[Tensor], int]:
    """The header of a safetensors file, the tensors in the order of the file, and its size in bytes."""
    header: dict[str, Any] = {}
    size = 0
    # Wide types first, so that each tensor is aligned to the size of its elements.
    order = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    for name, tensor in order:
        shape, end = list(tensor.shape), size + tensor.nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": shape, "data_offsets": [size, end]}
        size = end
    head = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    head += b" " * (-len(head) % WORD)
    return bytearray(struct.pack("<Q", len(head)) + head), [tensor for _, tensor in order], WORD + len(head) + size


def checksum(tensor: Tensor) -> int:
    """A checksum of the bytes and their positions, the same on every device."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % WORD or len(data) % WORD:
        data = nn.functional.pad(data, (0, -len(data) % WORD))  # always a copy, which is aligned
    words = data.view(torch.int64)
    step = min(CHUNK << 6 if words.is_cuda else CHUNK, max(1, len(words)))
    odd = torch.arange(1, 2 * step, 2, device=words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, len(words), step):
        part = words[start : start + step]
        total += (part * odd[: len(part)]).sum() + 2 * start * part.sum()  # modulo 2**64, in any order
    return int(total)


@dataclass(frozen=True)
class Mapped:
    """A source of weights over the shared copy and the trainer's GPU tensors, valid while the copy is shared."""

    paths: Sequence[str]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors.items()
        for held in map(held_at, self.paths):
            start = WORD + int(held[:WORD].view(torch.int64))
            for name, about in json.loads(bytes(held[WORD:start].numpy())).items():
                if name != "__metadata__":
                    first, end = (start + offset for offset in about["data_offsets"])
                    yield name, held[first:end].view(DTYPES[about["dtype"]]).view(about["shape"])


def require_checksums(weights: Iterable[tuple[str, Tensor]], checksums: Mapping[str, int]) -> None:
    """Refuse weights that differ from the trainer's."""
    found = {name: checksum(tensor) for name, tensor in weights if name in checksums}
    if wrong := sorted(name for name in checksums if found.get(name) != checksums[name]):
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
    iterate over it, then check its `drift`. `renamed` maps all names of a tensor to one; empty: the
    engine ignores it.
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
        """Names and shapes that differ; empty if none do. A missing head is no drift: some folders store a tied one."""
        missing = [f"{name} {list(self.shapes[name])}" for name in self.left.values() if name != "lm_head.weight"]
        if not missing and not self.unexpected:
            return ""
        listed = (", ".join(sorted(names)[:5]) or "none" for names in (missing, self.unexpected))
        return "missing: {}; not expected: {}".format(*listed)


def stored_form(
    folder: str, auto_class: str, names: Iterable[str], *, trust_remote_code: bool = False
) -> tuple[Callable[[Iterable[tuple[str, Tensor]]], Iterator[tuple[str, Tensor]]], set[str]]:
    """Returns a function that converts the trainer's weights to the form of a folder with tensors of these names
    (renamed, or split, such as the experts of a layer) by reverting what transformers did to load them; and the names
    of the folder's tensors that are buffers, not weights.
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
        for parts in waiting.values():  # incomplete: the comparison of names will report the missing ones
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
    """The files that are loaded; the folder may also hold adapters or other copies of the weights."""
    if named := model_json(folder, INDEX).get("weight_map"):
        return [folder / name for name in sorted(set(named.values()))]
    return [folder / SINGLE] if (folder / SINGLE).is_file() else sorted(folder.glob("*.safetensors"))
