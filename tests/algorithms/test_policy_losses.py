from dataclasses import replace

import pytest
import torch

from saccade.algorithms.corrections import CORRECTIONS
from saccade.algorithms.policy_losses import KINDS, LOSSES, SelectionInputs, clip, log_ratio
from saccade.plugins.more_algorithms.more_losses import covariance, inside_kl, inside_tv, most_covariant, some_covariant

WIDER = {"clip_low": 0.2, "clip_high": 0.28}
DUAL = WIDER | {"dual_clip": 3.0}
WIDE_BAND = {"clip_low": 0.4, "clip_high": 0.4}
CISPO = {"weight_floor": 1 - 0.2, "weight_cap": 1 + 0.28}
DRIFT = {"drift_coef": 0.01, "drift_cap": 2.0}
SEQUENCE = {"kimi_level": "sequence"}


NEAR = [
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
    ("luspo", "seq_sum", WIDER, -0.10370637, None),
    ("gmpo", "seq_mean", WIDER, 0.01789110, 0.18932185),
    ("gmpo", "seq_mean", WIDE_BAND, 0.00818288, 0.21525148),
    ("cispo", "token_mean", CISPO, 0.00441486, 0.22344794),
    ("cispo", "seq_mean", CISPO, -0.02104004, None),
    ("cispo", "token_mean", {}, 0.00198860, 0.22415962),
    ("sapo", "seq_mean", {}, -0.03365615, 0.22181508),
    ("sapo", "token_mean", {}, -0.09272676, None),
    ("cpgd", "token_mean", {"drift_coef": 0.0}, 0.01964897, 0.17402728),
    ("cpgd", "seq_mean", {"drift_coef": 0.0}, 0.02370502, 0.17519830),
    ("cpgd", "token_mean", DRIFT, 0.01989565, 0.17427979),
    ("kimi", "token_mean", {"kimi_tau": 0.1}, 0.00652373, 0.21172051),
    ("dro", "token_mean", {"kimi_tau": 0.1}, 0.00652373, 0.21172051),
    ("kimi", "seq_sum", SEQUENCE, 0.01972582, 0.95251992),
    ("topr", "token_mean", {"topr_split": "reward"}, 0.01867529, 0.20772638),
    ("topr", "token_mean", {"topr_split": "advantage"}, 0.04508561, 0.20397893),
    ("kl_cov", "token_mean", {"cov_fraction": 0.2}, 0.00580263, 0.19587542),
    ("vespo", "token_mean", {}, 0.00583023, None),
]
FAR = [
    ("clip", "token_mean", DUAL, 0.34233654, 0.17149499),
    ("clip", "token_mean", WIDER, 0.51752342, 0.39904372),
    ("clip", "seq_mean", WIDER, 0.59067576, None),
    ("clip", "token_mean", WIDER | {"delta": 2.0}, 0.19534956, None),
    ("gspo", "seq_mean", WIDER, 0.06385399, 0.23074388),
    ("gmpo", "seq_mean", WIDER, 0.44283698, 0.20674894),
    ("gmpo", "seq_mean", WIDE_BAND, 0.36144544, 0.19206558),
    ("cispo", "token_mean", CISPO, 0.03166245, 0.23181498),
    ("cispo", "token_mean", {}, 0.05648237, 0.53337001),
    ("sapo", "seq_mean", {}, -0.01435527, None),
    ("dro", "token_mean", {"kimi_tau": 0.1}, 0.09185463, 0.21394788),
    ("dppo_tv", "token_mean", WIDER | {"weight_cap": 3.0}, 0.33593008, 0.29364659),
    ("dppo_kl", "token_mean", WIDER | {"weight_cap": 3.0}, 0.38326172, 0.31267874),
    ("cpgd", "token_mean", {"drift_coef": 0.0}, 0.40115634, 0.14500426),
    ("cpgd", "token_mean", DRIFT, 0.40916549, 0.14686710),
    ("topr", "token_mean", {"topr_split": "reward"}, 0.12324043, 0.20029090),
    ("topr", "token_mean", {"topr_split": "advantage"}, 0.28925999, 0.19182205),
]


@pytest.mark.parametrize(
    ("wide", "name", "aggregation", "options", "value", "norm"),
    [*((False, *row) for row in NEAR), *((True, *row) for row in FAR)],
)
def test_golden_values(golden, wide, name, aggregation, options, value, norm):
    """Near the old policy, and far from it."""
    found = golden.loss(name, aggregation, wide=wide, **options)
    assert found[0] == pytest.approx(value, abs=1e-7)
    assert norm is None or found[1] == pytest.approx(norm, abs=1e-6)


def test_vespo_takes_the_correction_into_its_sequence_weight(golden):
    weights = CORRECTIONS["tis.token"].function(golden.mismatch, high=2.0).weights
    value, _ = golden.loss("vespo", "token_mean", weights=weights)
    assert value == pytest.approx(0.01164343, abs=1e-7)
    dropped = golden.losses("vespo", golden.new, weights=torch.zeros_like(weights))
    assert dropped.isfinite().all() and dropped.abs().max() < 1e-12


def test_trust_regions(golden):
    inside = inside_tv(golden.new, golden.rollout, golden.advantages, 0.05, 0.05)
    gap = log_ratio(golden.new, golden.rollout)
    losses = -golden.advantages * gap.exp() * inside + 1e-3 * gap.square()
    assert losses.mean().item() == pytest.approx(0.06691051, abs=1e-7)
    old = torch.tensor([-1.0, -1.0, -1.0, -1.0, 0.0, 0.0, -1e-9], dtype=torch.float64)
    new = torch.tensor([-0.1, -5.0, -0.1, -5.0, -5.0, 0.0, 1e-9], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, 1.0, 1.0], dtype=torch.float64)
    inside = inside_kl(new, old, advantages, 0.1, 0.1)
    assert inside.tolist() == [False, True, True, False, False, True, True]


def test_cpgd_on_log_probs_differs_by_a_constant(golden):
    losses = golden.losses("cpgd", golden.new, drift_coef=0.0) - golden.advantages * golden.old
    total = (losses * golden.scales("seq_mean")).sum().item()
    assert total == pytest.approx(-0.00462831, abs=1e-7)


def test_a_lower_width_of_one_is_no_lower_bound(golden):
    new = golden.wide.clone().requires_grad_()
    losses, indicators = LOSSES["cpgd"].function(new, golden.inputs(), clip_low=1.0, drift_coef=0.0)
    (gradient,) = torch.autograd.grad(losses.sum(), new)
    assert not indicators["clip_low"].any() and gradient.isfinite().all()
    assert torch.equal(gradient == 0, indicators["clip_high"])


def test_indicators_say_which_bound_took_the_gradient(golden):
    new = golden.wide.clone().requires_grad_()
    loss, indicators = clip(new, golden.inputs(), **DUAL)
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    stopped = indicators["clip_low"] | indicators["clip_high"] | indicators["clip_dual"]
    counts = {name: int(flags.sum()) for name, flags in indicators.items()}
    assert counts == {"clip_low": 4, "clip_high": 4, "clip_dual": 2}
    assert torch.equal(gradient == 0, stopped)


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "gmpo", "vespo", "kimi"])
def test_sequence_statistics_see_live_tokens_only(golden, name):
    live = golden.position < 2
    options = SEQUENCE if name == "kimi" else {}
    short = replace(golden, **{n: getattr(golden, n)[live] for n in ("old", "new", "advantages", "sequence")})
    expected, _ = LOSSES[name].function(short.new, short.inputs(rewards=None), **options)
    found, _ = LOSSES[name].function(golden.new, golden.inputs(scales=live.double()), **options)
    assert torch.allclose(found[live], expected, rtol=1e-12)


def test_selected_tokens_of_clip_cov_have_no_loss(golden):
    selected = golden.position == 1
    plain, _ = clip(golden.new, golden.inputs())
    losses, indicators = LOSSES["clip_cov"].function(golden.new, golden.inputs(selected=selected))
    assert torch.equal(losses, plain * ~selected)
    assert torch.equal(indicators["selected"], selected)


@pytest.mark.parametrize("name", LOSSES)
def test_without_an_advantage_no_loss_moves_a_policy_from_where_it_was(name, golden):
    new = golden.old.clone().requires_grad_()
    inputs = golden.inputs(advantages=torch.zeros_like(new), selected=golden.live)
    losses, _ = LOSSES[name].with_options(WIDER)(new, inputs)
    losses.sum().backward()
    assert LOSSES[name].by_advantage and not new.grad.any()


def at(kind: str, gap: float, **options: str) -> tuple[float, float]:
    new = torch.tensor(gap, dtype=torch.float64, requires_grad=True)
    value = KINDS[kind].function(new, torch.zeros((), dtype=torch.float64), **options)
    (gradient,) = torch.autograd.grad(value, new)
    return value.item(), gradient.item()


@pytest.mark.parametrize(("gap", "value", "bounded", "zero"), [
    (0.5, 0.10653066, 0.39346934, 0.39346934), (-0.5, 0.14872127, -0.64872127, -0.64872127),
    (3.0, 2.04978707, 0.95021293, 0.95021293), (-3.0, 10.0, -10.0, 0.0),
    (25.0, 10.0, 1.0, 0.0), (-25.0, 10.0, -10.0, 0.0),
    (80.0, 10.0, 1.0, 0.0), (-80.0, 10.0, -10.0, 0.0),
])  # fmt: skip
def test_k3_value_and_gradient(gap, value, bounded, zero):
    assert at("k3", gap) == pytest.approx((value, bounded), abs=1e-7)
    assert at("k3", gap, kl_clamp="zero") == pytest.approx((value, zero), abs=1e-7)


@pytest.mark.parametrize(("kind", "value", "norm"), [
    ("k1", 0.02017231, 0.23570226), ("k1+", 0.02017231, 0.06583025),
    ("k3", 0.03932377, 0.06873919), ("k3+", 0.03932377, 0.06583025),
    ("k2", 0.03900260, 0.06583025), ("abs", 0.22472270, 0.23570226),
])  # fmt: skip
def test_token_mean_over_the_fixture(golden, kind, value, norm):
    new = golden.new.clone().requires_grad_()
    mean = KINDS[kind].function(new, golden.ref).mean()
    (gradient,) = torch.autograd.grad(mean, new)
    assert mean.item() == pytest.approx(value, abs=1e-7)
    assert gradient.norm().item() == pytest.approx(norm, abs=1e-6)


def test_the_slope_of_k2_is_bounded():
    assert (at("k2", 80.0), at("k1+", -80.0)) == ((3200.0, 10.0), (-80.0, -10.0))


@pytest.fixture
def tokens() -> SelectionInputs:
    noise = torch.Generator().manual_seed(3)
    old = -torch.rand(200, generator=noise, dtype=torch.float64)
    return SelectionInputs(
        old=old, new=old + 0.3 * torch.randn(200, generator=noise, dtype=torch.float64),
        advantages=torch.randn(200, generator=noise, dtype=torch.float64), noise=torch.randperm(200, generator=noise),
    )  # fmt: skip


def test_which_covariances_are_selected(tokens):
    chosen = most_covariant(tokens, cov_fraction=0.05)
    assert chosen.sum() == 10
    assert covariance(tokens)[chosen].min() > covariance(tokens)[~chosen].max()
    chosen = some_covariant(tokens, cov_fraction=1.0, cov_low=0.1, cov_high=0.3)
    ratio, advantages = (tokens.new - tokens.old).exp(), tokens.advantages
    active = ~((advantages > 0) & (ratio > 1.2)) & ~((advantages < 0) & (ratio < 0.8))
    inside = (covariance(tokens) > 0.1) & (covariance(tokens) < 0.3)
    assert 0 < chosen.sum() < inside.sum()
    assert torch.equal(chosen, inside & active)
