"""Load a model without any rank ever holding all weights: each keeps its rows of every weight on its device, and only
the weights that are in use are gathered.

A weight that is not gathered has its shape, dtype and device, but is one NaN in memory, expanded; its attribute `rows`
holds the rank's rows. All ranks of a group must call `make_whole` for the same weights in the same order.

    model = load_model(family, dtype=dtype, device=device, by_rows=ByRows(group))
    for layer in blocks_of(model): make_whole(layer.parameters())      # gathered for good
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from saccade.config import TrainConfig
from saccade.models.families import Family
from saccade.models.heads import blocks_of
from saccade.plugins.ranks.divided import all_gather
from saccade.plugins.ranks.machines import grid

AHEAD = "HF_DEACTIVATE_ASYNC_LOAD"  # else transformers loads ahead, and may have all weights in memory


@dataclass(frozen=True)
class ByRows:
    """How `load_model` loads a model that is sharded by rows over the ranks of a group."""

    group: Any

    def read(self, load: Callable[[], tuple[Any, Any]], family: Family, device: torch.device) -> tuple[Any, Any]:
        """Call `load` (a `from_pretrained`), keeping only this rank's rows while it runs; towers stay whole."""
        shapes: set[torch.Size] = set()  # of embeddings, cut later: transformers compares them with the head for tying

        def keep(module: nn.Module, name: str, weight: nn.Parameter | None) -> None:
            if weight is None:
                return
            if weight.is_meta and isinstance(module, nn.Embedding):
                shapes.add(weight.shape)
            if getattr(weight, "_is_hf_initialized", False) and weight.shape not in shapes:
                self._cut(weight, device)

        before, os.environ[AHEAD] = os.environ.get(AHEAD, ""), "1"
        watching = register_module_parameter_registration_hook(keep)
        try:
            model, info = load()
        finally:
            watching.remove()
            os.environ[AHEAD] = before
        whole = {id(weight) for weight in undivided(model, family)}
        for weight in model.parameters():
            if id(weight) in whole:
                make_whole([weight])
            elif not weight.is_meta:
                self._cut(weight, device)
        return model, info

    def _cut(self, weight: Any, device: torch.device) -> None:
        if hasattr(weight, "rows") or not weight.ndim:
            return
        count = -(-len(weight) // self.group.size())
        mine = weight.detach()[self.group.rank() * count :][:count]
        weight.rows, weight.group = mine.to(device, copy=True), self.group
        keep_rows([weight])

    @contextmanager
    def running(self, model: nn.Module) -> Iterator[None]:
        """Context manager in which the model can run: a layer is gathered for its forward, other weights throughout."""
        others, hooks = _beside_layers(model), list[Any]()
        for layer in blocks_of(model):
            hooks.append(layer.register_forward_pre_hook(lambda one, _: make_whole(one.parameters(), keep=True)))
            hooks.append(layer.register_forward_hook(lambda one, *_: keep_rows(one.parameters()), always_call=True))
        make_whole(others, keep=True)
        try:
            yield
        finally:
            keep_rows(others)
            for hook in hooks:
                hook.remove()

    def pieces(self, model: nn.Module) -> Iterator[nn.Module]:
        """Yield each layer, gathered, and then the model with all weights outside of layers gathered."""
        for piece in (*blocks_of(model), model):
            weights = _beside_layers(model) if piece is model else list(piece.parameters())
            make_whole(weights, keep=True)
            yield piece
            keep_rows(weights)


def by_rows_of(train: TrainConfig, device: torch.device) -> ByRows | None:
    """None if each rank holds all weights."""
    if train.layout == "whole":
        return None
    return ByRows(grid(device.type)["gpus"].get_group() if train.layout == "hybrid" else dist.group.WORLD)


def undivided(model: Any, family: Family) -> list[nn.Parameter]:
    """The weights that every rank holds whole: towers, score heads, and weights of another dtype, because an FSDP group
    has only one; all weights of a 4-bit model.
    """
    kind, named = model.get_input_embeddings().weight.dtype, dict(model.named_parameters())
    if not all(p.is_floating_point() for p in named.values()):
        return [*named.values()]
    score = {id(p) for p in getattr(model, "score", nn.Module()).parameters()}
    return [p for n, p in named.items() if family.tower_of(n) != "llm" or p.dtype != kind or id(p) in score]


def _beside_layers(model: nn.Module) -> list[nn.Parameter]:
    inside = {id(weight) for layer in blocks_of(model) for weight in layer.parameters()}
    return [weight for weight in model.parameters() if id(weight) not in inside]


def make_whole(weights: Iterable[Any], *, keep: bool = False) -> None:
    """Gather the weights; with `keep` their rows stay, too, so that `keep_rows` can free the rest again."""
    for weight in [weight for weight in weights if hasattr(weight, "rows")]:
        weight.data = joined_rows(weight.rows, weight.shape, weight.group)
        if not keep:
            del weight.rows, weight.group


def keep_rows(weights: Iterable[Any]) -> None:
    """Free gathered weights; only this rank's rows stay in memory."""
    for weight in [weight for weight in weights if hasattr(weight, "rows")]:
        weight.data = weight.rows.new_full((1,), torch.nan).expand(weight.shape)


def joined_rows(mine: Tensor, shape: torch.Size, group: Any) -> Tensor:
    """All-gather the rows of a group. Ranks hold equally many; at the end one may hold fewer, and others none."""
    rows = -(-shape[0] // group.size())
    padded = mine.new_zeros(rows, *shape[1:])
    padded[: len(mine)] = mine
    everything = mine.new_empty(rows * group.size(), *shape[1:])
    all_gather(everything, padded, group=group)
    return everything[: shape[0]]
