"""The balance loss beside others: its weight, its gradient, who reports it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from saccade.algorithms.build import resolve
from saccade.config import AlgorithmConfig, TrainConfig
from saccade.forest.packing import pack
from saccade.trainer import Scoring, local
from saccade.trainer.local import LocalBackend
from saccade.trainer.losses import PolicyLoss

ALGORITHM = resolve(AlgorithmConfig(preset="grpo", kl={"coef": 0.0}), max_tokens=64)
ROUTER = "model.layers.0.mlp.gate.weight"


@pytest.fixture
def step(family_of, load, grow, measured):
    """(metrics, gradients) of an update whose policy loss is 0: what is left is the balance."""

    def taken(name="mixtral", *, coef, budget=9999, checkpointing=False, scale=0.0):
        family = family_of(name)
        rng = np.random.default_rng(0)
        groups = [grow(rng, family, uid=f"g{i}", images=0) for i in range(2)]
        batches = [
            replace(b, scales=np.full(len(b.reads), scale, np.float32)) for b in pack(groups, micro_tokens=budget)
        ]
        train = TrainConfig(aux_coef=coef)
        backend = LocalBackend(load(name), family, train, checkpointing=checkpointing)
        return *measured(backend, batches, PolicyLoss(ALGORITHM, Scoring())), batches

    return taken


def test_it_is_the_loss_of_transformers_weighed_by_tokens(step, stock):
    metrics, gradients, packed = step(coef=0.5)
    assert len(packed) == 1
    assert 2.0 < metrics["moe/aux_loss"] < 4.0
    # A forest of one sequence can be run as a row by others.
    single, found, batches = step(coef=0.5, budget=1)
    assert len(batches) > 1
    total, share = 0.0, sum(b.tokens for b in batches)
    model = stock("mixtral")
    model.zero_grad()
    for b in batches:
        aux = model(torch.from_numpy(b.ids)[None], output_router_logits=True).aux_loss
        (0.5 * aux * b.tokens / share).backward()
        total += aux.item() * b.tokens / share
    assert single["moe/aux_loss"] == pytest.approx(total, rel=1e-5)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and "lm_head" not in name:
            assert torch.allclose(found[name], parameter.grad, atol=1e-6), name
    model.zero_grad()
    assert gradients[ROUTER].norm() > 1e-3
    assert not torch.allclose(gradients[ROUTER], found[ROUTER], atol=1e-6)  # packed otherwise


def test_recomputed_layers_have_the_same_gradient(step):
    _, wanted, _ = step(coef=0.1, scale=0.01)
    metrics, found, _ = step(coef=0.1, scale=0.01, checkpointing=True)
    assert all(torch.allclose(found[name], wanted[name], atol=1e-6) for name in wanted)
    told, plain, _ = step(coef=0.0, scale=0.01)
    assert not torch.allclose(plain[ROUTER], wanted[ROUTER], atol=1e-5)
    assert metrics["moe/aux_loss"] > 2.0 and "moe/aux_loss" not in told


def test_a_forest_that_did_not_fit_counts_once(step, monkeypatch):
    plain, calls = local.with_balance, []

    def failing(*arguments):
        found = plain(*arguments)
        if calls.append(1) or len(calls) == 1:
            raise torch.OutOfMemoryError
        return found

    monkeypatch.setattr(local, "with_balance", failing)
    metrics, _, _ = step(coef=0.1)
    # Halves repeat a trunk that they share, so that they weigh a little more.
    assert 2.0 < metrics["moe/aux_loss"] < 4.0 and metrics["mem/oom_splits"] == 1
