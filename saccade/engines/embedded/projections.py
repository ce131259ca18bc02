"""Fewer and larger products while the engine runs a model.

When few tokens are decoded a small product takes as long as a large one. So queries, keys and
values come from one product instead of three, and the adapters of layers that read the same input
from one narrow product together and one wide one each, which also adds to the layer's own output.
The engine keeps such matrices side by side, a twentieth of the weights, and copies them again
whenever they may have changed. What is quantised stays so.

    projections = Projections(model)
    projections.refresh()
    with projections.joined(): model(...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

NAMES = ("q_proj", "k_proj", "v_proj")
READERS = (NAMES, ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))  # of one input each
Forward = Callable[[Tensor], Tensor]


class Projections:
    def __init__(self, model: nn.Module) -> None:
        self.layers: list[_Joined] = []  # of queries, keys and values
        self.adapters: list[_Adapters] = []
        for module in model.modules():
            for names in READERS:
                parts = tuple(getattr(module, name, None) for name in names)
                if None in parts:
                    continue
                own: tuple[Any, ...] = tuple(getattr(part, "base_layer", part) for part in parts)
                joined = None
                if names == NAMES and hasattr(module, "layer_idx") and _joinable(own):
                    joined = _Joined(own)
                    self.layers.append(joined)
                if all(_adapted(part) for part in parts):
                    below = joined.forwards if joined else list(own)
                    self.adapters.append(_Adapters(parts, below))
        self._all: list[_Joined | _Adapters] = [*self.layers, *self.adapters]
        self._exchanged: list[tuple[nn.Module, Forward]] = [
            pair for layer in self._all for pair in zip(layer.parts, layer.forwards, strict=True)
        ]

    def refresh(self) -> None:
        for layer in self._all:
            layer.refresh()

    def joined(self) -> AbstractContextManager[None]:
        return exchanged(self._exchanged)


@contextmanager
def exchanged(forwards: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Inside, these modules have these forwards."""
    # Past nn.Module's own setter, which is slow: this happens at every look.
    before = [module.__dict__.get("forward") for module, _ in forwards]
    try:
        for module, forward in forwards:
            module.__dict__["forward"] = forward
        yield
    finally:
        for (module, _), own in zip(forwards, before, strict=True):
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = own


def _joinable(parts: tuple[Any, ...]) -> bool:
    return all(type(part) is nn.Linear and "forward" not in part.__dict__ for part in parts) and (
        len({part.bias is None for part in parts}) == 1
    )


def _adapted(part: Any) -> bool:
    """Exactly one adapter, of the plain kind, in use."""
    active = getattr(part, "active_adapters", ())
    return (
        len(active) == 1
        and len(getattr(part, "lora_A", ())) == 1
        and not part.merged
        and not part.disable_adapters
        and not part.lora_variant
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

    def _forward(self, index: int) -> Forward:
        def forward(x: Tensor) -> Tensor:
            if x is not self._read:
                self._read = x
                self._made = linear(x, self.weight, self.bias).split(self._widths, -1)
            made = self._made[index]
            if index == len(self.parts) - 1:
                self._read, self._made = None, ()
            return made

        return forward


class _Adapters:
    """Adapters of layers that read the same input: y = own(x) + (x A) B, with all A side by side
    and the scale in B.
    """

    def __init__(self, parts: tuple[Any, ...], below: list[Any]) -> None:
        self.parts, self.below = parts, below
        self.pairs = [
            (part.lora_A[name].weight, part.lora_B[name].weight, part.scaling[name])
            for part in parts
            for name in part.active_adapters
        ]
        self._ranks = [low.shape[0] for low, _, _ in self.pairs]
        first = self.pairs[0][0]
        self.low = first.new_empty((sum(self._ranks), first.shape[1]))
        self.high = [torch.empty_like(high) for _, high, _ in self.pairs]
        self._read: Tensor | None = None
        self._made: tuple[Tensor, ...] = ()
        self.forwards = [self._forward(index) for index in range(len(parts))]

    @torch.no_grad()
    def refresh(self) -> None:
        torch.cat([low.detach() for low, _, _ in self.pairs], out=self.low)
        for target, (_, high, scale) in zip(self.high, self.pairs, strict=True):
            torch.mul(high, scale, out=target)

    def _forward(self, index: int) -> Forward:
        def forward(x: Tensor) -> Tensor:
            if x is not self._read:
                self._read = x
                flat = x.reshape(-1, x.shape[-1]).to(self.low.dtype)
                self._made = linear(flat, self.low).split(self._ranks, -1)
            made = self._made[index]
            if index == len(self.parts) - 1:
                self._read, self._made = None, ()
            own = self.below[index](x)
            wide = own.reshape(-1, own.shape[-1]).to(made.dtype)
            return torch.addmm(wide, made, self.high[index].T).view_as(own).to(own.dtype)

        return forward
