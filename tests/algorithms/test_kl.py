from __future__ import annotations

import pytest
import torch

from saccade.algorithms.policy_losses import KINDS


def at(kind: str, gap: float, **options: str) -> tuple[float, float]:
    new = torch.tensor(gap, dtype=torch.float64, requires_grad=True)
    value = KINDS[kind].function(new, torch.zeros((), dtype=torch.float64), **options)
    (gradient,) = torch.autograd.grad(value, new)
    return value.item(), gradient.item()


@pytest.mark.parametrize(
    ("gap", "value", "bounded", "zero"),
    [
        (0.5, 0.10653066, 0.39346934, 0.39346934),
        (-0.5, 0.14872127, -0.64872127, -0.64872127),
        (3.0, 2.04978707, 0.95021293, 0.95021293),
        (-3.0, 10.0, -10.0, 0.0),
        (25.0, 10.0, 1.0, 0.0),
        (80.0, 10.0, 1.0, 0.0),
        (-25.0, 10.0, -10.0, 0.0),
        (-80.0, 10.0, -10.0, 0.0),
    ],
)
def test_k3_value_and_gradient(gap, value, bounded, zero):
    assert at("k3", gap) == pytest.approx((value, bounded), abs=1e-7)
    assert at("k3", gap, clamp="zero") == pytest.approx((value, zero), abs=1e-7)


@pytest.mark.parametrize(
    ("kind", "value", "norm"),
    [
        ("k1", 0.02017231, 0.23570226),
        ("abs", 0.22472270, 0.23570226),
        ("k2", 0.03900260, 0.06583025),
        ("k3", 0.03932377, 0.06873919),
        ("k1+", 0.02017231, 0.06583025),
        ("k3+", 0.03932377, 0.06583025),
    ],
)
def test_token_mean_over_the_fixture(golden, kind, value, norm):
    new = golden.new.clone().requires_grad_()
    mean = KINDS[kind].function(new, golden.ref).mean()
    (gradient,) = torch.autograd.grad(mean, new)
    assert mean.item() == pytest.approx(value, abs=1e-7)
    assert gradient.norm().item() == pytest.approx(norm, abs=1e-6)


def test_the_slope_of_k2_is_bounded():
    assert (at("k2", 80.0), at("k1+", -80.0)) == ((3200.0, 10.0), (-80.0, -10.0))
