"""Joins the weights of a model sharded by FSDP: a torch distributed checkpoint (DCP), or files with one state dict per
rank, as verl and EasyR1 write them. Also writes DCP.

Reads only tensors and plain values from these files. The metadata of a DCP folder is a pickle: it is unpickled with an
allow-list of torch's record classes.

    weights = sharded_weights(Path("global_step_100/actor"))
"""

import pickle
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate, Shard

from saccade.errors import EnvironmentProblem

DESCRIBED, OF_RANKS = ".metadata", "model_world_size_*_rank_*.pt"
WRAPPERS = re.compile(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|^module)\.")
RECORDS = {  # classes that DCP metadata may name, besides torch dtypes
    "torch.distributed.checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex "
    "StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "torch": "Size",
    "pathlib": "PosixPath",
    "pathlib._local": "PosixPath",
}


def sharded_folder(checkpoint: Path) -> Path | None:
    """The folder with sharded weights: this one, or the first subfolder with some, except critics and optimizers."""
    folders = (checkpoint, *sorted(checkpoint.glob("*/")))
    found = [folder for folder in folders if (folder / DESCRIBED).is_file() or any(folder.glob(OF_RANKS))]
    models = [folder for folder in found if "optim" not in folder.name and "critic" not in folder.name]
    return models[0] if models else None


def sharded_weights(folder: Path) -> dict[str, Tensor]:
    """Returns the full tensors under the model's own names, without prefixes of wrapper modules."""
    try:
        found = _of_dcp(folder) if (folder / DESCRIBED).is_file() else _of_ranks(folder)
    except (OSError, pickle.UnpicklingError, EOFError, KeyError, RuntimeError, ValueError) as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise EnvironmentProblem(f"{folder}: {why}; it is no sharded checkpoint, or not whole") from error
    return {WRAPPERS.sub("", name): tensor for name, tensor in found.items()}


def write_dcp(weights: Mapping[str, Tensor], out: Path) -> Path:
    """Write {"model": weights}, which FSDP trainers load into any number of ranks; returns the folder."""
    with _alone():
        dcp.save({"model": dict(weights)}, checkpoint_id=out, no_dist=True)
    return out


@contextmanager
def _alone() -> Iterator[None]:
    """Suppresses torch's warning that no process group is initialised."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


# -- DCP -------------------------------------------------------------------------------------------


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        number = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not number and name not in RECORDS.get(module, "").split():
            raise pickle.UnpicklingError(f"{DESCRIBED} asks for {module}.{name}, which no such file needs")
        return super().find_class(module, name)


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / DESCRIBED, "rb") as file:
            found = _Unpickler(file).load()
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


def _of_dcp(folder: Path) -> dict[str, Tensor]:
    reader = _Reader(folder)
    metadata = reader.read_metadata()
    about = {key: one for key, one in metadata.state_dict_metadata.items() if isinstance(one, TensorStorageMetadata)}
    paths = {key: tuple(map(str, (metadata.planner_data or {}).get(key, (key,)))) for key in about}
    models = Counter(path[:-1] for path in paths.values() if not any("optim" in part for part in path))
    if not models:
        raise ValueError("it holds no weights beside those of an optimizer")
    (inside, _), *others = models.most_common()
    if others and others[0][1] > models[inside] // 2:
        raise ValueError(f"it holds several models: {', '.join('.'.join(path) for path in models)}")
    wanted = {key: path[-1] for key, path in paths.items() if path[:-1] == inside}
    weights: dict[str, Any] = {key: torch.empty(about[key].size, dtype=about[key].properties.dtype) for key in wanted}
    with _alone():
        dcp.load(weights, storage_reader=reader, no_dist=True)
    return {wanted[key]: tensor for key, tensor in weights.items()}


# -- one file per rank -----------------------------------------------------------------------------


def _of_ranks(folder: Path) -> dict[str, Tensor]:
    files = {tuple(map(int, re.findall(r"\d+", path.stem))): path for path in folder.glob(OF_RANKS)}
    count = next(iter(files))[0]
    missing = [rank for rank in range(count) if (count, rank) not in files]
    if missing or len(files) != count:
        raise ValueError(f"it has {len(files)} files {OF_RANKS} of {count} ranks; copy them all")
    ranks = [torch.load(files[count, rank], map_location="cpu", mmap=True, weights_only=True) for rank in range(count)]
    return {name: _joined(name, [rank[name] for rank in ranks]) for name in ranks[0]}


def _joined(name: str, parts: list[Any]) -> Tensor:
    first = parts[0]
    if not isinstance(first, DTensor):
        return first
    *outer, inner = first.placements  # hybrid sharding: the outer mesh dimension has full copies
    if any(not isinstance(each, Replicate) for each in outer) or not isinstance(inner, Shard | Replicate):
        raise ValueError(f"{name}: tensors that are divided by {first.placements} are not read; only by rows of FSDP")
    local = [part.to_local() for part in parts[: first.device_mesh.shape[-1]]]
    whole = torch.cat(local, inner.dim) if isinstance(inner, Shard) else local[0]
    if whole.shape != first.shape:
        raise ValueError(f"{name}: parts of {list(whole.shape)} for a weight of {list(first.shape)}")
    return whole
