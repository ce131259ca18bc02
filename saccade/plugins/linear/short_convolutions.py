"""Decoders of LFM2, in which most layers have a short causal convolution over a few tokens, per channel, instead of
attention. A branch of a forest begins with the last tokens of its parent, and a sequence in the engine's cache with its
own.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from saccade.errors import EnvironmentProblem
from saccade.forest.device_ops import KERNELS
from saccade.models.families import FAMILIES, refuse_noise
from saccade.plugins.linear.gated_layers import convolved
from saccade.plugins.linear.segments import RecurrentPlan, Steps

PARTS = ("conv", "operator_norm", "ffn_norm", "feed_forward")


def patch_convolutions(model: Any) -> None:
    """Replace the forward of such layers, which needs a plan with a `recurrent_plan` from now on."""
    refuse_noise(model)
    for name, layer in model.named_modules():
        short: Any = getattr(layer, "conv", None)
        if type(short).__name__.endswith("ShortConv"):
            if not all(hasattr(layer, part) for part in PARTS) or short.conv.weight.shape[-1] < 2:
                what = f"{name} ({type(layer).__name__}) is not computed as in LFM2"
                raise EnvironmentProblem(f"{what}; packed rows cannot be kept apart in it: use another model")
            layer.forward = partial(_forward, layer)


def _forward(layer: Any, hidden_states: Tensor, *, attention_plan: Any, **unused: Any) -> Tensor:
    short, x = layer.conv, layer.operator_norm(hidden_states).squeeze(0)
    before, behind, values = short.in_proj(x).chunk(3, dim=-1)
    gated = before * values
    plan: RecurrentPlan | Steps = attention_plan.recurrent_plan
    if isinstance(plan, Steps):
        where = {"tails": plan.addresses[short.layer_idx, "tail"], "rows": plan.rows, "lengths": plan.lengths}
        mixed = KERNELS["convolve_step"](gated, short.conv.weight, short.conv.bias, **where, silu=False)
    else:
        mixed = convolved(short.layer_idx, short.conv, gated, plan)
    hidden_states = hidden_states + short.out_proj(behind * mixed).unsqueeze(0)
    return hidden_states + layer.feed_forward(layer.ffn_norm(hidden_states))


TEXT = replace(FAMILIES["qwen3"], prepare=patch_convolutions)
