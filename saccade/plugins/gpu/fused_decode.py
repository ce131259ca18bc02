"""Fewer and larger kernels while the engine runs a model.

When few tokens are decoded, many kernels take longer to start than to run, and a small product
takes as long as a large one. `Projections`: queries, keys and values come from one product instead
of three, and the adapters of layers that read the same input from one narrow product together and
one wide one each, which also adds to the layer's output. The engine keeps such matrices side by
side, a twentieth of the weights, and copies them again whenever they may have changed; what is
quantised stays so. `fused_forwards`: a sum and the norm that follows it are one kernel, also across
layers: the sum that ends a layer is normed for the next one. For few rows, the two halves of a
gated layer and their product are one kernel, too. Layers of another build keep their forward.

    projections.refresh()
    with projections.joined(), swapped_forwards(fused_forwards(model)): model(...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from saccade.plugins.gpu.decode_state import FEW_ROWS

NAMES = ("q_proj", "k_proj", "v_proj")
READERS = (NAMES, ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))  # of one input each
Forward = Callable[..., Any]
PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
HALVES = ("gate_proj", "up_proj")


# -- projections -----------------------------------------------------------------------------------


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
        self._all: list[_Shared] = [*self.layers, *self.adapters]
        self._forwards: list[tuple[nn.Module, Forward]] = [
            pair for layer in self._all for pair in zip(layer.parts, layer.forwards, strict=True)
        ]

    def refresh(self) -> None:
        for layer in self._all:
            layer.refresh()

    def joined(self) -> AbstractContextManager[None]:
        return swapped_forwards(self._forwards)


@contextmanager
def swapped_forwards(forwards: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Inside, these modules have these forwards."""
    # Past the setter of nn.Module, which is slow: this happens at every poll.
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


class _Shared:
    """Layers that read the same input: the first one asked computes for all of them."""

    refresh: Callable[[], None]
    _compute: Callable[[Tensor], tuple[Tensor, ...]]

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts = parts
        self._read: Tensor | None = None
        self._made: tuple[Tensor, ...] = ()
        self.forwards: list[Forward] = [partial(self._forward, i) for i in range(len(parts))]

    def _take(self, index: int, x: Tensor) -> Tensor:
        if x is not self._read:
            self._read, self._made = x, self._compute(x)
        made = self._made[index]
        if index == len(self.parts) - 1:
            self._read, self._made = None, ()
        return made

    def _forward(self, index: int, x: Tensor) -> Tensor:
        return self._take(index, x)


class _Joined(_Shared):
    """Queries, keys and values as columns of one product."""

    def __init__(self, parts: tuple[nn.Linear, ...]) -> None:
        super().__init__(parts)
        self._widths = [part.out_features for part in parts]
        weight = parts[0].weight
        self.weight = weight.new_empty((sum(self._widths), weight.shape[1]))
        self.bias = None if parts[0].bias is None else self.weight.new_empty(sum(self._widths))

    def refresh(self) -> None:
        torch.cat([part.weight.detach() for part in self.parts], out=self.weight)
        if self.bias is not None:
            torch.cat([part.bias.detach() for part in self.parts], out=self.bias)

    def _compute(self, x: Tensor) -> tuple[Tensor, ...]:
        return linear(x, self.weight, self.bias).split(self._widths, -1)


class _Adapters(_Shared):
    """Adapters: y = below(x) + (x A) B, with all A side by side and the scale in B."""

    def __init__(self, parts: tuple[Any, ...], below: list[Any]) -> None:
        super().__init__(parts)
        self.below = below
        self.pairs = [
            (part.lora_A[name].weight, part.lora_B[name].weight, part.scaling[name])
            for part in parts
            for name in part.active_adapters
        ]
        self._ranks = [low.shape[0] for low, _, _ in self.pairs]
        first = self.pairs[0][0]
        self.low = first.new_empty((sum(self._ranks), first.shape[1]))
        self.high = [torch.empty_like(high) for _, high, _ in self.pairs]

    @torch.no_grad()
    def refresh(self) -> None:
        torch.cat([low.detach() for low, _, _ in self.pairs], out=self.low)
        for target, (_, high, scale) in zip(self.high, self.pairs, strict=True):
            torch.mul(high, scale, out=target)

    def _compute(self, x: Tensor) -> tuple[Tensor, ...]:
        flat = x.reshape(-1, x.shape[-1]).to(self.low.dtype)
        return linear(flat, self.low).split(self._ranks, -1)

    def _forward(self, index: int, x: Tensor) -> Tensor:
        made, own = self._take(index, x), self.below[index](x)
        wide = own.reshape(-1, own.shape[-1]).to(made.dtype)
        return torch.addmm(wide, made, self.high[index].T).view_as(own).to(own.dtype)


# -- layers ----------------------------------------------------------------------------------------


def fused_forwards(model: nn.Module) -> list[tuple[nn.Module, Forward]]:
    """Modules, and the forwards to swap in while a step decodes."""
    found: list[tuple[nn.Module, Forward]] = []
    for stack in model.modules():
        layers, norm = getattr(stack, "layers", None), getattr(stack, "norm", None)
        if isinstance(layers, nn.ModuleList) and norm is not None:
            found += _of_stack(layers, norm)
    return found


def _of_stack(layers: Any, norm: Any) -> list[tuple[nn.Module, Forward]]:
    alike = len({type(layer) for layer in layers}) == 1 and all(map(_usual, layers))
    if not alike or not _agrees(layers[0]):
        return []
    following = [PrecomputedNorm(n) for n in (*(layer.input_layernorm for layer in layers[1:]), norm)]
    return [
        *((precomputed.norm, precomputed.take) for precomputed in following),
        *((layer, _layer(layer, precomputed)) for layer, precomputed in zip(layers, following, strict=True)),
        *((layer.mlp, _gated(layer.mlp)) for layer in layers if _projectable(layer.mlp)),
    ]


# -- sums and norms --------------------------------------------------------------------------------


class PrecomputedNorm:
    """What a norm gives for the sum that was computed last, recognised by identity: no model writes
    into a state between two layers while it decodes.
    """

    def __init__(self, norm: Any) -> None:
        self.norm = norm
        self._made: tuple[Tensor, Tensor] | None = None

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        self._made = _add_norm(x, y, self.norm)
        return self._made[0]

    def take(self, x: Tensor) -> Tensor:
        made, self._made = self._made, None
        return made[1] if made and made[0] is x else type(self.norm).forward(self.norm, x)


def _layer(layer: Any, following: PrecomputedNorm) -> Forward:
    def forward(hidden_states: Tensor, **options: Any) -> Tensor:
        normed = layer.input_layernorm(hidden_states)
        attended, _ = layer.self_attn(hidden_states=normed, **options)
        hidden, normed = _add_norm(hidden_states, attended, layer.post_attention_layernorm)
        return following.add(hidden, layer.mlp(normed))

    return forward


def _add_norm(x: Tensor, y: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    if hasattr(type(norm), "plain"):  # known to be a root mean square norm, on a GPU
        from saccade.plugins.gpu.norm import add_norm

        return add_norm(x, y, norm.weight, norm.variance_epsilon)
    total = x + y
    return total, type(norm).forward(norm, total)


def _usual(layer: Any) -> bool:
    return (
        {name for name, _ in layer.named_children()} == PARTS
        and all(hasattr(layer.mlp, name) for name in (*HALVES, "down_proj"))
        and hasattr(layer.input_layernorm, "weight")
    )


@torch.no_grad()
def _agrees(layer: Any) -> bool:
    """Whether its forward adds and norms in this order, found with two stand-ins."""
    weight = layer.input_layernorm.weight
    drawn = torch.randn((1, 4, weight.shape[-1]), generator=torch.Generator().manual_seed(0))
    x = drawn.to(weight.device, weight.dtype)
    stand_ins = (
        (layer.self_attn, lambda hidden_states, **options: (hidden_states.square(), None)),
        (layer.mlp, torch.sin),
    )
    with swapped_forwards(stand_ins):
        try:
            own = layer(x, attention_mask=None, position_embeddings=None)
        except (AttributeError, TypeError, ValueError, RuntimeError):
            return False  # it calls its parts in another way
        ours = _layer(layer, PrecomputedNorm(layer.input_layernorm))(x)
    return isinstance(own, Tensor) and torch.allclose(ours, own, rtol=0.02, atol=0.02)


# -- gated layers ----------------------------------------------------------------------------------


def _projectable(mlp: Any) -> bool:
    if not hasattr(type(mlp), "plain"):  # known to be gated by silu, on a GPU
        return False
    from saccade.plugins.gpu.gate import TILE

    halves = [getattr(mlp, name) for name in HALVES]
    return all(
        type(half) is nn.Linear
        and half.bias is None
        and half.weight.is_contiguous()
        and not any(size % TILE for size in half.weight.shape)
        for half in halves
    )


def _gated(mlp: Any) -> Forward:
    def forward(x: Tensor) -> Tensor:
        from saccade.plugins.gpu.gate import project

        flat = x.flatten(0, -2)
        if len(flat) > FEW_ROWS:
            return type(mlp).forward(mlp, x)
        product = project(flat, mlp.gate_proj.weight, mlp.up_proj.weight)
        return mlp.down_proj(product.view(*x.shape[:-1], -1))

    return forward
