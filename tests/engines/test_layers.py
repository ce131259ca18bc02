"""Layers of a decode step, with sums and norms in one: the numbers of the layers themselves."""

import numpy as np
import pytest
import torch

from saccade.engines.embedded.layers import joined_forwards
from saccade.engines.embedded.projections import exchanged
from saccade.forest.attention import forest_plan
from saccade.models.load import hidden_states


def states(model, family):
    ids = torch.arange(7)
    plan = forest_plan(np.array([0, 7]), np.array([-1]), ids.device, torch.float32)
    return hidden_states(model, family, ids, ids.expand(family.axes, -1), (), plan)


def kinds(forwards):
    return {type(module).__name__ for module, _ in forwards}


@pytest.mark.parametrize(
    "name",
    [
        "qwen2",
        "qwen3",
        "llama",
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen3_vl",
        "internvl",
        "llava",
        "qwen2_audio",
        "qwen2_5_omni",
    ],
)
def test_layers_give_what_they_gave(load, family_of, name):
    model, family = load(name), family_of(name)
    forwards = joined_forwards(model)
    assert len(kinds(forwards)) == 2  # layers, and the norms that find what is handed to them
    with torch.no_grad():
        own = states(model, family)
        with exchanged(forwards):
            assert torch.equal(states(model, family), own)
        assert torch.equal(states(model, family), own)


def test_a_changed_state_is_normed_again(load, family_of):
    """Something between two layers: what was handed over belongs to another tensor."""
    model, family = load("qwen2"), family_of("qwen2")
    forwards = joined_forwards(model)
    second = model.model.layers[1]
    hook = second.register_forward_pre_hook(lambda _, args: (args[0] + 1.0,))
    with torch.no_grad():
        own = states(model, family)
        with exchanged(forwards):
            assert torch.equal(states(model, family), own)
        hook.remove()
        assert not torch.equal(states(model, family), own)


@pytest.mark.parametrize(
    "change", ["order", "part", "experts", "call", "attention", "norm", "mixed"]
)
def test_layers_of_another_build_keep_their_forward(load, change, monkeypatch):
    model = load("mixtral" if change == "experts" else "llama")
    layer = model.model.layers[0]
    if change == "part":
        layer.another_norm = torch.nn.LayerNorm(4)
    if change == "order":  # norms behind, as some families have it

        def behind(self, x, **options):
            x = x + self.input_layernorm(self.self_attn(hidden_states=x, **options)[0])
            return x + self.post_attention_layernorm(self.mlp(x))

        monkeypatch.setattr(type(layer), "forward", behind)
    if change == "call":
        monkeypatch.setattr(type(layer), "forward", lambda self, x, mask: x)
    if change == "attention":

        def three(self, x, **options):
            y, _, _ = self.self_attn(hidden_states=self.input_layernorm(x), **options)
            return y

        monkeypatch.setattr(type(layer), "forward", three)
    if change == "norm":
        layer.input_layernorm = torch.nn.LayerNorm(64, elementwise_affine=False)
        del layer.input_layernorm._parameters["weight"]
    if change == "mixed":
        layer.__class__ = type("Another", (type(layer),), {})
    assert not joined_forwards(model)


def test_a_forward_of_its_own_is_put_back(load):
    model = load("llama")
    layer, own = model.model.layers[0], object()
    layer.__dict__["forward"] = own
    with exchanged([(layer, print)]), exchanged([(layer, repr)]):
        assert layer.forward is repr
    assert layer.forward is own
