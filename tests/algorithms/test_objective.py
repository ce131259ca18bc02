from dataclasses import replace

import pytest
import torch
from pytest import approx

from saccade.algorithms.advantages import ADVANTAGES, compute
from saccade.algorithms.build import resolve
from saccade.algorithms.objective import explained_variance, objective, to_metrics, value_loss, value_objective
from saccade.algorithms.policy_losses import LossInputs
from saccade.config import AlgorithmConfig, KLConfig

WIDE = {"clip_high": 0.28, "dual_clip": 3.0}
GRPO = resolve(AlgorithmConfig(args=WIDE, kl=KLConfig(coef=0.1)), max_tokens=8)
NO_KL = resolve(AlgorithmConfig(args=WIDE, kl=KLConfig(coef=0)), max_tokens=8)


def columns(golden, aggregation="token_mean", **changes) -> LossInputs:
    known = {"scales": golden.scales(aggregation), "rollout": golden.rollout, "ref": golden.ref}
    return golden.inputs(**known | changes)


def means(algorithm, new, columns, entropy=None):
    _, stats = objective(algorithm, new, entropy, columns)
    return to_metrics([stats]).means()


def test_clip_with_a_kl_in_the_loss_which_the_ratio_may_correct(golden):
    for aggregation, value in (("seq_mean", 0.02083331), ("token_mean", -0.01204484)):
        loss, _ = objective(GRPO, golden.new, None, columns(golden, aggregation))
        assert loss.item() == pytest.approx(value, abs=1e-7)
    corrected = GRPO.model_copy(update={"kl": GRPO.kl.model_copy(update={"ratio_correct": True})})
    new = golden.new.clone().requires_grad_()
    loss, _ = objective(corrected, new, None, columns(golden, "seq_mean"))
    assert loss.item() == pytest.approx(0.02100357, abs=1e-7)
    # The gradient flows through both factors.
    without, _ = objective(NO_KL, new, None, columns(golden, "seq_mean"))
    (gradient,) = torch.autograd.grad(loss - without, new)
    ratio, gap = (golden.new - golden.old).exp(), golden.new - golden.ref
    slope = 1 - (-gap).exp() + (-gap).exp() - 1 + gap
    assert torch.allclose(gradient, 0.1 * ratio * slope * golden.scales("seq_mean"), atol=1e-12)


def test_strictly_on_policy_the_ratio_is_exactly_one(golden):
    new = golden.new.float().requires_grad_()
    flat = columns(golden, old=golden.new)
    log = means(NO_KL, new, columns(golden, old=new.detach()))
    assert log["policy/ratio_mean"] == 1 and log["policy/ratio_max"] == 1
    assert log["policy/kl_old"] == 0 and log["policy/kl_old_k1"] == 0
    assert log["policy/clip_frac_low"] == log["policy/clip_frac_high"] == 0
    assert log["policy/clip_frac_dual"] == 0
    loss, _ = objective(NO_KL, golden.new.clone().requires_grad_(), None, flat)
    assert loss.item() == pytest.approx(-0.02777778, abs=1e-7)


def test_entropy_bonus(golden):
    entropy = torch.rand(18, dtype=torch.float64)
    keep = (golden.position == 0).double()  # a filter is about the policy term alone
    flat = columns(golden, keep=keep)
    bonus, _ = objective(NO_KL.model_copy(update={"entropy_coef": 0.01}), golden.new, entropy, flat)
    without, _ = objective(NO_KL, golden.new, entropy, flat)
    assert (without - bonus).item() == pytest.approx(0.01 * entropy.mean().item(), abs=1e-12)


def test_metrics_are_means_over_live_tokens(golden):
    entropy = torch.full((18,), 0.7, dtype=torch.float64)
    log = means(GRPO, golden.new, columns(golden), entropy)
    gap = golden.old - golden.rollout
    expected = {
        "policy/loss": -0.01204484, "policy/pg_loss": -0.01597721, "policy/kl_loss": 0.03932377,
        "policy/kl_ref": 0.03932377, "policy/kl_ref_k1": 0.02017231, "policy/entropy": 0.7,
        "policy/ratio_mean": (golden.new - golden.old).exp().mean().item(),
        "mismatch/logp_gap_mean": gap.abs().mean().item(), "mismatch/logp_gap_max": gap.abs().max().item(),
        "mismatch/mult_prob_error": gap.abs().exp().mean().item(), "mismatch/unscored_frac": 0.0,
    }  # fmt: skip
    assert {name: log[name] for name in expected} == pytest.approx(expected, abs=1e-7)


def test_unscored_tokens_are_counted_and_in_no_mismatch(golden):
    rollout = golden.rollout.clone()
    rollout[[2, 9]] = float("nan")
    log = means(NO_KL, golden.new, columns(golden, rollout=rollout))
    scored = ~rollout.isnan()
    gap = (golden.old - golden.rollout)[scored].abs()
    assert log["mismatch/unscored_frac"] == pytest.approx(2 / 18)
    assert log["mismatch/logp_gap_mean"] == pytest.approx(gap.mean().item(), abs=1e-12)
    bypass = NO_KL.model_copy(update={"old": "rollout"})
    loss, _ = objective(bypass, golden.new, None, columns(golden, rollout=rollout))
    assert loss.isfinite()
    loss, _ = objective(bypass, golden.new, None, columns(golden))
    assert loss.item() == objective(NO_KL, golden.new, None, columns(golden, old=golden.rollout))[0].item()
    without, _ = objective(NO_KL, golden.new, None, columns(golden, old=golden.new, rollout=None))
    assert without.isfinite()


def test_mismatch_by_kind_of_prompt(golden):
    images = golden.sequence < 2
    log = means(NO_KL, golden.new, columns(golden, images=images))
    gap = (golden.old - golden.rollout).abs()
    for kind, mask in (("image", images), ("text", ~images)):
        expected = gap[mask].mean().item()
        assert log[f"mismatch/logp_gap_mean/{kind}"] == pytest.approx(expected, abs=1e-12)
    log = means(NO_KL, golden.new, columns(golden, images=golden.live))
    assert not any(name.endswith("/text") for name in log) and "mismatch/logp_gap_max/image" in log


def test_micro_batches_add_up_to_the_step(golden):
    whole = means(GRPO, golden.new, columns(golden, "seq_mean"))
    total, together = 0.0, []
    for rows in ((0,), (1, 3), (2,), ()):
        inside = torch.isin(golden.sequence, torch.tensor(rows, dtype=torch.int64))
        part = columns(golden, "seq_mean")
        cut = {name: column[inside] for name, column in vars(part).items() if torch.is_tensor(column)}
        loss, stats = objective(GRPO, golden.new[inside], None, replace(part, **cut))
        total += loss.item()
        together.append(stats)
    assert total == pytest.approx(whole["policy/loss"], abs=1e-12)
    assert to_metrics(together).means() == pytest.approx(whole, abs=1e-12)


def test_a_step_without_live_tokens_has_no_loss_to_report(golden):
    nothing = columns(golden, scales=torch.zeros_like(golden.old))
    loss, stats = objective(GRPO, golden.new, None, nothing)
    assert loss.item() == 0
    assert "policy/loss" not in to_metrics([stats]).means()


def tensor(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_the_worse_of_both_counts_and_beyond_the_clip_nothing_pulls_on():
    #           inside, too far towards the return, too far away from it
    new = tensor(0.1, 0.5, -0.5).requires_grad_()
    losses, clipped = value_loss(new, tensor(0, 0, 0), tensor(1, 1, 1), clip=0.2)
    assert losses.tolist() == approx([0.5 * 0.9**2, 0.5 * 0.8**2, 0.5 * 1.5**2])
    assert clipped.tolist() == [False, True, False]
    (gradient,) = torch.autograd.grad(losses.sum(), new)
    assert gradient.tolist() == approx([-0.9, 0.0, -1.5])


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_what_is_not_live_reaches_nothing(clip):
    nan = float("nan")
    new = tensor(1.0, nan, 3.0).requires_grad_()
    loss, stats = value_objective(new, tensor(1.0, nan, 0.0), tensor(0.0, nan, 4.0), tensor(0.5, 0, 0.5), clip=clip)
    means = to_metrics([stats]).means()
    wanted = 0.25 * (1 + (1 if clip == 0 else 3.8**2))
    assert loss.item() == approx(wanted) and means["critic/loss"] == approx(wanted)
    assert means["critic/value_mean"] == 2.0 and means["critic/clip_frac"] == (0.5 if clip else 0)
    loss.backward()
    assert new.grad is not None and new.grad.tolist() == approx([0.5, 0.0, -0.5 if clip == 0 else 0.0])


def test_the_reference_value_of_a_critic_also_in_micro_batches(golden):
    old = 0.1 * (golden.sequence + golden.position).double().cos()
    gae = ADVANTAGES["gae"].with_options({"gamma": 0.99, "lam": 0.95})
    returns = compute(gae, golden.members(values=old)).returns
    rows = (old + 0.3 * golden.position.double().sin(), old, returns, torch.full_like(old, 1 / 18))
    whole = to_metrics([value_objective(*rows, clip=0.2)[1]]).means()
    parts = [value_objective(*(c[part] for c in rows), clip=0.2)[1] for part in (slice(5), slice(5, 6), slice(6, 18))]
    assert to_metrics(parts).means() == approx(whole)
    assert whole["critic/loss"] == approx(0.43915905, abs=1e-7)
    assert to_metrics([]).means() == {}


def test_explained_variance():
    returns, live = tensor(0, 1, 2, 3, 99), torch.tensor([True] * 4 + [False])
    assert explained_variance(returns, returns, live) == 1.0
    assert explained_variance(tensor(5, 5, 5, 5, float("nan")), returns, live) == 0.0
    assert explained_variance(returns / 2, returns, live) == approx(0.75)
    assert explained_variance(returns, torch.ones(5), live) is None
    assert explained_variance(returns, returns, torch.zeros(5, dtype=torch.bool)) is None
