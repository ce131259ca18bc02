"""Fewer kernels in a decode step, where many of them take longer to start than to run.

A sum and the norm that follows it are one kernel, also across layers: the sum that ends a layer is
normed for the next one, which finds it there. For few rows, the two halves of a gated layer and
their product are one, too. Layers of another build keep their own forward.

    with exchanged(joined_forwards(model)): model(...)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from saccade.engines.embedded.projections import exchanged
from saccade.engines.embedded.rows import FEW

PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
HALVES = ("gate_proj", "up_proj")
Forward = Callable[..., Any]


def joined_forwards(model: nn.Module) -> list[tuple[nn.Module, Forward]]:
    """Modules, and what to exchange their forwards for while a step decodes."""
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
    following = [_Handed(n) for n in (*(layer.input_layernorm for layer in layers[1:]), norm)]
    return [
        *((handed.norm, handed.take) for handed in following),
        *((layer, _layer(layer, handed)) for layer, handed in zip(layers, following, strict=True)),
        *((layer.mlp, _gated(layer.mlp)) for layer in layers if _projectable(layer.mlp)),
    ]


# -- sums and norms --------------------------------------------------------------------------------


class _Handed:
    """What a norm will give for the sum that was computed last: known by its identity, as no model
    writes into a state between two layers while it decodes.
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


def _layer(layer: Any, following: _Handed) -> Forward:
    def forward(hidden_states: Tensor, **options: Any) -> Tensor:
        normed = layer.input_layernorm(hidden_states)
        attended, _ = layer.self_attn(hidden_states=normed, **options)
        hidden, normed = _add_norm(hidden_states, attended, layer.post_attention_layernorm)
        return following.add(hidden, layer.mlp(normed))

    return forward


def _add_norm(x: Tensor, y: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    if hasattr(type(norm), "plain"):  # known to be a root mean square norm, on a GPU
        from saccade.forest.kernels.norm import add_norm

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
    """Whether its own forward adds and norms in this order: told with two stand-ins."""
    weight = layer.input_layernorm.weight
    drawn = torch.randn((1, 4, weight.shape[-1]), generator=torch.Generator().manual_seed(0))
    x = drawn.to(weight.device, weight.dtype)
    stand_ins = (
        (layer.self_attn, lambda hidden_states, **options: (hidden_states.square(), None)),
        (layer.mlp, torch.sin),
    )
    with exchanged(stand_ins):
        try:
            own = layer(x, attention_mask=None, position_embeddings=None)
        except (AttributeError, TypeError, ValueError, RuntimeError):
            return False  # it calls its parts otherwise, so it is of another build
        ours = _layer(layer, _Handed(layer.input_layernorm))(x)
    return isinstance(own, Tensor) and torch.allclose(ours, own, rtol=0.02, atol=0.02)


# -- gated layers ----------------------------------------------------------------------------------


def _projectable(mlp: Any) -> bool:
    if not hasattr(type(mlp), "plain"):  # known to be gated by silu, on a GPU
        return False
    from saccade.forest.kernels.gate import TILE

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
        from saccade.forest.kernels.gate import project

        flat = x.flatten(0, -2)
        if len(flat) > FEW:
            return type(mlp).forward(mlp, x)
        product = project(flat, mlp.gate_proj.weight, mlp.up_proj.weight)
        return mlp.down_proj(product.view(*x.shape[:-1], -1))

    return forward
