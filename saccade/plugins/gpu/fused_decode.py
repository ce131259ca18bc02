"""Fewer and larger kernels while the engine runs a model.

When few tokens are decoded, many kernels take longer to launch than to run, and a small matrix product
takes as long as a large one. `Projections`: queries, keys and values come from one product instead
of three. LoRA adapters of layers that read the same input share one product with all A matrices; each
B product also adds the layer's output. The engine keeps concatenated copies of these matrices, 5% of
the weights, and refreshes them whenever the weights may have changed; quantised layers are not
concatenated. `fused_forwards`: a residual addition, the norm after it and, if there is one, the norm
before it are one kernel, also across layers: the last addition of a layer computes the next layer's
input norm. For few rows, gate_proj, up_proj and their gated product are one kernel, too. Layers of
another structure keep their forward.

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
from saccade.plugins.gpu.fused import epsilon_of

NAMES = ("q_proj", "k_proj", "v_proj")
GATES = ("in_proj_b", "in_proj_a")  # of a recurrent layer
RECURRENT = (("in_proj_qkv", "in_proj_z"), GATES, ("out_proj",))
LATENTS = (("q_a_proj", "kv_a_proj_with_mqa"), ("q_proj", "kv_a_proj_with_mqa"))  # latent attention has one of these
JOINED = (NAMES, GATES, *LATENTS)
READERS = (  # groups of layers that read the same input
    *(NAMES, *LATENTS, ("q_b_proj",), ("kv_b_proj",), ("o_proj",), *RECURRENT),
    *(("gate_proj", "up_proj"), ("down_proj",)),
)
Forward = Callable[..., Any]
PARALLEL = {"self_attn", "mlp", "input_layernorm"}
PARTS = {*PARALLEL, "post_attention_layernorm"}
SANDWICH = {*PARTS, "pre_feedforward_layernorm", "post_feedforward_layernorm"}
PER_LAYER_INPUTS = {*SANDWICH, "per_layer_input_gate", "act_fn", "per_layer_projection", "post_per_layer_input_norm"}
HALVES = ("gate_proj", "up_proj")


# -- projections -----------------------------------------------------------------------------------


class Projections:
    def __init__(self, model: nn.Module) -> None:
        self.layers: list[_Joined] = []  # concatenated projections
        self.adapters: list[_Adapters] = []
        for module in model.modules():
            for names in READERS:
                parts = tuple(getattr(module, name, None) for name in names)
                if None in parts:
                    continue
                own: tuple[Any, ...] = tuple(getattr(part, "base_layer", part) for part in parts)
                joined = None
                if names in JOINED and hasattr(module, "layer_idx") and _joinable(own):
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
    """Context manager in which these modules have these forwards."""
    # Sets __dict__ directly, as nn.Module.__setattr__ is slow and this runs at every poll.
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
    """Whether exactly one adapter is active, unmerged and plain LoRA."""
    active = getattr(part, "active_adapters", ())
    return (
        len(active) == 1
        and len(getattr(part, "lora_A", ())) == 1
        and not part.merged
        and not part.disable_adapters
        and not part.lora_variant
    )


class _Shared:
    """Layers that read the same input: the call of the first one computes the results of all."""

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
    """Linear layers computed as one matrix product and split."""

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
    """LoRA adapters: y = below(x) + (x A) B, with all A concatenated and B multiplied by the scale."""

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
    """Modules with the forwards to swap in during decoding."""
    found: list[tuple[nn.Module, Forward]] = []
    for stack in model.modules():
        layers, norm = getattr(stack, "layers", None), getattr(stack, "norm", None)
        if isinstance(layers, nn.ModuleList) and norm is not None:
            found += _of_stack(layers, norm)
    return found


def _of_stack(layers: Any, norm: Any) -> list[tuple[nn.Module, Forward]]:
    kinds = {(type(layer), _parts(layer)) for layer in layers}
    build = next((build for parts, build in BUILDS if {frozenset(parts)} == {names for _, names in kinds}), None)
    if len(kinds) != 1 or build is None or not all(_usual(layer) and _agrees(layer, build) for layer in layers):
        return []
    following = [PrecomputedNorm(n) for n in (*(layer.input_layernorm for layer in layers[1:]), norm)]
    return [
        *((precomputed.norm, precomputed.take) for precomputed in following),
        *((layer, build(layer, precomputed)) for layer, precomputed in zip(layers, following, strict=True)),
        *((layer.mlp, _gated(layer.mlp)) for layer in layers if _projectable(layer.mlp)),
        *(
            (part, _rows_normed(part))
            for layer in layers
            for part in (layer.self_attn.children() if hasattr(layer, "self_attn") else ())
            if getattr(type(part), "how", None) == {}  # RMS norms that `fuse` runs with torch
        ),
    ]


def _parts(layer: Any) -> frozenset[str]:
    """Names of the submodules; a recurrent one counts as attention."""
    return frozenset("self_attn" if name == "linear_attn" else name for name, _ in layer.named_children())


# -- sums and norms --------------------------------------------------------------------------------


class PrecomputedNorm:
    """Keeps the norm of the sum computed last, and recognises that sum by identity: no model changes
    hidden states in place between two layers while it decodes.
    """

    def __init__(self, norm: Any) -> None:
        self.norm = norm
        self._made: tuple[Tensor, Tensor] | None = None

    def add(self, x: Tensor, y: Tensor, **more: Any) -> Tensor:
        self._made = _add_norm(x, y, self.norm, **more)
        return self._made[0]

    def take(self, x: Tensor) -> Tensor:
        made, self._made = self._made, None
        return made[1] if made and made[0] is x else type(self.norm).forward(self.norm, x)


def _layer(layer: Any, following: PrecomputedNorm) -> Forward:
    recurrent = getattr(layer, "linear_attn", None)

    def forward(hidden_states: Tensor, **options: Any) -> Tensor:
        normed = layer.input_layernorm(hidden_states)
        if recurrent is not None:
            attended = recurrent(hidden_states=normed, **options)
        else:
            attended, _ = layer.self_attn(hidden_states=normed, **options)
        hidden, normed = _add_norm(hidden_states, attended, layer.post_attention_layernorm)
        return following.add(hidden, layer.mlp(normed))

    return forward


def _parallel_layer(layer: Any, following: PrecomputedNorm) -> Forward:
    """Attention and the gated layer read the same normed input (Cohere)."""

    def forward(hidden_states: Tensor, **options: Any) -> Tensor:
        normed = layer.input_layernorm(hidden_states)
        attended, _ = layer.self_attn(hidden_states=normed, **options)
        return following.add(hidden_states, attended, also=layer.mlp(normed))

    return forward


def _sandwich_layer(layer: Any, following: PrecomputedNorm) -> Forward:
    """Norms before and after attention and MLP (Gemma 2 and later), optionally with a factor per layer and
    with per-layer inputs (Gemma 4).
    """

    def forward(hidden_states: Tensor, per_layer_input: Tensor | None = None, **options: Any) -> Tensor:
        normed = layer.input_layernorm(hidden_states)
        attended, _ = layer.self_attn(hidden_states=normed, **options)
        hidden, normed = _add_norm(
            hidden_states, attended, layer.pre_feedforward_layernorm, before=layer.post_attention_layernorm
        )
        made, last = layer.mlp(normed), layer.post_feedforward_layernorm
        if per_layer_input is not None:
            hidden, _ = _add_norm(hidden, made, last, before=last)  # one kernel, although the norm is not used
            gate = layer.act_fn(layer.per_layer_input_gate(hidden))
            made, last = layer.per_layer_projection(gate * per_layer_input), layer.post_per_layer_input_norm
        return following.add(hidden, made, before=last, factor=getattr(layer, "layer_scalar", None))

    return forward


def _rows_normed(norm: Any) -> Forward:
    """The norm of query or key heads with our kernel: torch's copies views of a joined product first."""
    from saccade.plugins.gpu.norm import norm_rows

    epsilon: Any = epsilon_of(norm)
    return lambda x: norm_rows(x, getattr(norm, "weight", None), epsilon)


def _add_norm(
    x: Tensor, y: Tensor, norm: Any, *, also: Tensor | None = None, before: Any = None, factor: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns total = (x + before(y) + also) * factor, each of these optional, and norm(total)."""
    norms = [norm] if before is None else [norm, before]
    hows = [getattr(type(n), "how", None) for n in norms]
    if hows[0] is not None and hows[0] == hows[-1]:  # `fuse` has found that the kernel computes these norms
        from saccade.plugins.gpu.norm import add_norm

        weights: list[tuple[Any, Any]] = [(n.weight, epsilon_of(n)) for n in norms]
        first = None if before is None else weights[-1]
        return add_norm(x, y, *weights[0], also=also, before=first, factor=factor, **hows[0])
    total = x + (y if before is None else before(y))
    total = total if also is None else total + also
    total = total if factor is None else total * factor.to(total.dtype)
    return total, type(norm).forward(norm, total)


BUILDS = (
    *((PARTS, _layer), (PARALLEL, _parallel_layer)),
    *((SANDWICH, _sandwich_layer), (PER_LAYER_INPUTS, _sandwich_layer)),
)


def _usual(layer: Any) -> bool:
    norms = (part for name, part in layer.named_children() if name.endswith("norm"))
    return all(hasattr(layer.mlp, name) for name in (*HALVES, "down_proj")) and all(hasattr(n, "weight") for n in norms)


@torch.no_grad()
def _agrees(layer: Any, build: Callable[[Any, PrecomputedNorm], Forward]) -> bool:
    """Whether `build` agrees with the layer's forward, with stand-ins for attention (or recurrence) and MLP."""
    weight = layer.input_layernorm.weight
    drawn = torch.randn((1, 4, weight.shape[-1]), generator=torch.Generator().manual_seed(0))
    x = drawn.to(weight.device, weight.dtype)
    own_input = getattr(layer, "per_layer_projection", None)
    more = () if own_input is None else (x[..., :1].expand(-1, -1, own_input.weight.shape[-1]),)
    if hasattr(layer, "linear_attn"):
        mixer = (layer.linear_attn, lambda hidden_states, **options: hidden_states.square())
    else:
        mixer = (layer.self_attn, lambda hidden_states, **options: (hidden_states.square(), None))
    stand_ins = (mixer, (layer.mlp, torch.sin))
    with swapped_forwards(stand_ins):
        try:
            own = layer(x, *more, attention_mask=None, position_embeddings=None)
        except (AttributeError, TypeError, ValueError, RuntimeError):
            return False  # it calls its submodules with other arguments
        ours = build(layer, PrecomputedNorm(layer.input_layernorm))(x, *more)
    return isinstance(own, Tensor) and torch.allclose(ours, own, rtol=0.02, atol=0.02)


# -- gated layers ----------------------------------------------------------------------------------


def _projectable(mlp: Any) -> bool:
    if not hasattr(type(mlp), "how"):  # set by `fuse`, if the kernel computes this gated layer
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
        product = project(flat, mlp.gate_proj.weight, mlp.up_proj.weight, **type(mlp).how)
        return mlp.down_proj(product.view(*x.shape[:-1], -1))

    return forward
