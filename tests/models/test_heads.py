"""The head of a critic: where it sits, what it starts from, what it frees."""

import weakref

import pytest
import torch
from pytest import approx

from saccade.models.families import load_family
from saccade.models.heads import attach_score, read_scores
from saccade.models.load import freeze, load_model, trainable_table
from saccade.models.tiny import build

FAMILIES = ["qwen2_5_vl", "qwen2_vl", "qwen2", "qwen3", "llama", "mixtral"]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_takes_it(load, name):
    model = load(name)
    before = set(dict(model.named_parameters()))
    attach_score(model, seed=3)
    assert set(dict(model.named_parameters())) == before | {"score.weight"}
    assert model.score.weight.shape == (1, 64) and model.score.bias is None
    assert model.score.weight.requires_grad and model.lm_head is None
    with pytest.raises(AssertionError, match="already"):
        attach_score(model, seed=3)


def test_the_seed_decides_and_the_global_one_is_left_alone(load):
    weights = []
    for seed in (0, 0, 1):
        model = load("qwen3")
        torch.manual_seed(len(weights))
        before = torch.random.get_rng_state()
        attach_score(model, seed=seed)
        assert torch.equal(torch.random.get_rng_state(), before)
        weights.append(model.score.weight.detach())
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_it_starts_from_a_normal_of_the_right_width(tmp_path):
    family = load_family(build("qwen3", tmp_path, text={"hidden_size": 4096, "head_dim": 8}))
    model = load_model(family, dtype=torch.float32, device=torch.device("cpu"))
    attach_score(model, seed=0)
    weight = model.score.weight.detach() * 4097
    assert weight.std().item() == approx(1.0, abs=0.03)
    assert weight.mean().item() == approx(0.0, abs=0.05)


@pytest.mark.parametrize("tied", [True, False])
def test_an_untied_language_head_is_freed(tmp_path, tied):
    family = load_family(build("qwen3", tmp_path, text={"tie_word_embeddings": tied}))
    model = load_model(family, dtype=torch.float32, device=torch.device("cpu"))
    head = weakref.ref(model.lm_head.weight)
    attach_score(model, seed=0)
    assert (head() is model.model.embed_tokens.weight) if tied else (head() is None)


def test_values_of_a_bf16_model_are_fp32(load):
    model = load("qwen3", "bfloat16")
    attach_score(model, seed=0)
    hidden = torch.randn(5, 64).bfloat16()
    values = read_scores(model.score, hidden)
    assert values.dtype == torch.float32 and values.shape == (5,)
    assert values.tolist() == approx((hidden.float() @ model.score.weight[0]).tolist())


def test_it_trains_with_the_language_model_and_can_be_all_that_trains(load, family_of):
    model, family = load("qwen2_5_vl"), family_of("qwen2_5_vl")
    attach_score(model, seed=0)
    assert family.tower_of("score.weight") == "llm"
    freeze(model, family, "freeze:model.")
    assert trainable_table(model, family)["llm"][0] == 64
