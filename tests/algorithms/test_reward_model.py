"""What pairs ask of the scores of a reward model, in numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

from saccade.plugins.reward_models.reward_losses import (
    FIRST_LOG_KAPPA,
    LARGEST_LOG_KAPPA,
    REWARD_LOSSES,
    bt,
    center,
    hps,
    logexp,
    reward_metrics,
    tie,
)

FAST = settings(max_examples=50, deadline=None)
TIGHT = 1e-10
scores = st.lists(st.floats(-80, 80), min_size=3, max_size=3)


def tensor(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


CHOSEN, REJECTED = tensor(1.2, -0.3, 0.5), tensor(0.7, 0.4, 0.5)


@pytest.mark.parametrize(
    ("name", "options", "value"),
    [
        ("bt", {}, 0.75680340),
        ("logexp", {}, 0.75680340),
        ("bt", {"margin": 0.1}, 0.80950419),
        ("bt", {"margin": tensor(0.1, 0.1, 0.1)}, 0.80950419),
    ],
)
def test_the_reference_value(name, options, value):
    losses = REWARD_LOSSES[name].function(CHOSEN, REJECTED, **options)
    assert losses.shape == (3,) and losses.mean().item() == approx(value, abs=1e-7)


@pytest.mark.parametrize(("kappa", "value"), [(1 / 0.07, 1.15375923), (1.0, 0.70694604)])
def test_the_reference_value_of_hps_on_sigmoids(kappa, value):
    losses = hps(CHOSEN.sigmoid(), REJECTED.sigmoid(), kappa=kappa)
    assert losses.mean().item() == approx(value, abs=1e-7)


@FAST
@given(chosen=scores, rejected=scores)
def test_logexp_is_bt_and_a_softplus(chosen, rejected):
    chosen, rejected = tensor(*chosen), tensor(*rejected)
    found = logexp(chosen, rejected)
    assert torch.allclose(found, bt(chosen, rejected), rtol=0, atol=TIGHT)
    exact = softplus(rejected - chosen, threshold=700)  # above it, torch leaves the logarithm out
    assert torch.allclose(found, exact, rtol=0, atol=TIGHT)


@FAST
@given(chosen=scores, rejected=scores, kappa=st.floats(0.01, 100))
def test_hps_is_bt_on_scaled_scores_and_a_cross_entropy(chosen, rejected, kappa):
    chosen, rejected = tensor(*chosen), tensor(*rejected)
    found = hps(chosen, rejected, kappa=kappa)
    scaled = kappa * torch.stack([chosen, rejected], -1)
    assert torch.allclose(found, bt(scaled[:, 0], scaled[:, 1]), rtol=0, atol=TIGHT)
    first = torch.zeros(3, dtype=torch.int64)
    assert torch.allclose(found, cross_entropy(scaled, first, reduction="none"), rtol=0, atol=TIGHT)


def test_the_scale_of_hps_is_learned():
    log_kappa = tensor(FIRST_LOG_KAPPA).requires_grad_()
    hps(CHOSEN, REJECTED, kappa=log_kappa.exp()).sum().backward()
    assert log_kappa.grad is not None and log_kappa.grad.isfinite().all() and log_kappa.grad.any()
    assert [math.exp(FIRST_LOG_KAPPA), math.exp(LARGEST_LOG_KAPPA)] == approx([1 / 0.07, 100])
    assert REWARD_LOSSES["hps"].required == ("kappa",)


def test_a_margin_counts_for_its_own_pair():
    assert bt(CHOSEN, REJECTED, margin=tensor(0.5, -0.7, 0.0)).tolist() == approx([math.log(2)] * 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", REWARD_LOSSES)
def test_a_gap_of_80_is_finite_and_exact(name, dtype):
    chosen = torch.tensor([-80.0, 80.0], dtype=dtype, requires_grad=True)
    options = {"kappa": 1.0} if name == "hps" else {}
    losses = REWARD_LOSSES[name].function(chosen, torch.zeros(2, dtype=dtype), **options)
    (gradient,) = torch.autograd.grad(losses.sum(), chosen)
    assert losses.tolist() == approx([80.0, 1.8048513878454153e-35], rel=1e-5)
    assert gradient.tolist() == approx([-1.0, -1.8048513878454153e-35], rel=1e-5)


def test_the_largest_scale_on_a_gap_of_80_is_finite():
    chosen = torch.tensor([-80.0, 80.0], requires_grad=True)
    losses = hps(chosen, torch.zeros(2), kappa=100.0)
    (gradient,) = torch.autograd.grad(losses.sum(), chosen)
    assert losses.tolist() == [8000.0, 0.0] and gradient.tolist() == [-100.0, 0.0]


def test_the_center_and_the_tie_terms():
    assert center(CHOSEN, REJECTED).tolist() == approx([1.9**2, 0.1**2, 1.0])
    assert tie(CHOSEN, REJECTED).tolist() == approx([0.5, 0.7, 0.0])
    assert torch.equal(tie(CHOSEN, REJECTED), tie(REJECTED, CHOSEN))


def test_metrics_per_pair_and_a_draw_is_no_success():
    metrics = reward_metrics(CHOSEN.clone().requires_grad_(), REJECTED)
    assert metrics["accuracy"].tolist() == [True, False, False]
    assert metrics["gap"].tolist() == approx([0.5, -0.7, 0.0])
    assert torch.equal(metrics["chosen_mean"], CHOSEN)
    assert torch.equal(metrics["rejected_mean"], REJECTED)
    assert not any(values.requires_grad for values in metrics.values())
