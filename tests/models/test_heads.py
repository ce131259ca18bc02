"""Heads of a critic and of a reward model: where they sit, what they free, the numbers of plain torch."""

import json
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from saccade.models.families import load_family
from saccade.models.heads import attach_score, head_file, without_head
from saccade.models.load import load_model
from saccade.plugins.families.tiny import build
from saccade.plugins.reward_models.reward_card import RewardCard
from saccade.plugins.reward_models.reward_head import RewardHead, attach_reward, start_critic
from saccade.system.contents import write_files

FAMILIES = ["qwen2_5_vl", "internvl", "mixtral"]


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


@pytest.mark.parametrize("tied", [True, False])
def test_an_untied_language_head_is_freed(tmp_path, tied):
    family = load_family(build("qwen3", tmp_path, text={"tie_word_embeddings": tied}))
    model = load_model(family, dtype=torch.float32, device=torch.device("cpu"))
    head = weakref.ref(model.lm_head.weight)
    attach_score(model, seed=0)
    assert (head() is model.model.embed_tokens.weight) if tied else (head() is None)


CARD = RewardCard(kind="scalar", heads=("a", "b"))


def made(model, card):
    head = RewardHead(like=model, card=card, seed=1)
    for parameter in head.parameters():  # what starts as a constant would hide a mistake
        nn.init.normal_(parameter, 0, 0.5, torch.Generator().manual_seed(parameter.numel()))
    return head


@pytest.mark.parametrize("bounded", [False, True])
def test_an_mlp_is_that_of_plain_torch(load, bounded):
    head = made(load("qwen3"), replace(CARD, head="mlp", bounded=bounded))
    plain = nn.Sequential(nn.Linear(64, 64, bias=False), nn.RMSNorm(64, 1e-6), nn.SiLU(), nn.Linear(64, 2, bias=False))
    with torch.no_grad():
        for own, theirs in ((head.inner, plain[0]), (head.gain, plain[1]), (head.weight, plain[3])):
            theirs.weight.copy_(own)
    hidden = torch.randn(5, 64)
    expected = plain(hidden).sigmoid() if bounded else plain(hidden)
    assert torch.allclose(head(hidden, torch.arange(5), 5), expected, atol=1e-6)


@pytest.mark.parametrize("heads", [1, 4])
def test_attention_weighs_every_part_of_the_states_by_itself(load, heads):
    card = replace(CARD, pooling="attention", pooling_heads=heads)
    head = made(load("qwen3"), card).double()  # float32 would differ by the order of its sums
    hidden, sequence = torch.randn(9, 64).double() * 9, torch.tensor([2, 0, 0, 1, 2, 1, 1, 2, 1])
    found = head(hidden, sequence, 3)
    for index in range(3):
        keys = hidden[sequence == index].view(-1, heads, 64 // heads).transpose(0, 1)
        pooled = scaled_dot_product_attention(head.query.view(heads, 1, -1), keys, keys)
        expected = pooled.flatten() @ head.weight.T
        assert torch.allclose(found[index], expected, atol=1e-10)
        alone = head(hidden[sequence == index], torch.zeros(len(keys[0]), dtype=torch.long), 1)
        assert torch.allclose(found[index], alone[0], atol=1e-10)


@pytest.mark.parametrize("name", ["internvl", "qwen2_5_omni"])
def test_blocks_above_the_probed_one_wait_for_the_folder(load, name):
    model = load(name)
    before = dict(model.named_parameters())
    attach_reward(model, RewardHead(like=model, card=replace(CARD, probe_layer=-2), seed=0))
    assert len(model.get_decoder().layers) == 1 and len(model.score.above) == 1
    left = {n for n in before if ".layers.1." in n and "vis" not in n and "audio" not in n}
    assert before.keys() - dict(model.named_parameters()).keys() == left != set()
    with without_head(model):
        now = dict(model.named_parameters())
        assert now.keys() == before.keys() and all(now[n] is p for n, p in before.items())
    assert len(model.get_decoder().layers) == 1


@pytest.mark.parametrize("changes", [{}, {"head": "mlp"}, {"bounded": True}, {"probe_layer": 0}], ids=str)
def test_a_critic_takes_the_score_only_where_it_reads_alike(load, tmp_path, changes):
    model, card = load("qwen3"), replace(CARD, **changes)
    head = made(model, card)
    write_files(tmp_path, [head_file(head)])
    (tmp_path / "config.json").write_text(json.dumps({"reward_model": vars(card)}))
    attach_score(model, seed=0)
    drawn = model.score.weight.detach().clone()
    assert start_critic(model, tmp_path) == (not changes)
    assert torch.equal(model.score.weight, drawn if changes else head.weight[:1])
