"""Fused norms, gated layers and rotary embeddings for models in half precision on a GPU: the same
functions with fewer passes over memory, and fewer activations saved for backward.

A module is replaced only if its own forward and the fused one agree on random inputs; on other devices
and dtypes it runs its own forward. Knows nothing of families.

    fuse(model)
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, linear, pad, rms_norm, silu

from saccade.forest.attention import HALF
from saccade.forest.device_ops import has_kernels


class Exchange(NamedTuple):
    width_of: Callable[[Any], int | None]  # input width of a module if it may be of this kind, else None
    forward: Callable[[Any, Tensor], Tensor]
    how: Mapping[str, bool]  # options for the decoding kernels (fused_decode.py)


class Turn(NamedTuple):
    """Options of `rotate` that reproduce a rotary function; `part`: it may rotate only a part of each head."""

    part: bool = False
    pairs: bool = False
    woven: bool = False


HALVES = Turn()


def fuse(model: Any, part: nn.Module | None = None) -> list[str]:
    """Fuse all modules, or those of `part`, where possible. Returns the names of the replaced classes and functions."""
    if not _applies(torch.empty(0, device=model.device, dtype=model.dtype)):
        return []
    exchanged = set(_fuse_rotary(model))
    for module in list((model if part is None else part).modules()):
        kind = type(module)
        for number, row in enumerate(FUSED):
            width = None if hasattr(kind, "plain") else row.width_of(module)
            # Compared for each module: those of one class may differ (Gemma 3n's gates are sparse in some layers).
            if width is not None and _agrees(module, row.forward, width, model):
                module.__class__ = _fused_class(kind, number)  # type: ignore[arg-type]
                exchanged.add(kind.__name__)
                break
    return sorted(exchanged)


@functools.cache
def _fused_class(kind: Any, number: int) -> type:
    forward, how = FUSED[number].forward, FUSED[number].how

    def choose(self: Any, x: Tensor) -> Tensor:
        return forward(self, x) if _applies(x) else kind.forward(self, x)

    return type(f"Fused{kind.__name__}", (kind,), {"forward": choose, "plain": kind, "how": how})


def _applies(x: Tensor) -> bool:
    return has_kernels(x.device) and x.dtype in HALF


@torch.no_grad()
def _agrees(module: nn.Module, forward: Callable[[Any, Tensor], Tensor], width: int, model: Any) -> bool:
    # Rows with a nonzero mean, which a layer norm subtracts, and small rows, where epsilon matters.
    sizes = torch.tensor([1.0, 3.0, 0.3, 0.001], device=model.device, dtype=model.dtype)[:, None]
    x = (_random((1, 4, width), model) + 1) * sizes
    try:
        return _near(forward(module, x), module(x))
    except (RuntimeError, TypeError, ValueError):
        return False  # it takes other arguments


def _random(shape: tuple[int, ...], model: Any) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    return drawn.to(model.device, model.dtype)


def _near(found: Tensor, wanted: Tensor) -> bool:
    """Whether two tensors differ by no more than a few roundings."""
    limit = 8 * torch.finfo(wanted.dtype).eps
    return bool((found.float() - wanted.float()).norm() <= limit * wanted.float().norm())


# -- norms -----------------------------------------------------------------------------------------


def epsilon_of(norm: Any) -> float | None:
    found = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return found if isinstance(found, float) else None


def _norm_width(module: Any) -> int | None:
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    if names not in (["weight"], []) or epsilon_of(module) is None or len(signature(module.forward).parameters) != 1:
        return None  # a gated norm takes the gate as a second argument
    return module.weight.shape[-1] if names else 64


def _norm(self: Any, x: Tensor) -> Tensor:
    return rms_norm(x, x.shape[-1:], getattr(self, "weight", None), epsilon_of(self))


def _layer_norm(self: Any, x: Tensor) -> Tensor:
    return layer_norm(x, x.shape[-1:], getattr(self, "weight", None), None, epsilon_of(self))  # type: ignore[arg-type]


def _shifted_norm(self: Any, x: Tensor) -> Tensor:
    return _ShiftedNorm.apply(x, self.weight, epsilon_of(self))


class _ShiftedNorm(torch.autograd.Function):
    """RMS norm times 1 + weight. torch's needs a weight of the input's dtype, and 1 + weight is float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        from saccade.plugins.gpu.norm import norm_rows

        ctx.save_for_backward(x, weight)
        ctx.epsilon = epsilon
        return norm_rows(x, weight, epsilon, shift=True)

    @staticmethod
    def backward(ctx: Any, to_out: Tensor) -> tuple[Tensor | None, ...]:
        from saccade.plugins.gpu.norm import norm_gradients

        x, weight = ctx.saved_tensors
        return *norm_gradients(x, weight, ctx.epsilon, to_out), None


# -- gated layers ----------------------------------------------------------------------------------


def _gated_width(function: Callable[[Tensor], Tensor], module: Any) -> int | None:
    children = dict(module.named_children())
    if children.keys() != {"gate_proj", "up_proj", "down_proj", "act_fn"} or module.act_fn.state_dict():
        return None
    points = torch.linspace(-6, 6, 49, dtype=torch.float64)
    if not torch.allclose(module.act_fn(points), function(points)):
        return None
    gate = module.gate_proj
    return gate.in_features if hasattr(gate, "in_features") else next(gate.parameters()).shape[-1]


def _gated(self: Any, x: Tensor, gelu: bool = False) -> Tensor:
    gate, up, down = self.gate_proj, self.up_proj, self.down_proj
    if not all(type(layer) is nn.Linear for layer in (gate, up, down)):
        return down(_Gate.apply(gate(x), up(x), gelu))  # adapters and quantised layers have their own forwards
    # Pad: products with matrices whose rows are no multiple of 16 bytes run at half the speed.
    missing = -gate.out_features % 8
    if not missing:
        return _GatedLinear.apply(gate(x), up(x), down.weight, down.bias, gelu)
    halves = [
        linear(x, pad(h.weight, (0, 0, 0, missing)), None if h.bias is None else pad(h.bias, (0, missing)))
        for h in (gate, up)
    ]
    return _GatedLinear.apply(*halves, pad(down.weight, (0, missing)), down.bias, gelu)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
        from saccade.plugins.gpu.gate import multiply

        ctx.save_for_backward(gate, up)
        ctx.gelu = gelu
        return multiply(gate, up, gelu=gelu)

    @staticmethod
    def backward(ctx: Any, to_product: Tensor) -> tuple[Tensor | None, ...]:
        from saccade.plugins.gpu.gate import gradients

        gate, up = ctx.saved_tensors
        return *gradients(gate, up, to_product, gelu=ctx.gelu)[1:], None


class _GatedLinear(torch.autograd.Function):
    """The gated product and `down_proj`; backward recomputes the gated product, which is not saved."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> Tensor:
        from saccade.plugins.gpu.gate import multiply

        ctx.save_for_backward(gate, up, weight)
        ctx.gelu = gelu
        return linear(multiply(gate, up, gelu=gelu), weight, bias)

    @staticmethod
    def backward(ctx: Any, to_out: Tensor) -> tuple[Tensor | None, ...]:
        from saccade.plugins.gpu.gate import gradients

        gate, up, weight = ctx.saved_tensors
        product, to_gate, to_up = gradients(gate, up, to_out @ weight, gelu=ctx.gelu)
        flat = to_out.flatten(0, -2)
        _, _, wants_weight, wants_bias, _ = ctx.needs_input_grad
        to_weight = flat.t() @ product.flatten(0, -2) if wants_weight else None
        return to_gate, to_up, to_weight, flat.sum(0) if wants_bias else None, None


# -- rotary embeddings -----------------------------------------------------------------------------


def _fuse_rotary(model: Any) -> list[str]:
    """Replace the rotary functions in the modeling files: attention modules look them up there by name."""
    files = {sys.modules[type(module).__module__] for module in model.modules()}
    found = []
    for file in files:
        for name, first, fused, shown in ROTARY:
            plain = getattr(file, name, None)
            if plain is None or hasattr(plain, "plain") or first not in signature(plain).parameters:
                continue
            cases = [[_random(shape, model) for shape in shapes] for shapes in shown]
            if all(_turns_alike(plain, functools.partial(fused, plain), case) for case in cases):
                setattr(file, name, functools.update_wrapper(functools.partial(fused, plain), plain))
                getattr(file, name).plain = plain
                found.append(f"{file.__name__}.{name}")
    return found


def _turns_alike(plain: Any, fused: Any, arguments: list[Tensor]) -> bool:
    cases: list[tuple[list[Tensor], dict[str, int]]] = [(arguments, {})]
    if "unsqueeze_dim" in signature(plain).parameters:
        cases.append(([x.transpose(1, 2) if x.ndim == 4 else x for x in arguments], {"unsqueeze_dim": 2}))
    try:
        return all(all(map(_near, fused(*given, **how), plain(*given, **how))) for given, how in cases)
    except (RuntimeError, TypeError, ValueError):
        return False  # it takes other arguments


def _rotary(
    plain: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, how: Turn = HALVES, **options: Any
) -> Any:
    """q and k [1, H, T, D], or [1, T, H, D] if unsqueeze_dim is 2; cos and sin [1, T, D], or narrower if only a part
    of each head is rotated.
    """
    axis = _axis_of_heads(q, cos, more, options, how.part)
    if axis is None:
        return plain(q, k, cos, sin, *more, **options)
    turned = _Rotate.apply(*(x.squeeze(0).transpose(0, 2 - axis) for x in (q, k)), cos[0], sin[0], how)
    return tuple(x.transpose(0, 2 - axis).unsqueeze(0) for x in turned)


def _single_rotary(plain: Any, x: Tensor, cos: Tensor, sin: Tensor, *more: Any, **options: Any) -> Any:
    """As `_rotary`, for one tensor."""
    axis = _axis_of_heads(x, cos, more, options)
    if axis is None:
        return plain(x, cos, sin, *more, **options)
    lines = x.squeeze(0).transpose(0, 2 - axis)  # [T, H, D]
    turned, _ = _Rotate.apply(lines, lines.new_empty((len(lines), 0, x.shape[-1])), cos[0], sin[0], HALVES)
    return turned.transpose(0, 2 - axis).unsqueeze(0)


def _axis_of_heads(x: Tensor, cos: Tensor, more: Any, options: Mapping[str, Any], part: bool = False) -> int | None:
    """The option unsqueeze_dim (1 or 2); None if the kernel does not support these arguments."""
    axis = options.get("unsqueeze_dim", 1)
    usual = not more and options.keys() <= {"unsqueeze_dim"} and x.ndim == 4 and axis in (1, 2) and _applies(x)
    if not usual or len(x) != 1 or cos.shape[:-1] != (1, x.shape[3 - axis]):
        return None
    return axis if cos.shape[-1] == x.shape[3] or (part and cos.shape[-1] < x.shape[3]) else None


def _vision_rotary(plain: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """q and k [T, H, D], cos and sin [T, D]."""
    if q.ndim != 3 or cos.shape != (q.shape[0], q.shape[2]) or not _applies(q):
        return plain(q, k, cos, sin)
    return _Rotate.apply(q, k, cos, sin, HALVES)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, how: Turn) -> tuple[Tensor, Tensor]:
        from saccade.plugins.gpu.rotary import rotate

        ctx.save_for_backward(cos, sin)
        ctx.how = how
        return rotate(q, k, cos, sin, pairs=how.pairs, woven=how.woven)

    @staticmethod
    def backward(ctx: Any, to_q: Tensor, to_k: Tensor) -> tuple[Tensor | None, ...]:
        from saccade.plugins.gpu.rotary import rotate

        turned = rotate(to_q, to_k, *ctx.saved_tensors, back=True, pairs=ctx.how.pairs, woven=ctx.how.woven)
        return *turned, None, None, None


# A module gets the first forward that agrees with its own.
FUSED = (
    Exchange(_norm_width, _norm, {}),
    Exchange(_norm_width, _shifted_norm, {"shift": True}),
    Exchange(_norm_width, _layer_norm, {"center": True}),
    Exchange(functools.partial(_gated_width, silu), _gated, {}),
    Exchange(
        functools.partial(_gated_width, functools.partial(gelu, approximate="tanh")),
        functools.partial(_gated, gelu=True),
        {"gelu": True},
    ),
)
BOTH = ((1, 4, 6, 32), (1, 2, 6, 32), (1, 6, 32), (1, 6, 32))
PART = (*BOTH[:2], (1, 6, 12), (1, 6, 12))
TURNS = (Turn(part=True), Turn(part=True, pairs=True), HALVES, Turn(pairs=True))
# (name, its first parameter, fused function, called with the plain one and its arguments, shapes of test inputs)
ROTARY: tuple[tuple[str, str, Callable[..., Any], tuple[tuple[tuple[int, ...], ...], ...]], ...] = (
    *(
        ("apply_rotary_pos_emb", "q", functools.partial(_rotary, how=how), (BOTH, PART) if how.part else (BOTH,))
        for how in TURNS
    ),
    ("apply_rotary_pos_emb_interleave", "q", functools.partial(_rotary, how=Turn(woven=True)), (BOTH,)),
    ("apply_rotary_pos_emb", "x", _single_rotary, ((BOTH[0], *BOTH[2:]),)),
    ("apply_rotary_pos_emb_vision", "q", _vision_rotary, (((6, 4, 32), (6, 4, 32), (6, 32), (6, 32)),)),
)
