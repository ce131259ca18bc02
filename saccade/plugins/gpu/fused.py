"""Norms, gated layers and rotary embeddings of a model in half precision on a GPU: the same
functions in fewer passes over memory, and with less kept for backward.

A part is exchanged only after its own forward and the fused one have been compared; other devices
and types run its own. Knows nothing of families.

    fuse(model)
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, rms_norm

from saccade.forest.attention import HALF
from saccade.forest.device_ops import has_kernels


def fuse(model: Any) -> list[str]:
    """Exchange what can be; the names of the classes and functions that were."""
    if not _applies(torch.empty(0, device=model.device, dtype=model.dtype)):
        return []
    rotated = _fuse_rotary(model)
    proved: dict[type, bool] = {}
    for module in list(model.modules()):
        kind = type(module)
        for width_of, forward in FUSED:
            width = width_of(module)
            if width is None or hasattr(kind, "plain"):
                continue
            if kind not in proved:
                proved[kind] = _agrees(module, forward, width, model)
            if proved[kind]:
                module.__class__ = _fused_class(kind, forward)  # type: ignore[arg-type]
    return sorted([*rotated, *(kind.__name__ for kind, same in proved.items() if same)])


@functools.cache
def _fused_class(kind: Any, forward: Callable[[Any, Tensor], Tensor]) -> type:
    def choose(self: Any, x: Tensor) -> Tensor:
        return forward(self, x) if _applies(x) else kind.forward(self, x)

    return type(f"Fused{kind.__name__}", (kind,), {"forward": choose, "plain": kind})


def _applies(x: Tensor) -> bool:
    return has_kernels(x.device) and x.dtype in HALF


@torch.no_grad()
def _agrees(module: nn.Module, forward: Callable[[Any, Tensor], Tensor], width: int, model: Any) -> bool:
    x = _random((4, width), model)
    return _near(forward(module, x), module(x))


def _random(shape: tuple[int, ...], model: Any) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    return drawn.to(model.device, model.dtype)


def _near(found: Tensor, wanted: Tensor) -> bool:
    """A few roundings apart at most."""
    limit = 8 * torch.finfo(wanted.dtype).eps
    return bool((found.float() - wanted.float()).norm() <= limit * wanted.float().norm())


# -- root mean square norms ------------------------------------------------------------------------


def _norm_width(module: Any) -> int | None:
    plain = [name for name, _ in module.named_parameters()] == ["weight"] and hasattr(module, "variance_epsilon")
    gated = plain and "gate" in inspect.signature(module.forward).parameters
    return module.weight.shape[-1] if plain and not gated else None


def _norm(self: Any, x: Tensor) -> Tensor:
    return rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


# -- gated layers ----------------------------------------------------------------------------------


def _gated_width(module: Any) -> int | None:
    children = dict(module.named_children())
    if children.keys() != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return None
    silu = "silu" in type(module.act_fn).__name__.lower()
    return module.gate_proj.in_features if silu else None


def _gated(self: Any, x: Tensor) -> Tensor:
    gate, up, down = self.gate_proj, self.up_proj, self.down_proj
    if not all(type(layer) is nn.Linear for layer in (gate, up, down)):
        return down(_Gate.apply(gate(x), up(x)))  # adapters or quantised: they have own forwards
    # Matrices whose rows are no multiple of 16 bytes go through kernels of half the speed.
    missing = -gate.out_features % 8
    if not missing:
        return _GatedLinear.apply(gate(x), up(x), down.weight, down.bias)
    halves = [
        linear(x, pad(h.weight, (0, 0, 0, missing)), None if h.bias is None else pad(h.bias, (0, missing)))
        for h in (gate, up)
    ]
    return _GatedLinear.apply(*halves, pad(down.weight, (0, missing)), down.bias)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        from saccade.plugins.gpu.gate import multiply

        ctx.save_for_backward(gate, up)
        return multiply(gate, up)

    @staticmethod
    def backward(ctx: Any, to_product: Tensor) -> tuple[Tensor, Tensor]:
        from saccade.plugins.gpu.gate import gradients

        gate, up = ctx.saved_tensors
        return gradients(gate, up, to_product)[1:]


class _GatedLinear(torch.autograd.Function):
    """The product that enters the matrix is made again in backward rather than kept."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        from saccade.plugins.gpu.gate import multiply

        ctx.save_for_backward(gate, up, weight)
        return linear(multiply(gate, up), weight, bias)

    @staticmethod
    def backward(ctx: Any, to_out: Tensor) -> tuple[Tensor | None, ...]:
        from saccade.plugins.gpu.gate import gradients

        gate, up, weight = ctx.saved_tensors
        product, to_gate, to_up = gradients(gate, up, to_out @ weight)
        flat = to_out.flatten(0, -2)
        _, _, wants_weight, wants_bias = ctx.needs_input_grad
        to_weight = flat.t() @ product.flatten(0, -2) if wants_weight else None
        return to_gate, to_up, to_weight, flat.sum(0) if wants_bias else None


# -- rotary embeddings -----------------------------------------------------------------------------


def _fuse_rotary(model: Any) -> list[str]:
    """Attention modules call these functions by their name in the file that defines them."""
    files = {sys.modules[type(module).__module__] for module in model.modules()}
    found = []
    for file in files:
        for name, (fused, shapes) in ROTARY.items():
            plain = getattr(file, name, None)
            if plain is None or hasattr(plain, "plain") or not {"q", "k"} <= signature(plain).parameters.keys():
                continue
            arguments = [_random(shape, model) for shape in shapes]
            if all(map(_near, fused(plain, *arguments), plain(*arguments))):
                setattr(file, name, functools.update_wrapper(functools.partial(fused, plain), plain))
                getattr(file, name).plain = plain
                found.append(f"{file.__name__}.{name}")
    return found


def _rotary(plain: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **options: Any) -> Any:
    """q and k [1, H, T, D], cos and sin [1, T, D]."""
    usual = not more and not options and q.ndim == 4 and cos.shape == (1, q.shape[2], q.shape[3])
    if not usual or not _applies(q):
        return plain(q, k, cos, sin, *more, **options)
    turned = _Rotate.apply(*(x.squeeze(0).transpose(0, 1) for x in (q, k)), cos[0], sin[0])
    return tuple(x.transpose(0, 1).unsqueeze(0) for x in turned)


def _vision_rotary(plain: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """q and k [T, H, D], cos and sin [T, D]."""
    if q.ndim != 3 or cos.shape != (q.shape[0], q.shape[2]) or not _applies(q):
        return plain(q, k, cos, sin)
    return _Rotate.apply(q, k, cos, sin)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        from saccade.plugins.gpu.rotary import rotate

        ctx.save_for_backward(cos, sin)
        return rotate(q, k, cos, sin)

    @staticmethod
    def backward(ctx: Any, to_q: Tensor, to_k: Tensor) -> tuple[Tensor | None, ...]:
        from saccade.plugins.gpu.rotary import rotate

        return *rotate(to_q, to_k, *ctx.saved_tensors, back=True), None, None


# (width of the input of a module of the kind, else None; its fused forward)
FUSED: tuple[tuple[Callable[[Any], int | None], Callable[[Any, Tensor], Tensor]], ...] = (
    (_norm_width, _norm),
    (_gated_width, _gated),
)
# name → (fused function of the plain one and its arguments; shapes of arguments to compare on)
ROTARY: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "apply_rotary_pos_emb": (_rotary, ((1, 4, 6, 32), (1, 2, 6, 32), (1, 6, 32), (1, 6, 32))),
    "apply_rotary_pos_emb_vision": (_vision_rotary, ((6, 4, 32), (6, 4, 32), (6, 32), (6, 32))),
}
