"""Queries, keys and values from one product instead of three, while the engine runs a model.

The two small products cost as much time as the large one when few tokens are decoded. The engine
keeps the three matrices of a layer side by side, a twentieth of the weights, and copies them again
whenever they may have changed. Layers with adapters or quantised weights stay as they are.

    projections = Projections(model)
    projections.refresh()
    with projections.joined(): model(...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

NAMES = ("q_proj", "k_proj", "v_proj")


class Projections:
    def __init__(self, model: nn.Module) -> None:
        found = [
            tuple(getattr(module, name) for name in NAMES)
            for module in model.modules()
            if hasattr(module, "layer_idx") and all(hasattr(module, name) for name in NAMES)
        ]
        self.layers = [_Joined(parts) for parts in found if _joinable(parts)]

    def refresh(self) -> None:
        for layer in self.layers:
            layer.refresh()

    @contextmanager
    def joined(self) -> Iterator[None]:
        # Written past nn.Module's own setter, which is slow: this happens at every look.
        for layer in self.layers:
            for part, forward in zip(layer.parts, layer.forwards, strict=True):
                part.__dict__["forward"] = forward
        try:
            yield
        finally:
            for layer in self.layers:
                for part in layer.parts:
                    del part.__dict__["forward"]


def _joinable(parts: tuple[nn.Module, ...]) -> bool:
    return all(type(part) is nn.Linear and "forward" not in part.__dict__ for part in parts) and (
        len({part.bias is None for part in parts}) == 1
    )


class _Joined:
    """The first of the three asked computes for all; the others find their columns."""

    def __init__(self, parts: tuple[nn.Linear, ...]) -> None:
        self.parts = parts
        widths = [part.out_features for part in parts]
        weight = parts[0].weight
        self.weight = torch.empty(
            (sum(widths), weight.shape[1]), dtype=weight.dtype, device=weight.device
        )
        self.bias = None if parts[0].bias is None else self.weight.new_empty(sum(widths))
        self._read: Tensor | None = None
        self._made: tuple[Tensor, ...] = ()
        self._widths = widths
        self.forwards = [self._forward(index) for index in range(len(parts))]

    def refresh(self) -> None:
        torch.cat([part.weight.detach() for part in self.parts], out=self.weight)
        if self.bias is not None:
            torch.cat([part.bias.detach() for part in self.parts], out=self.bias)

    def _forward(self, index: int) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            if x is not self._read:
                self._read = x
                self._made = linear(x, self.weight, self.bias).split(self._widths, -1)
            made = self._made[index]
            if index == len(self.parts) - 1:
                self._read, self._made = None, ()
            return made

        return forward
