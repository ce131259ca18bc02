"""The names of the weights that are loaded into vLLM, and where it stores them.

Names are compared as vLLM reads them (its model class renames prefixes of a folder), before its
loader fuses some tensors. Checksums are taken of tensors that vLLM stores unchanged: whole
parameters, and slices of fused ones; on a CPU vLLM packs the matrices of linear layers, so only
norms, embeddings, biases and convolutions remain. Knows nothing of engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from torch import Tensor

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
CHECKED = 16  # tensors checked per weight update, others the next time


Place = tuple[str, int, int]  # rows of a parameter: its name, the first one, and how many


def place_of(name: str, shapes: Mapping[str, tuple[int, ...]], parameters: Mapping[str, Tensor]) -> Place | None:
    """Where vLLM stores a tensor unchanged; None if it does not."""
    rows = shapes[name][0]
    if name in parameters:
        return (name, 0, rows) if tuple(parameters[name].shape) == shapes[name] else None
    for fused, parts in FUSED.items():
        for number, part in enumerate(parts):
            if f".{part}." in name:
                whole = name.replace(f".{part}.", f".{fused}.")
                sizes = [shapes.get(name.replace(f".{part}.", f".{p}."), (0,))[0] for p in parts]
                fits = whole in parameters and len(parameters[whole]) == sum(sizes)
                return (whole, sum(sizes[:number]), rows) if fits else None
    return None


def sample_for(places: Mapping[str, Place], turn: int) -> dict[str, Place]:
    """The places to check in a turn; every place is checked after a few turns."""
    names = sorted(places)
    start = turn * CHECKED % max(1, len(names))
    return {name: places[name] for name in (names + names)[start : start + CHECKED]}


def renaming(model_config: Any) -> Callable[[str], str]:
    """Maps a name in a folder to that of vLLM's model class, before fusing; empty: the tensor is ignored."""
    from vllm.model_executor.model_loader.utils import get_model_architecture

    mapper = getattr(get_model_architecture(model_config)[0], "hf_to_vllm_mapper", None)
    if mapper is None:
        return lambda name: name
    if getattr(mapper, "orig_to_new_stacked", None):
        mapper = replace(mapper, orig_to_new_stacked={})
    return cache(lambda name: "".join(mapper.apply_list([name])))
