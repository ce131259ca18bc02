"""Checkpoints: each is a Hugging Face folder that stock transformers loads, plus `state/` to resume from.

Written under a temporary name, verified, renamed; old ones are deleted only after that, so a kill at any moment leaves
the last good one. Tensors are safetensors, the rest is JSON: nothing is unpickled.

    write(run / "checkpoints", 50, files, weights, keep=3, best=None)
    find(run / "checkpoints", "auto")
"""

import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.filesize import decimal as size

from saccade.errors import ConfigError, EnvironmentProblem
from saccade.models.families import Family
from saccade.models.files import LISTING, STATE, checksum, damaged, header_of, listing
from saccade.system import disk
from saccade.system.contents import File, write_files

# Files of a model folder that are not copied, because a checkpoint writes its own.
REWRITTEN = re.compile(r"(.*\.(safetensors|bin|pt|pth|gguf|h5|msgpack)|.*\.index\.json|(adapter_)?config\.json)$")
# Files with the image processor's settings: its own, or `image_processor` in the processor's.
PROCESSOR = ("preprocessor_config.json", "processor_config.json")
NamedShape = tuple[str, tuple[int, ...]]  # name and shape of a parameter
HASHED_UP_TO = 64 << 20  # bytes; larger files in state/ are compared by size


def require_room(folder: Path, needed: int) -> None:
    """Raise unless there is room for one more checkpoint. What an interrupted write left behind is deleted."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".step-*"):
        shutil.rmtree(leftover)
    if (free := disk.free_disk_bytes(folder)) < needed:
        raise EnvironmentProblem(f"{folder}: a checkpoint needs up to {size(needed)}, {size(free)} are free")


def write(
    folder: Path, step: int, files: Iterable[File], weights: Sequence[NamedShape], *, keep: int, best: int | None
) -> None:
    """Write a checkpoint of these files, which must hold the `weights` (names and shapes). Then delete all others but
    the `keep` newest and the `best`.
    """
    final = folder / f"step-{step}"
    temporary = folder / f".step-{step}.{os.getpid()}"
    try:
        temporary.mkdir()
        write_files(temporary, files)
        _verify(temporary, weights)
        listed = {str(path.relative_to(temporary)): _entry(path, temporary) for path in _files(temporary)}
        (temporary / LISTING).write_text(json.dumps(listed, indent=1))
        for path in _files(temporary):
            _sync(path)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)  # free the space of half a checkpoint, as the disk may be full
        if (reason := disk.refusal(error)) is not None:
            raise EnvironmentProblem(f"{final}: {reason}") from error
        raise
    before = folder / f".step-{step}.before"
    if final.exists():  # renamed first, because deleting takes longer
        final.rename(before)
    temporary.rename(final)
    _sync(folder)
    shutil.rmtree(before, ignore_errors=True)
    there = complete_steps(folder)
    later = [n for n in there if n > step]  # of a run that resumed from an earlier step
    old = [n for n in there if n <= step][:-keep]
    for number in [*later, *(n for n in old if n not in (step, best))]:
        shutil.rmtree(folder / f"step-{number}")


def find(folder: Path, resume: str) -> Path | None:
    """Returns what `run.resume` names: the latest or best complete checkpoint, a path, or None. Its files are read once
    and compared with what was written.
    """
    for aside in folder.glob(".step-*.before"):  # of a kill between the two renames
        if not (final := folder / aside.stem[1:]).exists():
            aside.rename(final)
    steps = complete_steps(folder)
    if resume == "none" or (resume == "auto" and not steps):
        return None
    chosen = folder / f"step-{max(steps, default=0)}" if resume in ("auto", "best") else Path(resume)
    if _lacking(chosen):
        raise ConfigError(f"run.resume={resume}: no complete checkpoint there; use run.resume=auto")
    _require_intact(chosen)
    if resume == "best":  # the latest one records which was best
        best = read_progress(chosen).get("best_step")
        if best not in steps:
            raise ConfigError("run.resume=best: no validation has named a best checkpoint; use run.resume=auto")
        chosen = folder / f"step-{best}"
        _require_intact(chosen)
    return chosen


def read_progress(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "state" / "progress.json").read_text())


def complete_steps(folder: Path) -> list[int]:
    return sorted(step for path, step in _steps(folder).items() if is_complete(path))


def _steps(folder: Path) -> dict[Path, int]:
    """The steps of the checkpoint folders; copies under other names are ignored."""
    return {path: int(number) for path in folder.glob("step-*") if (number := path.name[5:]).isdecimal()}


def is_complete(checkpoint: Path) -> bool:
    return not _lacking(checkpoint)


def not_whole(folder: Path, *, after: int) -> dict[Path, str]:
    """Checkpoints of later steps that were complete once and no longer are, with what each lacks."""
    later = sorted(path for path, step in _steps(folder).items() if step > after)
    return {path: lacking for path in later if (lacking := _lacking(path))}


def _lacking(checkpoint: Path) -> str:
    """Returns what is missing; empty if every file that was written still exists at its size."""
    files = listing(checkpoint)
    if files is None:
        return f"{LISTING} is missing"
    for name, entry in files.items():
        try:
            size = (checkpoint / name).stat().st_size
        except FileNotFoundError:  # a run may remove old checkpoints while others look at them
            return f"{name} is missing"
        if size != entry["bytes"]:
            return f"{name} has {size:,} of {entry['bytes']:,} bytes"
    return ""


def _require_intact(checkpoint: Path) -> None:
    if changed := damaged(checkpoint):
        others = [checkpoint.parent / f"step-{step}" for step in reversed(complete_steps(checkpoint.parent))]
        other = next((path for path in others if path != checkpoint and not damaged(path)), None)
        remedy = f"continue from another checkpoint with run.resume={other}"
        if other is None:
            remedy = "no other checkpoint is whole: start again under another run.name"
        names = ", ".join(str(checkpoint / name) for name in changed)
        raise EnvironmentProblem(f"{names}: damaged, the content is not what the checkpoint wrote; {remedy}")


def copy_processor(family: Family, folder: Path) -> None:
    """Copy tokenizer, processor and chat template next to the weights. A template or pixel budget that the run replaced
    is stored as used.
    """
    for path in Path(family.path).iterdir():
        if path.is_file() and not REWRITTEN.match(path.name) and not (folder / path.name).exists():
            shutil.copy2(path, folder / path.name)
    if family.chat.template != family.chat.tokenizer.chat_template:
        (folder / "chat_template.jinja").write_text(family.chat.template, encoding="utf-8")
    for name in PROCESSOR if family.shown else ():
        path = folder / name
        settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if part := settings if name == PROCESSOR[0] else settings.get("image_processor"):
            part.update(family.shown)
            path.write_text(json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8")


def _verify(folder: Path, weights: Sequence[NamedShape]) -> None:
    """Raise unless the folder holds every parameter, a tied one once. On disk, names are those of transformers, so
    shapes are compared; experts are stored one by one, so the number of their elements is. `load_model` refuses a
    folder whose names do not fit.
    """
    from saccade.models.experts import MARK

    expected = Counter(shape for name, shape in weights if MARK not in name)
    headers = [found for path in folder.glob("*.safetensors") if isinstance(found := header_of(path), dict)]
    written = Counter(tuple(entry["shape"]) for header in headers for entry in header.values())
    missing, beside = expected - written, written - expected
    experts = sum(math.prod(shape) for name, shape in weights if MARK in name)
    lacking = experts - sum(math.prod(shape) * times for shape, times in beside.items())
    if missing or lacking > 0:
        lost = dict(missing) or f"{lacking:,} numbers of experts"
        raise EnvironmentProblem(f"checkpoint {folder.name}: parameters are missing on disk, by shape {lost}")


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def _entry(path: Path, folder: Path) -> dict[str, Any]:
    """Size of a file, and its hash unless it is large state. Weights are always hashed: all commands load them."""
    size = path.stat().st_size
    large = str(path.relative_to(folder)).startswith(STATE) and size > HASHED_UP_TO
    return {"bytes": size} if large else checksum(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
