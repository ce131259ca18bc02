"""Decoders of other kinds against transformers: windows, chunks, layers of different sizes, keys and values of
different sizes, layers that share them, logits that are scaled or capped.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from saccade.config import TrainConfig
from saccade.engines import generate
from saccade.engines.embedded import EmbeddedEngine
from saccade.engines.embedded.kv_cache import shape_of
from saccade.errors import EnvironmentProblem
from saccade.forest.packing import pack
from saccade.models.families import load_family
from saccade.models.heads import find_logit_change, language_head
from saccade.models.load import load_model
from saccade.plugins.families import tiny
from saccade.trainer import Scoring
from saccade.trainer.local import LocalBackend
from saccade.types import Request, Sampling
from tests.engines.asked import trajectories

CPU = torch.device("cpu")
WINDOW = 8
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW, "num_hidden_layers": 4}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
SHARED = {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 8}
NARROW = {"num_key_value_heads": 2, "head_dim": 32}
# model type → what its config says beside the sizes of every tiny model
KINDS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "qwen2_moe": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0, "num_experts": 4,
                  "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "gemma3_text": {**MIXED, "query_pre_attn_scalar": 32, "final_logit_softcapping": 2.0},
    "cohere2": {**MIXED, "logit_scale": 0.25},
    "exaone4": {**MIXED, "sliding_window_pattern": 2},
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "deepseek_v3": {**LATENT, **EXPERTS, "num_key_value_heads": 2, "first_k_dense_replace": 1, "head_dim": None},
    "llama4_text": {"attention_chunk_size": WINDOW, "layer_types": ["chunked_attention", "full_attention"] * 2,
                    "num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0], "num_local_experts": 2,
                    "intermediate_size_mlp": 64, "interleave_moe_layer_step": 2, "floor_scale": 4096},
    "gemma3n_text": {**MIXED, **SHARED, "laurel_rank": 8, "altup_num_inputs": 2,
                     "activation_sparsity_pattern": [0.0] * 4, "final_logit_softcapping": 5.0,
                     "intermediate_size": [128] * 4},
    "gemma4_text": {**MIXED, **SHARED, "global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
                    "final_logit_softcapping": 5.0, "num_key_value_heads": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(family, our model, transformers' own) of a kind."""

    @cache
    def build(kind):
        tokenizer = tiny.make_tokenizer(None)
        ends = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
        sizes = {**tiny.TEXT, "vocab_size": len(tokenizer), **ends, **KINDS[kind]}
        config = AutoConfig.for_model(kind, **{name: value for name, value in sizes.items() if value is not None})
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp(kind)
        stock = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        stock.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        family = load_family(str(folder))
        stock = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
        return family, load_model(family, dtype=torch.float32, device=CPU), stock.eval()

    return build


def asked(family, lengths=(5, 21), repeats=2, **sampling):
    draw = np.random.default_rng(0)
    how = Sampling(**{"temperature": 1.0, "max_tokens": 14, "ignore_eos": True, **sampling})
    free = np.flatnonzero(~family.banned)
    prompts = [draw.choice(free, length) for length in lengths]
    return [
        Request(key=f"{n}/{r}", ids=ids, sampling=how, noise=10 * n + r, episode=f"{n}/{r}")
        for n, ids in enumerate(prompts)
        for r in range(repeats)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_forest_is_rows_of_transformers(kind, made):
    """Log-probs of answers, and gradients of all weights, of a forest of two prompts with two answers each."""
    family, model, stock = made(kind)
    requests = asked(family)
    answers = generate(EmbeddedEngine(model, family), requests)
    groups = [trajectories(requests[i : i + 2], answers[i : i + 2]) for i in (0, 2)]
    (batch,) = pack(groups, micro_tokens=1 << 20)
    ours, _ = LocalBackend(model, family, TrainConfig()).read(batch, Scoring())
    banned = torch.from_numpy(family.banned)
    theirs = []
    for request, answer in zip(requests, answers, strict=True):
        ids = torch.from_numpy(np.concatenate([request.ids, answer.ids]))[None]
        logits = stock(input_ids=ids, use_cache=False).logits[0, len(request.ids) - 1 : -1]
        scores = logits.masked_fill(banned, -torch.inf).log_softmax(-1)
        theirs.append(scores.gather(1, ids[0, len(request.ids) :, None]).squeeze(1))
        assert np.abs(theirs[-1].detach().numpy() - answer.logprobs).max() < 1e-5
    theirs = torch.cat(theirs)
    assert (ours - theirs).abs().max() < 3e-6 * theirs.abs().max()
    weights = torch.randn(len(ours), generator=torch.Generator().manual_seed(0))
    found = []
    for each, scores in ((model, ours), (stock, theirs)):
        each.zero_grad()
        (scores * weights).sum().backward()
        found.append({name: p.grad for name, p in each.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() and len(found[0]) > 10
    for name, wanted in found[1].items():
        limit = 1e-4 if kind == "gemma4_text" else 2e-5  # its values are normed without a scale, again and again
        assert (found[0][name] - wanted).abs().max() < limit * max(wanted.abs().max(), 1e-3), name


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_generate(kind, made):
    family, model, stock = made(kind)
    requests = asked(family, repeats=1, temperature=0.0)
    banned = np.flatnonzero(family.banned).tolist()
    engine = EmbeddedEngine(model, family)
    for _ in range(2):  # a second turn goes on from the cache of the first
        answers = generate(engine, requests)
        for request, answer in zip(requests, answers, strict=True):
            ids = torch.from_numpy(request.ids)[None]
            options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "eos_token_id": None}
            theirs = stock.generate(
                input_ids=ids, do_sample=False, max_new_tokens=14, suppress_tokens=banned, **options
            )
            assert answer.ids.tolist() == theirs[0, len(request.ids) :].tolist()
        added = np.random.default_rng(1).choice(np.flatnonzero(~family.banned), 11)
        requests = [
            replace(r, ids=np.concatenate([r.ids, a.ids, added]), first_index=14)
            for r, a in zip(requests, answers, strict=True)
        ]


def test_what_layers_keep_is_found(made):
    def rows(kind):
        family, model, _ = made(kind)
        return shape_of(model, family).layers

    assert rows("deepseek_v3") == ((2, 2, 24, 12, 0, None), (2, 2, 24, 12, 1, None))
    assert rows("gemma4_text") == (
        *((2, 2, 32, 32, 0, WINDOW), (2, 1, 64, 64, 1, None)),
        *((2, 2, 32, 32, 0, WINDOW), (2, 1, 64, 64, 1, None)),
    )
    assert [layer.source for layer in rows("gemma3n_text")] == [0, 1, 0, 1]
    assert [layer.window for layer in rows("llama4_text")] == [-WINDOW, None] * 2
    family, model, _ = made("gemma4_text")
    engine = EmbeddedEngine(model, family)
    assert engine.cache.shape.bytes_per_token == 4 * 2 * (2 * 32 + 64)  # two of its four layers
    generate(engine, asked(family))
    assert engine.cache.keys[2] is engine.cache.keys[0] and engine.cache.values[3] is engine.cache.values[1]


def test_changes_of_logits_are_found_or_refused(made):
    found = {kind: made(kind)[1].logit_change for kind in ("cohere2", "granite", "gemma3_text", "deepseek_v3")}
    assert list(found.values()) == ["logit_scale", "logits_scaling", "final_logit_softcapping", None]
    _, model, _ = made("granite")
    assert language_head(model).out_features == model.lm_head.out_features
    half = model.to(torch.bfloat16)
    assert find_logit_change(half) == "logits_scaling"
    own = type(model).forward

    def twice(*args, **options):
        output = own(model, *args, **options)
        output.logits = output.logits.square()
        return output

    model.forward = twice
    with pytest.raises(EnvironmentProblem, match=r"GraniteForCausalLM changes its logits .*known: logit_scale"):
        find_logit_change(model)
    del model.forward
    model.float()


def test_a_temperature_that_counts_places_limits_rows(made):
    family, model, _ = made("llama4_text")
    assert family.max_positions == 4095
    assert not any(getattr(module, "attn_temperature_tuning", False) for module in model.modules())
