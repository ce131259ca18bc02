"""Checks of weight files without loading tensors: missing or truncated files by their headers, those of a
checkpoint by the hashes stored with it. Also reads config.json.

>>> header_of(Path("models/half/model.safetensors"))
'has 100,000 bytes, its header asks for 1,335,968'
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from saccade.errors import EnvironmentProblem

SERIES_FILE = "series_encoder.safetensors"  # next to the weights, if the model has one
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
AGAIN = "copy or download it again"
BLOCKS, BLOCK = 1024, 1 << 14  # blocks that `fingerprint` reads of a file, and bytes per block
POINTER = b"version "  # how a Git LFS pointer begins
STATE = "state/"  # folder in a checkpoint that only a resumed run reads
LISTING = STATE + "files.json"  # size and hash of each file of the checkpoint, as written
HASHED = 64 << 20  # bytes per hashed block


def require_whole(folder: Path) -> None:
    """Refuse truncated weight files before they are loaded. A folder without weights passes: see `require_some`."""
    for shard in shards(folder):
        found = header_of(folder / shard)
        if isinstance(found, str):
            raise EnvironmentProblem(f"model.path: {folder / shard} {found}; {AGAIN}")


def require_some(folder: Path) -> None:
    """Refuse a folder without weights, such as an interrupted download."""
    if not shards(folder) and not any(folder.glob("*.bin")):
        raise EnvironmentProblem(f"model.path: {folder} has no {SINGLE} or other weights; {AGAIN}")


def require_intact(folder: Path) -> None:
    """Refuse weights that differ from what the checkpoint wrote. Folders without a listing pass."""
    if changed := damaged(folder, state=False):
        names = ", ".join(str(folder / name) for name in changed)
        hint = f"use another checkpoint, or delete {folder / LISTING} if you changed it yourself"
        raise EnvironmentProblem(f"{names}: damaged, the content is not what the checkpoint wrote; {hint}")


def damaged(folder: Path, *, state: bool = True) -> list[str]:
    """Names of checkpoint files whose size, or hash if one is listed, differs from what was written."""
    return [
        name
        for name, entry in (listing(folder) or {}).items()
        if (state or not name.startswith(STATE)) and not _is_as(entry, folder / name)
    ]


def _is_as(entry: Mapping[str, Any], path: Path) -> bool:
    if not path.is_file() or path.stat().st_size != entry["bytes"]:
        return False
    return len(entry) == 1 or checksum(path) == entry


def listing(folder: Path) -> dict[str, dict[str, Any]] | None:
    """Size and hash of each file as written; None if the folder holds no finished checkpoint."""
    path = folder / LISTING
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        hint = f"use another checkpoint: with {folder} moved away, the one before it is the latest"
        raise EnvironmentProblem(f"{path} is damaged: it is no JSON any more; {hint}") from None


def checksum(path: Path) -> dict[str, Any]:
    """The size of a file and the hash of its content. A large file is hashed in blocks by several threads, then the
    block hashes are hashed. Cached per process until the file changes.
    """
    found = path.stat()
    return _checksum(path.absolute(), found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=4096)
def _checksum(path: Path, size: int, written: int) -> dict[str, Any]:
    if size <= HASHED:
        return {"bytes": size, "sha256": _hash(path, 0).hex()}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        blocks = list(threads.map(partial(_hash, path), range(0, size, HASHED)))
    return {"bytes": size, "sha256_of_blocks": hashlib.sha256(b"".join(blocks)).hexdigest()}


def _hash(path: Path, start: int) -> bytes:
    found = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        while (left := start + HASHED - file.tell()) and (piece := file.read(min(left, 1 << 20))):
            found.update(piece)
    return found.digest()


def model_json(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """The content of a JSON file of a model folder; empty if there is no such file."""
    file = folder / name
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise EnvironmentProblem(f"{file} is damaged ({error}); {AGAIN}") from None
    if not isinstance(found, dict):
        raise EnvironmentProblem(f"{file} holds no settings but {json.dumps(found)[:40]}; {AGAIN}")
    return found


def require_same(
    what: str, own: Iterable[tuple[str, Any]], given: Iterable[tuple[str, Any]], hint: str = "use the same model.path"
) -> None:
    """Refuse tensors whose names or shapes differ from the model's, in either direction."""
    mine, theirs = ({name: tuple(tensor.shape) for name, tensor in pairs} for pairs in (own, given))
    problems = {
        "missing": mine.keys() - theirs.keys(),
        "unexpected": theirs.keys() - mine.keys(),
        "of another shape": {n for n in mine.keys() & theirs.keys() if mine[n] != theirs[n]},
    }
    if any(problems.values()):
        listed = (f"{k}: {', '.join(sorted(names)[:3])}" for k, names in problems.items() if names)
        raise EnvironmentProblem(f"{what}: not those of this model ({'; '.join(listed)}); {hint}")


def names_experts(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a mixture of experts."""
    return any("experts" in key for key in config.get("text_config", config))


def shards(folder: Path) -> list[str]:
    """Names of weight files that exist or that the folder's index lists."""
    found = {path.name for path in folder.glob("*.safetensors")}
    if (folder / INDEX).is_file():
        listed = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        found |= set(listed["weight_map"].values())
    return sorted(found)


def stamp(folder: Path) -> list[tuple[str, int, int]]:
    """Identifies weights without reading them: names, sizes and modification times of the folder's files."""
    files = sorted(path for path in folder.iterdir() if path.suffix != ".jinja")
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def fingerprint(folder: Path) -> str | None:
    """Identifies weights by a hash of blocks spread over their files; None without weights."""
    found = hashlib.sha256()
    for name in shards(folder):
        path = folder / name
        size = path.stat().st_size
        found.update(f"{name} {size}".encode())
        with path.open("rb") as file:
            for place in range(0, size, max(BLOCK, size // BLOCKS)):
                file.seek(place)
                found.update(file.read(BLOCK))
    return found.hexdigest() if shards(folder) else None


def header_of(path: Path) -> dict[str, Any] | str:
    """The tensors of a safetensors file, or what is wrong with it. Reads the header alone."""
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start == POINTER:
            return "is a Git LFS pointer instead of weights (run `git lfs pull` in its folder)"
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > size - 8:
            return f"is cut short in its header ({size:,} bytes)"
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            return f"has no valid header: {error}"
    header.pop("__metadata__", None)
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if end != size:
        return f"has {size:,} bytes, its header asks for {end:,}"
    return header
