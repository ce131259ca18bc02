"""Checkpoints: each a Hugging Face folder that stock transformers loads, plus `state/` to go on
from.

Written under a temporary name, verified, renamed; the old ones go only after that, so a kill at any
moment leaves the last good one. Tensors are safetensors, the rest is JSON: nothing is unpickled.

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

from saccade.errors import ConfigError, EnvironmentProblem
from saccade.models.families import Family
from saccade.models.files import LISTING, STATE, checksum, damaged, header_of, listing
from saccade.system import disk
from saccade.system.contents import File, write_files

# Files of a model folder that a checkpoint makes anew.
REWRITTEN = re.compile(r"(.*\.(safetensors|bin|pt|pth|gguf|h5|msgpack)|.*\.index\.json|(adapter_)?config\.json)$")
# Settings of the image processor: a separate file, or a part of that of the whole processor.
PROCESSOR = ("preprocessor_config.json", "processor_config.json")
NamedShape = tuple[str, tuple[int, ...]]  # name and shape of a parameter
HASHED_UP_TO = 64 << 20  # larger files of its state are compared by size


def require_room(folder: Path, needed: int) -> None:
    """For one more checkpoint, beside those that are there; what a kill left of one goes."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".step-*"):
        shutil.rmtree(leftover)
    if (free := disk.free_bytes(folder)) < needed:
        raise EnvironmentProblem(f"{folder}: a checkpoint needs up to {disk.size(needed)}, {disk.size(free)} are free")


def write(
    folder: Path, step: int, files: Iterable[File], weights: Sequence[NamedShape], *, keep: int, best: int | None
) -> None:
    """A checkpoint of these files, which must hold the `weights` (names and shapes). The `keep` newest
    ones stay beside it, and the `best`.
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
        shutil.rmtree(temporary, ignore_errors=True)  # a disk that is full has no room for half a checkpoint
        if (reason := disk.refusal(error)) is not None:
            raise EnvironmentProblem(f"{final}: {reason}") from error
        raise
    before = folder / f".step-{step}.before"
    if final.exists():  # first aside: to remove it takes longer
        final.rename(before)
    temporary.rename(final)
    _sync(folder)
    shutil.rmtree(before, ignore_errors=True)
    there = complete_steps(folder)
    later = [n for n in there if n > step]  # of a run that went back to an earlier step
    old = [n for n in there if n <= step][:-keep]
    for number in [*later, *(n for n in old if n not in (step, best))]:
        shutil.rmtree(folder / f"step-{number}")


def find(folder: Path, resume: str) -> Path | None:
    """What `run.resume` names: the latest or best complete checkpoint, a path, or nothing. Its
    files are read once and compared with what was written.
    """
    for aside in folder.glob(".step-*.before"):  # of a kill between two names
        if not (final := folder / aside.stem[1:]).exists():
            aside.rename(final)
    steps = complete_steps(folder)
    if resume == "none" or (resume == "auto" and not steps):
        return None
    chosen = folder / f"step-{max(steps, default=0)}" if resume in ("auto", "best") else Path(resume)
    if _lacking(chosen):
        raise ConfigError(f"run.resume={resume}: no complete checkpoint there; use run.resume=auto")
    _require_intact(chosen)
    if resume == "best":  # the latest says which one was best
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
    """Those of the checkpoints; a copy that somebody made beside them has another name."""
    return {path: int(number) for path in folder.glob("step-*") if (number := path.name[5:]).isdecimal()}


def is_complete(checkpoint: Path) -> bool:
    return not _lacking(checkpoint)


def not_whole(folder: Path, *, after: int) -> dict[Path, str]:
    """Checkpoints of later steps that were finished once and are not whole any more, and what each
    lacks.
    """
    later = sorted(path for path, step in _steps(folder).items() if step > after)
    found = {path: _lacking(path) for path in later}
    return {path: lacking for path, lacking in found.items() if lacking}


def _lacking(checkpoint: Path) -> str:
    """Empty where every file that was written is still there, as large as it was."""
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
    """Tokenizer, processor and template beside the weights; a template that the run replaced is
    stored as used, and so is its budget of pixels.
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


def tensor_shapes(folder: Path) -> list[tuple[int, ...]]:
    headers = [header_of(path) for path in folder.glob("*.safetensors")]
    return [tuple(entry["shape"]) for header in headers if isinstance(header, dict) for entry in header.values()]


def _verify(folder: Path, weights: Sequence[NamedShape]) -> None:
    """The folder holds every parameter, a tied one once. Names are transformers' own on disk, so
    shapes are compared, of experts (one by one on disk) their numbers; `load_model` refuses a
    folder whose names do not fit.
    """
    from saccade.models.experts import MARK

    expected = Counter(shape for name, shape in weights if MARK not in name)
    written = Counter(tensor_shapes(folder))
    missing, beside = expected - written, written - expected
    experts = sum(math.prod(shape) for name, shape in weights if MARK in name)
    lacking = experts - sum(math.prod(shape) * times for shape, times in beside.items())
    if missing or lacking > 0:
        lost = dict(missing) or f"{lacking:,} numbers of experts"
        raise EnvironmentProblem(f"checkpoint {folder.name}: parameters are missing on disk, by shape {lost}")


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def _entry(path: Path, folder: Path) -> dict[str, Any]:
    """What is known of a file. Weights are hashed however large: all commands load them."""
    size = path.stat().st_size
    large = str(path.relative_to(folder)).startswith(STATE) and size > HASHED_UP_TO
    return {"bytes": size} if large else checksum(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
