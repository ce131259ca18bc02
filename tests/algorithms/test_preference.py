"""What preferences and a teacher ask of a policy, in numbers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx
from torch import Tensor

from saccade.config import DpoConfig
from saccade.errors import ConfigError
from saccade.plugins.imitation.imitation_sources import kd
from saccade.plugins.preferences.preference_losses import (
    PREFERENCES,
    Labelled,
    Pairs,
    PreferenceLoss,
    from_config,
    objective,
)

FAST = settings(max_examples=20, deadline=None)
PAIRED = [name for name in PREFERENCES if name != "kto"]
CHOSEN, REJECTED = [0, 3], [1, 2]
LENGTHS = torch.tensor([6, 4, 5, 3])


def tensor(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def summed(golden, values: Tensor) -> Tensor:
    return values.new_zeros(4).index_add(0, golden.sequence, values)


def reference_pairs(golden, new: Tensor | None = None) -> Pairs:
    """Rows (0, 1) and (3, 2) of the reference fixture."""
    now, ref = summed(golden, golden.new if new is None else new), summed(golden, golden.ref)
    now, ref, lengths = ((each[CHOSEN], each[REJECTED]) for each in (now, ref, LENGTHS))
    return Pairs(policy=now, reference=ref, lengths=lengths)


def simple(chosen: Tensor, rejected: Tensor) -> Pairs:
    """One token each, and a reference of zero."""
    ones = torch.ones(len(chosen), dtype=torch.int64)
    zeros = torch.zeros_like(chosen)
    return Pairs(policy=(chosen, rejected), reference=(zeros, zeros), lengths=(ones, ones))


def losses_of(name: str, inputs: Any, **options: float) -> Tensor:
    losses, _ = PREFERENCES[name].function(inputs, **options)
    return losses


@pytest.mark.parametrize(("name", "options", "value"), [
    ("dpo", {"beta": 0.1}, 0.69188335),
    ("cdpo", {"beta": 0.1, "label_smoothing": 0.1}, 0.69216067),
    ("robust", {"beta": 0.1, "label_smoothing": 0.1}, 0.69153670),
    ("ipo", {"beta": 0.1}, 24.85559312),
    ("ipo_sum", {"beta": 0.1}, 24.82089424),
    ("dpo_norm", {"beta": 0.1}, 0.69239774),
    ("reference_free", {"beta": 0.1}, 0.68607393),
    ("hinge", {"beta": 0.1}, 0.99722682),
    ("simpo", {"beta": 2.0, "gamma": 1.0}, 1.22996199),
])  # fmt: skip
def test_the_reference_value_by_option_and_by_default(golden, name, options, value):
    pairs = reference_pairs(golden)
    losses = losses_of(name, pairs, **options)
    assert losses.shape == (2,) and losses.mean().item() == approx(value, abs=1e-7)
    assert torch.equal(losses_of(name, pairs), losses)


def test_the_reference_values_of_kto_and_of_the_nll_of_the_chosen(golden):
    chosen, ref = torch.tensor([True, False, False, True]), summed(golden, golden.ref)
    labelled = Labelled(logprobs=summed(golden, golden.new), ref=ref, desirable=chosen, z=tensor(0.05)[0])
    assert losses_of("kto", labelled).mean().item() == approx(0.49965335, abs=1e-7)
    row = PreferenceLoss(loss="dpo", options={"beta": 0.1}, count=2)
    _, sums = objective(row, golden.new, golden.sequence, chosen, LENGTHS, ref)
    total, tokens = sums.means["dpo/nll"]
    assert tokens.item() == 9 and (total / tokens).item() == approx(0.78735816, abs=1e-7)
    # A step without good responses has none.
    lengths, sequence = torch.tensor([2, 1]), torch.tensor([0, 0, 1])
    row = PreferenceLoss(loss="kto", options={"beta": 0.1}, nll_coef=0.5, count=2)
    loss, _ = objective(row, tensor(-1, -2, -3), sequence, torch.tensor([False, False]), lengths, tensor(-2, -2))
    assert loss.item() == approx(tensor(-0.1, -0.1).sigmoid().mean().item())


def test_the_gradient_of_dpo_with_respect_to_tokens(golden):
    new = golden.new.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(losses_of("dpo", reference_pairs(golden, new)).mean(), new)
    assert gradient.norm().item() == approx(0.10611566, abs=1e-6)


def test_rewards_are_what_the_loss_compares(golden):
    pairs = reference_pairs(golden)
    for name, margins in (("dpo", (-0.28442758, 0.33989124)), ("ipo", (-0.06896554, 0.09930876))):
        _, metrics = PREFERENCES[name].function(pairs, beta=1.0)
        assert metrics["margin"].tolist() == approx(margins, abs=1e-7)
        assert metrics["accuracy"].tolist() == [False, True]
        assert torch.equal(metrics["reward_chosen"] - metrics["reward_rejected"], metrics["margin"])
    _, metrics = PREFERENCES["dpo"].function(pairs, beta=0.5)
    assert metrics["reward_chosen"].tolist() == approx((0.5 * pairs.ratios()[0]).tolist())


numbers = st.lists(st.floats(-50, 50), min_size=4, max_size=4)


@FAST
@given(chosen=numbers, rejected=numbers, reference=numbers, beta=st.floats(0.01, 2))
@pytest.mark.parametrize("name", ["cdpo", "robust"])
def test_without_wrong_labels_it_is_dpo(name, chosen, rejected, reference, beta):
    def value_and_gradient(loss: str, **options: float) -> Tensor:
        sides = tensor(*chosen).requires_grad_(), tensor(*rejected).requires_grad_()
        pairs = simple(*sides)
        pairs = replace(pairs, reference=(tensor(*reference), pairs.reference[1]))
        losses = losses_of(loss, pairs, beta=beta, **options)
        return torch.stack([losses, *torch.autograd.grad(losses.sum(), sides)])

    wanted = value_and_gradient("dpo")
    found = value_and_gradient(name, label_smoothing=0.0)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", PAIRED)
def test_a_gap_of_80_is_finite_and_pulls_the_right_way(name):
    for dtype in (torch.float32, torch.float64):
        chosen = torch.tensor([-80.0, 80.0], dtype=dtype, requires_grad=True)
        losses = losses_of(name, simple(chosen, torch.zeros(2, dtype=dtype)), beta=1.0)
        (gradient,) = torch.autograd.grad(losses.sum(), chosen)
        assert losses.isfinite().all() and gradient.isfinite().all()
        assert losses.dtype == dtype and gradient[0] <= -0.89
        if name == "dpo" and dtype == torch.float64:
            assert losses.tolist() == approx([80.0, 1.8048513878454153e-35], rel=1e-12)
            assert gradient.tolist() == approx([-1.0, -1.8048513878454153e-35], rel=1e-12)


def test_robust_refuses_labels_that_say_nothing():
    with pytest.raises(ConfigError, match=r"dpo\.args.*label_smoothing"):
        from_config(DpoConfig(loss="robust", args={"label_smoothing": 0.5}))


def test_kto_by_label():
    z = tensor(0.5).requires_grad_()
    logprobs = tensor(80.0, -80.0, 80.0, -80.0, 0.5).requires_grad_()
    desirable = torch.tensor([True, True, False, False, False])
    labelled = Labelled(logprobs=logprobs, ref=tensor(0, 0, 0, 0, 0), desirable=desirable, z=z[0])
    losses, metrics = PREFERENCES["kto"].function(labelled, beta=1.0, desirable_weight=2.0, undesirable_weight=3.0)
    assert losses.tolist() == approx([0.0, 2.0, 3.0, 0.0, 1.5])
    assert metrics["reward_chosen"].tolist() == [80.0, -80.0]
    assert metrics["reward_rejected"].tolist() == [80.0, -80.0, 0.5]
    losses.sum().backward()
    assert z.grad is None
    assert logprobs.grad is not None and logprobs.grad.tolist() == approx([0, 0, 0, 0, 0.75])


def reference_logits() -> tuple[Tensor, Tensor, Tensor]:
    place = torch.arange(30, dtype=torch.float64).view(6, 5)
    return 2 * torch.sin(0.7 * place), torch.cos(0.3 * place), torch.tensor([0, 1, 2, 3, 4, 0])


def test_the_reference_values_of_distillation_also_in_chunks():
    losses, written, taught = kd(*reference_logits())
    means = [values.mean().item() for values in (written, taught, losses)]
    assert means == approx([2.88561003, 2.19322246, 2.60865500], abs=1e-7)
    parts = [kd(*rows)[0] for rows in zip(*(x.split(2) for x in reference_logits()), strict=True)]
    assert torch.equal(torch.cat(parts), losses)


def test_a_banned_id_is_as_if_it_were_not_in_the_vocabulary():
    logits, teacher, _ = reference_logits()
    targets = torch.tensor([0, 1, 2, 3, 3, 0])
    banned = logits.clone()
    banned[:, 4] = -torch.inf
    banned.requires_grad_()
    losses, *_ = kd(banned, teacher, targets)
    assert torch.allclose(losses, kd(logits[:, :4], teacher[:, :4], targets)[0], rtol=0, atol=1e-12)
    (gradient,) = torch.autograd.grad(losses.sum(), banned)
    assert gradient.isfinite().all() and not gradient[:, 4].any()
