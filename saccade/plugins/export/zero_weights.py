"""The weights of a checkpoint that DeepSpeed's ZeRO has written, stage 1, 2 or 3: its ranks' parts joined, in float32
where they were trained. Only tensors and plain values are read of its files; DeepSpeed itself is not needed.

A folder such as `global_step100/` has one file of an optimizer for each rank, with its stretch of all masters end to
end (stages 1 and 2), or of every master (stage 3), and files with names and shapes and with what was frozen: in parts
with stage 3, else with all other weights of the model, rounded.

    weights = zero_weights(Path("checkpoint-100/global_step100"))
"""

import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saccade.errors import EnvironmentProblem

OPTIMIZERS, MODELS = "*_optim_states.pt", "*_model_states.pt"


def zero_folder(checkpoint: Path) -> Path | None:
    """The folder with its files: this one, or the one that its file `latest` names; None: no checkpoint of ZeRO."""
    latest = checkpoint / "latest"
    named = checkpoint / latest.read_text(encoding="utf-8").strip() if latest.is_file() else checkpoint
    return next((folder for folder in (checkpoint, named) if any(folder.glob(OPTIMIZERS))), None)


def zero_weights(folder: Path) -> dict[str, Tensor]:
    """By name. What is tied is there once."""
    models = [_read(path) for path in _by_rank(folder, MODELS)]
    states = [_read(path)["optimizer_state_dict"] for path in _by_rank(folder, OPTIMIZERS)]
    count, first = states[0]["partition_count"], models[0]
    count = max(count) if isinstance(count, list) else count
    if len(states) != count:
        raise EnvironmentProblem(f"{folder}: it has {len(states)} files {OPTIMIZERS} of {count} ranks; copy them all")
    third = "fp32_flat_groups" in states[0]  # its number is an object of DeepSpeed
    names = first["buffer_names"] if third else first["module"].keys() - first["shared_params"].keys()
    found = {name: each for name, each in first["module"].items() if name in names}
    for name in found.keys() & set(first["buffer_names"]):
        found[name] = found[name].float() if found[name].is_floating_point() else found[name]
    for name, shape in (first["frozen_param_shapes"] or {}).items() if third else ():
        parts = [model["frozen_param_fragments"][name].view(-1) for model in models]
        found[name] = torch.cat(parts)[: prod(shape)].view(shape)
    joined = _of_every_weight if third else _end_to_end
    return found | dict(joined(folder, states, first["param_shapes"]))


def _end_to_end(folder: Path, states: Any, groups: Any) -> Iterator[tuple[str, Tensor]]:
    """Stages 1 and 2: the masters of a group lie end to end, and each rank has a stretch of that."""
    paddings = states[0].get("param_alignment_paddings") or [[0] * len(shapes) for shapes in groups]
    for number, (shapes, beside) in enumerate(zip(groups, paddings, strict=True)):
        flat = torch.cat([state["single_partition_of_fp32_groups"][number] for state in states])
        start = 0
        for (name, shape), padding in zip(shapes.items(), beside, strict=True):
            yield name, flat[start:][: prod(shape)].view(shape).clone()  # else each would keep all
            start += prod(shape) + padding
        _require_used(folder, start, len(flat), slack=2 * len(states))


def _of_every_weight(folder: Path, states: Any, groups: Any) -> Iterator[tuple[str, Tensor]]:
    """Stage 3: each rank has a part of every master."""
    flats, start = [torch.cat([part.view(-1) for part in state["fp32_flat_groups"]]) for state in states], 0
    for name, shape in ((name, shape) for shapes in groups for name, shape in shapes.items()):
        part = -(-prod(shape) // len(states))
        yield name, torch.cat([flat[start:][:part] for flat in flats])[: prod(shape)].view(shape)
        start += part
    _require_used(folder, start, len(flats[0]), slack=1)


def _require_used(folder: Path, used: int, there: int, *, slack: int) -> None:
    """Ranks pad their parts to equal lengths."""
    if not 0 <= there - used < slack:
        raise EnvironmentProblem(f"{folder}: its weights have {used:,} numbers, its optimizer {there:,}; copy it again")


def _by_rank(folder: Path, pattern: str) -> list[Path]:
    found = [*folder.glob(pattern)]
    files = {tuple(map(int, re.findall(r"rank_(\d+)", path.name))): path for path in found}
    if not files:
        raise EnvironmentProblem(f"{folder}: no file {pattern} is there; copy the whole folder")
    if any(ranks[-1:] != (0,) for ranks in files) or any(re.search("expert_|expp_", path.name) for path in found):
        why = "tensors that several GPUs divide (tensor or pipeline parallelism) or experts of single ranks"
        raise EnvironmentProblem(f"{folder}: {why} are not read; use ds_to_universal.py of DeepSpeed")
    return [files[ranks] for ranks in sorted(files)]


def _read(path: Path) -> Mapping[str, Any]:
    """Objects of DeepSpeed, as its loss scaler, become empty ones; torch refuses all others that are no tensors."""
    try:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        stubs: list[Any] = [(_Stub, name) for name in unknown if name.startswith("deepspeed.")]
        with torch.serialization.safe_globals(stubs):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        why = str(error).splitlines()[0]
        raise EnvironmentProblem(f"{path}: {why}; it is no file of ZeRO, or not whole") from error


class _Stub:
    def __init__(self, *arguments: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...
