"""Joins the weights of a DeepSpeed checkpoint, of any stage of ZeRO; those that ZeRO trained are float32. Reads only
tensors and plain values from its files; DeepSpeed is not needed. Also writes weights for DeepSpeed.

A folder such as `global_step100/` has one optimizer file per rank: a slice of the concatenated float32 master weights
(stages 1 and 2), or a slice of each master weight (stage 3). Model files have names, shapes and frozen weights: as
one fragment per rank with stage 3, else in full, with rounded copies of all other weights. Without ZeRO (stage 0) a
model file has all there is.

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
    """The folder with ZeRO files: this one, or the one named in its file `latest`; None if there are none."""
    latest = checkpoint / "latest"
    named = checkpoint / latest.read_text(encoding="utf-8").strip() if latest.is_file() else checkpoint
    return next((folder for folder in (checkpoint, named) if any(folder.glob(MODELS))), None)


def zero_weights(folder: Path) -> dict[str, Tensor]:
    """Returns the full tensors by name; tied weights occur once."""
    models = [_read(path) for path in _by_rank(folder, MODELS)]
    if models[0].get("module") is None:
        raise EnvironmentProblem(f"{folder}: files of pipeline stages are not read; use DeepSpeed's ds_to_universal.py")
    if not models[0].get("param_shapes"):  # stage 0
        return dict(models[0]["module"])
    states = [_read(path)["optimizer_state_dict"] for path in _by_rank(folder, OPTIMIZERS)]
    count, first = states[0]["partition_count"], models[0]
    count = max(count) if isinstance(count, list) else count
    if len(states) != count:
        raise EnvironmentProblem(f"{folder}: it has {len(states)} files {OPTIMIZERS} of {count} ranks; copy them all")
    third = "fp32_flat_groups" in states[0]  # `zero_stage` is a DeepSpeed enum, read as a stub
    names = first["buffer_names"] if third else first["module"].keys() - first["shared_params"].keys()
    found = {name: each for name, each in first["module"].items() if name in names}
    for name in found.keys() & set(first["buffer_names"]):
        found[name] = found[name].float() if found[name].is_floating_point() else found[name]
    for name, shape in (first["frozen_param_shapes"] or {}).items() if third else ():
        parts = [model["frozen_param_fragments"][name].view(-1) for model in models]
        found[name] = torch.cat(parts)[: prod(shape)].view(shape)
    joined = _of_every_weight if third else _end_to_end
    return found | dict(joined(folder, states, first["param_shapes"]))


def write_zero(weights: Mapping[str, Tensor], out: Path, step: int) -> Path:
    """Write what `engine.load_checkpoint(out, load_module_only=True)` of DeepSpeed reads with stages 0 to 2; returns
    the folder with the weights.
    """
    (folder := out / f"global_step{step}").mkdir(parents=True)
    torch.save({"module": dict(weights), "dp_world_size": 1}, folder / "mp_rank_00_model_states.pt")
    (out / "latest").write_text(folder.name, encoding="utf-8")
    return folder


def _end_to_end(folder: Path, states: Any, groups: Any) -> Iterator[tuple[str, Tensor]]:
    """Stages 1 and 2: the master weights of a group are concatenated, and each rank has a slice of the result."""
    paddings = states[0].get("param_alignment_paddings") or [[0] * len(shapes) for shapes in groups]
    for number, (shapes, beside) in enumerate(zip(groups, paddings, strict=True)):
        flat = torch.cat([state["single_partition_of_fp32_groups"][number] for state in states])
        start = 0
        for (name, shape), padding in zip(shapes.items(), beside, strict=True):
            yield name, flat[start:][: prod(shape)].view(shape).clone()  # a view would keep all of `flat`
            start += prod(shape) + padding
        _require_used(folder, start, len(flat), slack=2 * len(states))


def _of_every_weight(folder: Path, states: Any, groups: Any) -> Iterator[tuple[str, Tensor]]:
    """Stage 3: each rank has a slice of every master weight."""
    flats, start = [torch.cat([part.view(-1) for part in state["fp32_flat_groups"]]) for state in states], 0
    for name, shape in ((name, shape) for shapes in groups for name, shape in shapes.items()):
        part = -(-prod(shape) // len(states))
        yield name, torch.cat([flat[start:][:part] for flat in flats])[: prod(shape)].view(shape)
        start += part
    _require_used(folder, start, len(flats[0]), slack=1)


def _require_used(folder: Path, used: int, there: int, *, slack: int) -> None:
    """Raise unless all numbers are used, up to the padding that makes the ranks' slices equally long."""
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
    """Load a file. DeepSpeed objects, such as its loss scaler, become stubs; torch refuses all other classes."""
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
