"""Fused products, sums and norms of a decode step give the numbers of the layers themselves."""

import numpy as np
import pytest
import torch
from transformers.models.cohere2.modeling_cohere2 import Cohere2LayerNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

from saccade.config import LoraConfig
from saccade.engines import generate
from saccade.engines.embedded import EmbeddedEngine, kv_cache
from saccade.forest.attention import forest_plan
from saccade.models import lora
from saccade.models.load import hidden_states
from saccade.plugins.gpu import fused
from saccade.plugins.gpu.fused_decode import JOINED, Projections, fused_forwards, swapped_forwards
from saccade.types import Message, Request, Sampling


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "llama", "qwen2_moe", "qwen3_5", "kimi_k25"])
def test_joined_products_are_the_separate_ones(load, name):
    model = load(name)
    projections = Projections(model)
    projections.refresh()
    mixers = [module for module in model.modules() if hasattr(module, "layer_idx")]
    found = [(m, n) for n in JOINED for m in mixers if all(getattr(m, part, None) is not None for part in n)]
    assert len(projections.layers) == len(found) == (3 if name == "qwen3_5" else 2)
    for layer, names in found:
        parts = [getattr(layer, part) for part in names]
        x = torch.randn(1, 5, parts[0].in_features)
        with torch.no_grad():
            wanted = [part(x) for part in parts]
            with projections.joined():
                got = [part(x) for part in parts]
                again = parts[1](x.clone())  # asked alone it computes alone
        for a, b in zip([*got, again], [*wanted, wanted[1]], strict=True):
            assert (a - b).abs().max() < 1e-5
        assert all("forward" not in part.__dict__ for part in parts)


def test_layers_with_something_of_their_own_are_left_alone(load):
    model = load("llama")
    attention = model.model.layers[0].self_attn
    attention.v_proj = torch.nn.Sequential(attention.v_proj)
    assert len(Projections(model).layers) == 1


@pytest.mark.parametrize("targets", ["all-linear", r"re:self_attn\.(q|v)_proj$", "vision,projector"])
def test_the_paged_engine_follows_adapters_that_learn(load, family_of, image, paged, targets):
    """All layers of an input, some of them, or none of the language model."""
    pytest.importorskip("peft")
    family, model = family_of("qwen2_5_vl"), load("qwen2_5_vl")
    lora.add(model, family, LoraConfig(rank=4, targets=targets), seed=0)
    prompt = family.render([Message(role="user", parts=(image(56, 56, 1), "What is this?"))])
    sampling = Sampling(temperature=1.0, max_tokens=20, ignore_eos=True)
    asked = [Request(key=f"{n}", ids=prompt.ids, media=prompt.media, sampling=sampling, noise=n) for n in range(3)]
    engine, answers = EmbeddedEngine(model, family), []
    assert len(engine.projections.adapters) == {"all-linear": 4 * 2, "vision,projector": 2 * 2}.get(targets, 0)
    for version in (1, 2):
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for adapter in lora.adapters(model).values():
                adapter += 0.2 * torch.randn(adapter.shape, generator=generator)
        engine.update_weights(None, version=version)
        answers.append(generate(engine, asked))
        engine.sleep()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kv_cache, "use_kernels", lambda shape: False)
            wanted = generate(EmbeddedEngine(model, family), asked)
        for got, plain in zip(answers[-1], wanted, strict=True):
            assert got.ids.tolist() == plain.ids.tolist()
            assert np.abs(got.logprobs - plain.logprobs).max() < 1e-4
    assert answers[0][0].ids.tolist() != answers[1][0].ids.tolist()


def states(model, family):
    ids = torch.arange(7)
    plan = forest_plan(np.array([0, 7]), np.array([-1]), ids.device, torch.float32)
    return hidden_states(model, family, ids, ids.expand(family.axes, -1), (), plan)


BUILT = ["qwen2_5_vl", "qwen3_vl", "llava", "llama", "qwen2_5_omni", "gemma3", "gemma4", "cohere2_vision", "qwen3_5"]


@pytest.mark.parametrize("name", BUILT)
def test_layers_give_what_they_gave(load, family_of, name):
    model, family = load(name), family_of(name)
    forwards = fused_forwards(model)
    assert len({type(module) for module, _ in forwards}) == 2  # layers, and the norms that find what is handed to them
    with torch.no_grad():
        own = states(model, family)
        with swapped_forwards(forwards):
            assert torch.equal(states(model, family), own)
        assert torch.equal(states(model, family), own)


def test_a_changed_state_is_normed_again(load, family_of):
    """Something between two layers: what was handed over belongs to another tensor."""
    model, family = load("qwen2"), family_of("qwen2")
    forwards = fused_forwards(model)
    second = model.model.layers[1]
    hook = second.register_forward_pre_hook(lambda _, args: (args[0] + 1.0,))
    with torch.no_grad():
        own = states(model, family)
        with swapped_forwards(forwards):
            assert torch.equal(states(model, family), own)
        hook.remove()
        assert not torch.equal(states(model, family), own)


@pytest.mark.parametrize("change", ["order", "experts"])
def test_layers_of_another_build_keep_their_forward(load, change, monkeypatch):
    model = load("mixtral" if change == "experts" else "llama")
    layer = model.model.layers[0]
    if change == "order":  # norms behind, as some families have it

        def behind(self, x, **options):
            x = x + self.input_layernorm(self.self_attn(hidden_states=x, **options)[0])
            return x + self.post_attention_layernorm(self.mlp(x))

        monkeypatch.setattr(type(layer), "forward", behind)
    assert not fused_forwards(model)


def test_wide_norms_are_told_apart():
    """On numbers of mean zero, a layer norm of 4096 gives nearly what a root mean square norm does."""

    class Bf16:
        device, dtype = torch.device("cpu"), torch.bfloat16

    norms = (Cohere2LayerNorm(4096), Gemma4RMSNorm(4096), Gemma4RMSNorm(4096, with_scale=False))
    for norm, wanted in zip((n.bfloat16() for n in norms), ([False, True], [True, False], [True, False]), strict=True):
        width = fused._norm_width(norm)
        assert [fused._agrees(norm, f, width, Bf16) for f in (fused._norm, fused._layer_norm)] == wanted
