"""Files of weights, judged by their headers: what is missing or cut short; those of a checkpoint by
the hashes that it stored; config.json, as it is. Makes no tensor.

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

SERIES_FILE = "series_encoder.safetensors"  # beside the weights, where a model has one
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
AGAIN = "copy or download it again"
BLOCKS, BLOCK = 1024, 1 << 14  # of a file that `fingerprint` reads, and bytes of each
POINTER = b"version "  # how a Git LFS pointer begins
STATE = "state/"  # of a checkpoint: what only a run that goes on reads
LISTING = STATE + "files.json"  # in it: size and hash of each file as it was written
HASHED = 64 << 20  # bytes that a thread hashes


def require_whole(folder: Path) -> None:
    """Refuse weights that were cut short, before anything is made of them. A folder without any is
    left to the code that needs some.
    """
    for shard in shards(folder):
        found = header_of(folder / shard)
        if isinstance(found, str):
            raise EnvironmentProblem(f"model.path: {folder / shard} {found}; {AGAIN}")


def require_some(folder: Path) -> None:
    """Refuse a folder that has none, as a download leaves it that was ended early."""
    if not shards(folder) and not any(folder.glob("*.bin")):
        raise EnvironmentProblem(f"model.path: {folder} has no {SINGLE} or other weights; {AGAIN}")


def require_intact(folder: Path) -> None:
    """Refuse weights of a checkpoint that are not those that it wrote. Other folders say nothing of
    what they should hold.
    """
    if changed := damaged(folder, state=False):
        names = ", ".join(str(folder / name) for name in changed)
        hint = f"use another checkpoint, or delete {folder / LISTING} if you changed it yourself"
        raise EnvironmentProblem(f"{names}: damaged, the content is not what the checkpoint wrote; {hint}")


def damaged(folder: Path, *, state: bool = True) -> list[str]:
    """Files of a checkpoint whose content is not what was written, by hash where it has one."""
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
    """Size and hash of each file as it was written; None where no checkpoint was finished."""
    path = folder / LISTING
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        hint = f"use another checkpoint: with {folder} moved away, the one before it is the latest"
        raise EnvironmentProblem(f"{path} is damaged: it is no JSON any more; {hint}") from None


def checksum(path: Path) -> dict[str, Any]:
    """The size of a file and the hash of its content; of a large one that of the hashes of its
    blocks, which several threads read. A file is read once in a process, until it is written again.
    """
    found = path.stat()
    return _checksum(path.absolute(), found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=4096)
def _checksum(path: Path, size: int, written: int) -> dict[str, Any]:
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        blocks = list(threads.map(partial(_hash, path), range(0, max(size, 1), HASHED)))
    if len(blocks) == 1:
        return {"bytes": size, "sha256": blocks[0].hex()}
    return {"bytes": size, "sha256_of_blocks": hashlib.sha256(b"".join(blocks)).hexdigest()}


def _hash(path: Path, start: int) -> bytes:
    found = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        while (left := start + HASHED - file.tell()) and (piece := file.read(min(left, 1 << 20))):
            found.update(piece)
    return found.digest()


def described(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """What a JSON file of a model folder says; nothing where there is none."""
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
    """Compare names and shapes of tensors both ways: one left out or stretched would make another
    model.
    """
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
    """Names of the files of weights that are there or that its index asks for."""
    found = {path.name for path in folder.glob("*.safetensors")}
    if (folder / INDEX).is_file():
        listed = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        found |= set(listed["weight_map"].values())
    return sorted(found)


def stamp(folder: Path) -> list[tuple[str, int, int]]:
    """Tells weights apart without reading them: names, sizes and times of their files."""
    files = sorted(path for path in folder.iterdir() if path.suffix != ".jinja")
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def fingerprint(folder: Path) -> str | None:
    """Tells weights apart by blocks spread over their files, without reading all of them; None
    where there are none.
    """
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
