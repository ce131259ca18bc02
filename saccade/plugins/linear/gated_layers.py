"""Layers with a gated delta rule (Qwen3-Next, Qwen3.5, MiniCPM-V 4.6), which are recurrent.

A branch of a forest begins with the state and the last tokens of its parent, and a sequence in the engine's cache
with its own; gradients flow through state and tokens. The layers' own forward would run across the borders of packed
rows: it is replaced by the same computation on segments.

    patch_layers(model)
    model(..., attention_plan=plan)     # plan.recurrent_plan says which segments there are

Legend: T tokens, C channels of the convolution, K its width, N segments, H heads.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus

from saccade.errors import EnvironmentProblem
from saccade.forest.device_ops import KERNELS
from saccade.models.families import FAMILIES, refuse_noise
from saccade.models.families.qwen_vl import patch_embedding_as_matrix
from saccade.plugins.families.timed_frames import QWEN3_VL
from saccade.plugins.linear.delta_rule import delta_rule
from saccade.plugins.linear.segments import RecurrentPlan, Steps

PARTS = ("conv1d", "A_log", "dt_bias", "norm", "out_proj")
PROJECTIONS = (("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), ("in_proj_qkvz", "in_proj_ba"))


def patch_layers(model: Any) -> None:
    """Replace the forward of such layers, which needs a plan with a `recurrent_plan` from now on. All other layers use
    transformers' attention interface, although the class of the model does not declare it.
    """
    for name, layer in model.named_modules():
        if type(layer).__name__.endswith("GatedDeltaNet"):
            known = any(all(hasattr(layer, part) for part in (*PARTS, *parts)) for parts in PROJECTIONS)
            if not known or layer.activation not in ("silu", "swish"):
                what = f"{name} ({type(layer).__name__}) is not computed as in Qwen3.5"
                raise EnvironmentProblem(f"{what}; packed rows cannot be kept apart in it: use another model")
            layer.forward = partial(_forward, layer)
    model._supports_attention_backend = True


def _prepare_text(model: Any) -> None:
    refuse_noise(model)
    patch_layers(model)


def _prepare_vision(model: Any) -> None:
    patch_embedding_as_matrix(model)
    _prepare_text(model)


TEXT = replace(FAMILIES["qwen3"], prepare=_prepare_text)
VISION = replace(QWEN3_VL, towers=FAMILIES["qwen2_vl"].towers, prepare=_prepare_vision)


def _forward(layer: Any, hidden_states: Tensor, *, attention_plan: Any, **unused: Any) -> Tensor:
    plan: RecurrentPlan | Steps = attention_plan.recurrent_plan
    x = hidden_states.squeeze(0)
    mixed, gate, share, decay = _projected(layer, x)
    gate = gate.reshape(len(x), -1, layer.head_v_dim)
    if isinstance(plan, Steps):
        out = _step(layer, plan, mixed, gate, share, decay)
        return layer.out_proj(out.flatten(1)).unsqueeze(0)
    mixed = silu(convolved(layer.layer_idx, layer.conv1d, mixed, plan))
    heads, key_heads = layer.num_v_heads, layer.num_k_heads
    q, k, v = mixed.split([layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
    q, k = (part.unflatten(-1, (key_heads, -1)).repeat_interleave(heads // key_heads, dim=1) for part in (q, k))
    decay = -layer.A_log.float().exp() * softplus(decay.float() + layer.dt_bias)
    out = _recurrent(layer, plan, (q, k, v.unflatten(-1, (heads, -1)), decay, share.sigmoid()))
    out = layer.norm(*(part.reshape(-1, layer.head_v_dim) for part in (out, gate)))
    return layer.out_proj(out.reshape(len(x), -1)).unsqueeze(0)


def _step(layer: Any, plan: Steps, mixed: Tensor, gate: Tensor, share: Tensor, decay: Tensor) -> Tensor:
    """One token of each of B sequences, with kernels. Returns [B, H, V]."""
    index, where, norm = layer.layer_idx, {"rows": plan.rows, "lengths": plan.lengths}, layer.norm
    conv, tails, states = layer.conv1d, plan.addresses[index, "tail"], plan.addresses[index, "state"]
    mixed = KERNELS["convolve_step"](mixed, conv.weight, conv.bias, tails=tails, **where)
    heads = layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    given = mixed, share, decay, layer.A_log, layer.dt_bias
    out = KERNELS["delta_step"](*given, heads=heads, states=states, **where)
    return KERNELS["gate_step"](out, gate, norm.weight, norm.variance_epsilon)


def _projected(layer: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Project the tokens to the input of the convolution, the gate, and share and decay per head. Qwen3-Next has two
    matrices for these, ordered by key heads.
    """
    if hasattr(layer, "in_proj_qkv"):
        return tuple(part(x) for part in (layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a))
    both = layer.in_proj_qkvz(x).unsqueeze(0), layer.in_proj_ba(x).unsqueeze(0)
    *mixed, gate, share, decay = (part.squeeze(0) for part in layer.fix_query_key_value_ordering(*both))
    return torch.cat([part.flatten(1) for part in mixed], 1), gate, share, decay


def convolved(layer: int, convolution: Any, x: Tensor, plan: RecurrentPlan) -> Tensor:
    """[T, C]: each token convolved with the K - 1 tokens before it on its path, per channel."""
    weight = convolution.weight
    width = weight.shape[-1]
    source, first = plan.windows(width)
    rows = torch.cat([x, plan.tails(layer, x)]).index_select(0, source)
    plan.keep_tails(layer, rows, width)
    out = conv1d(rows.T.to(weight.dtype), weight, convolution.bias, groups=len(weight))
    return out.T.index_select(0, first).to(x.dtype)


def _recurrent(layer: Any, plan: RecurrentPlan, given: Sequence[Tensor]) -> Tensor:
    """[T, H, V]: the delta rule, level by level."""
    q, _, v = given[:3]
    found, states = [], plan.states(layer.layer_idx, (v.shape[1], q.shape[2], v.shape[2]))
    for level in plan.levels:
        if level.parents is not None:
            states = states.index_select(0, level.parents)
        some = [x.index_select(0, level.tokens) for x in given] if len(plan.levels) > 1 else given
        out, states = delta_rule(some, level.lengths, level.ends, states)
        found.append(out)
    plan.keep_states(layer.layer_idx, states)
    return found[0] if len(found) == 1 else torch.cat(found).index_select(0, plan.order)
