"""Mixtures of experts: the balance loss against transformers, sampling, adapters, files."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from saccade.config import LoraConfig, TrainConfig
from saccade.errors import EnvironmentProblem
from saccade.forest.packing import pack
from saccade.models import experts, lora
from saccade.models.families import load_family
from saccade.models.load import describe_trained, load_model
from saccade.plugins.families.tiny import build
from saccade.system.contents import write_files
from saccade.trainer import Scoring
from saccade.trainer.local import LocalTrainer


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_the_balance_loss_is_that_of_transformers(name, load, stock):
    ids = torch.arange(40).reshape(1, -1)
    theirs = stock(name)
    with torch.no_grad():
        wanted = theirs(ids, output_router_logits=True).aux_loss.item()
        with experts.recorded_logits(experts.routers(theirs)) as logits:
            theirs(ids)
    assert [tuple(layer.shape) for layer in logits] == [(40, 4)] * 2
    assert experts.balance_loss(logits, chosen=2).item() == pytest.approx(wanted, rel=1e-5)
    assert wanted > 2.0


def test_random_routes_are_refused(tmp_path):
    family = load_family(build("mixtral", tmp_path / "noise", text={"router_jitter_noise": 0.1}))
    with pytest.raises(EnvironmentProblem, match=r"router_jitter_noise=0.1 .*set it to 0"):
        load_model(family, dtype=torch.float32, device=torch.device("cpu"))


def test_adapters_sit_in_the_attention_and_the_run_says_so(load, family_of, grow, tmp_path):
    pytest.importorskip("peft")
    family, model = family_of("mixtral"), load("mixtral")
    lora.add(model, family, LoraConfig(rank=4), seed=0)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 4 * 2 and all(".self_attn." in name for name in trained)
    assert describe_trained(model, family).endswith(
        "llm 3,584 in adapters beside 239,424; no adapter reaches the 196,608 of experts, which are no linear layers"
    )
    for parameter in lora.adapters(model).values():
        parameter.data += 0.1
    backend = LocalTrainer(model, family, TrainConfig())
    write_files(tmp_path, backend.model_files())  # merged, every expert a tensor of its own as on the hub
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
    names = (tmp_path / "model.safetensors").read_bytes()[:20_000]
    assert b"block_sparse_moe.experts.3.w2.weight" in names and b"lora" not in names
    group = grow(np.random.default_rng(0), family, images=0)
    batches = pack([group], micro_tokens=9999)
    ids = torch.from_numpy(group.trajectories[0].ids)[None]
    with torch.no_grad():
        scores = merged.eval()(ids).logits.masked_fill(torch.from_numpy(family.banned), -1e30)
    mine, _ = backend.logprobs(batches, Scoring())[0]
    policy = np.flatnonzero(group.trajectories[0].policy_mask)
    wanted = scores[0, policy - 1].log_softmax(-1)[range(len(policy)), ids[0, policy]]
    assert np.abs(mine[: len(policy)] - wanted.numpy()).max() < 1e-4
