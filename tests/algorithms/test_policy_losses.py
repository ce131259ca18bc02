from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from saccade.algorithms.policy_losses import LOSSES, LossOptions, clip

WIDER = {"clip_low": 0.2, "clip_high": 0.28}
DUAL = WIDER | {"dual_clip": 3.0}
CISPO = {"weight_low": 0.8, "weight_high": 1.28}


@pytest.mark.parametrize(
    ("name", "aggregation", "options", "value", "norm"),
    [
        ("clip", "token_mean", DUAL, -0.01597721, 0.19519572),
        ("clip", "token_mean", WIDER, -0.01597721, 0.19519572),
        ("clip", "token_mean", {"clip_low": 0.2, "clip_high": 0.2}, -0.00720716, None),
        ("clip", "seq_mean", DUAL, 0.01680592, None),
        ("clip", "seq_sum", DUAL, -0.07189746, None),
        ("clip", "fixed", DUAL, -0.01198291, None),
        ("clip", "fixed", DUAL | {"fixed_length": 8}, -0.00898718, None),
        ("clip", "token_sum", DUAL, -0.28758985, None),
        ("clip", "token_mean", WIDER | {"delta": 1.2}, -0.01271714, None),
        ("pg", "token_mean", {}, 0.00405473, 0.21154925),
        ("gspo", "seq_mean", WIDER, 0.00818288, 0.21525148),
        ("gspo_token", "seq_mean", WIDER, 0.00818288, 0.21525148),
        ("gspo", "token_mean", WIDER, -0.02304586, None),
        ("gspo", "seq_sum", WIDER, -0.10370637, None),
        ("gmpo", "seq_mean", WIDER, 0.01789110, 0.18932185),
        ("gmpo", "seq_mean", {"clip_low": 0.4, "clip_high": 0.4}, 0.00818288, 0.21525148),
        ("cispo", "token_mean", CISPO, 0.00441486, 0.22344794),
        ("cispo", "seq_mean", CISPO, -0.02104004, None),
        ("cispo", "token_mean", {}, 0.00198860, 0.22415962),
        ("sapo", "seq_mean", {}, -0.03365615, 0.22181508),
        ("sapo", "token_mean", {}, -0.09272676, None),
    ],
)
def test_golden_values(golden, name, aggregation, options, value, norm):
    found = golden.loss(name, aggregation, **options)
    assert found[0] == pytest.approx(value, abs=1e-7)
    assert norm is None or found[1] == pytest.approx(norm, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "aggregation", "options", "value", "norm"),
    [
        ("clip", "token_mean", DUAL, 0.34233654, 0.17149499),
        ("clip", "token_mean", WIDER, 0.51752342, 0.39904372),
        ("clip", "seq_mean", WIDER, 0.59067576, None),
        ("clip", "token_mean", WIDER | {"delta": 2.0}, 0.19534956, None),
        ("gspo", "seq_mean", WIDER, 0.06385399, 0.23074388),
        ("gmpo", "seq_mean", WIDER, 0.44283698, 0.20674894),
        ("gmpo", "seq_mean", {"clip_low": 0.4, "clip_high": 0.4}, 0.36144544, 0.19206558),
        ("cispo", "token_mean", CISPO, 0.03166245, 0.23181498),
        ("cispo", "token_mean", {}, 0.05648237, 0.53337001),
        ("sapo", "seq_mean", {}, -0.01435527, None),
    ],
)
def test_golden_values_far_from_old(golden, name, aggregation, options, value, norm):
    found = golden.loss(name, aggregation, wide=True, **options)
    assert found[0] == pytest.approx(value, abs=1e-7)
    assert norm is None or found[1] == pytest.approx(norm, abs=1e-6)


def test_sequence_losses_on_one_token_are_the_clip_loss(golden):
    first = golden.position == 0
    single = replace(
        golden,
        **{name: getattr(golden, name)[first] for name in ("old", "new", "advantages", "sequence")},
    )
    expected = single.loss("clip", "seq_mean", **WIDER)
    assert expected[0] == pytest.approx(0.05459771, abs=1e-7)
    for name in ("gspo", "gspo_token"):
        assert single.loss(name, "seq_mean", **WIDER) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["clip", "pg", "cispo", "sapo", "gspo_token"])
def test_on_policy_all_have_the_gradient_of_the_policy_gradient(golden, name):
    on_policy = replace(golden, new=golden.old)
    value, norm = on_policy.loss(name, "token_mean", dual_clip=3.0)
    assert norm == pytest.approx(0.21154925, abs=1e-6)
    if name == "clip":
        assert value == pytest.approx(-0.02777778, abs=1e-7)


def test_on_policy_sequence_losses_have_it_under_seq_mean(golden):
    on_policy = replace(golden, new=golden.old)
    expected = on_policy.loss("pg", "seq_mean")[1]
    for name in ("gspo", "gmpo"):
        assert on_policy.loss(name, "seq_mean")[1] == pytest.approx(expected, abs=1e-12)


def test_indicators_say_which_bound_took_the_gradient(golden):
    inputs, options = golden.inputs(), LossOptions(**DUAL)
    new = golden.wide.clone().requires_grad_()
    loss, indicators = clip(new, inputs, options)
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    stopped = indicators["clip_low"] | indicators["clip_high"] | indicators["clip_dual"]
    counts = {name: int(flags.sum()) for name, flags in indicators.items()}
    assert counts == {"clip_low": 4, "clip_high": 4, "clip_dual": 2}
    assert torch.equal(gradient == 0, stopped)


def test_a_gap_of_80_stays_finite(golden):
    for name, entry in LOSSES.items():
        for gap in (-80.0, 80.0):
            new = (golden.old + gap).requires_grad_()
            loss, _ = entry.function(new, golden.inputs(), LossOptions())
            (gradient,) = torch.autograd.grad(loss.sum(), new)
            assert loss.isfinite().all() and gradient.isfinite().all(), (name, gap)
