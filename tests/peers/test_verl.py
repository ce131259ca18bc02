"""Losses, KL estimates, advantages and corrections of verl."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from saccade.algorithms import corrections
from saccade.algorithms.advantages import ADVANTAGES, AdvantageInputs, compute
from saccade.algorithms.aggregation import AGGREGATIONS, token_scales
from saccade.algorithms.algorithm_state import next_kl_coef
from saccade.algorithms.objective import value_objective
from saccade.algorithms.policy_losses import KINDS

core = pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)
helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper", exc_type=ImportError)

# It adds 1e-8 to the lengths that divide a mean over a sequence.
DTYPES = {torch.float64: 1e-7, torch.float32: 1e-6}
HIGHER = {"clip_low": 0.2, "clip_high": 0.28}
Drawn = Callable[..., Any]

MODES = {  # theirs, ours
    "token-mean": "token_mean",
    "token-sum": "token_sum",
    "seq-mean-token-sum": "seq_sum",
    "seq-mean-token-mean": "seq_mean",
    "seq-mean-token-sum-norm": "fixed",
}
COVARIANCE = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 1.0}
VERL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # aggregation, policy_loss, ours
    **{
        f"vanilla {mode}": (mode, {}, {"aggregation": mine, "dual_clip": 1.5, **HIGHER}) for mode, mine in MODES.items()
    },
    "gspo": ("seq-mean-token-mean", {}, {"policy_loss": "gspo_token", **HIGHER}),
    "gspo token-mean": ("token-mean", {}, {"policy_loss": "gspo_token", "aggregation": "token_mean", **HIGHER}),
    "sapo": ("seq-mean-token-mean", {}, {"policy_loss": "sapo", "aggregation": "seq_mean"}),
    "gpg": ("token-mean", {}, {"policy_loss": "pg", "aggregation": "token_mean"}),
    "geo_mean": ("token-mean", {}, {"policy_loss": "gmpo", **HIGHER}),
    "cispo": (
        "token-mean",
        {},
        {
            "policy_loss": "cispo",
            "args": {"weight_floor": 0.8, "weight_cap": 1 + HIGHER["clip_high"]},
            "aggregation": "token_mean",
        },
    ),
    "dro": (
        "token-mean",
        {"dro_beta": 0.1},
        {"policy_loss": "dro", "aggregation": "token_mean", "args": {"kimi_tau": 0.1}},
    ),
    "kl_cov": (
        "token-mean",
        {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7},
        {"policy_loss": "kl_cov", "aggregation": "token_mean", "args": {"cov_fraction": 0.2, "cov_coef": 0.7}},
    ),
    # Which of the tokens inside the band are left out is drawn by lot: here all of them are.
    "clip_cov": (
        "token-mean",
        COVARIANCE,
        {
            "policy_loss": "clip_cov",
            "aggregation": "token_mean",
            "args": {"cov_fraction": 1.0, "cov_low": 0.1, "cov_high": 1.0},
            **HIGHER,
        },
    ),
    **{
        name: (
            "token-mean",
            {},
            {"policy_loss": name, "aggregation": "token_mean", "args": {"weight_cap": 1.5}, **HIGHER},
        )
        for name in ("dppo_tv", "dppo_kl")
    },
}


def verl_loss(case, rows, weights=None):
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    mode, policy_loss, _ = VERL[case]
    new = rows.new.clone().requires_grad_()
    loss, _ = core.get_policy_loss_fn(case.split()[0])(
        old_log_prob=rows.old,
        log_prob=new,
        advantages=rows.advantages[:, None].expand_as(new),
        response_mask=rows.mask.to(new.dtype),
        loss_agg_mode=mode,
        config=ActorConfig(
            strategy="fsdp",
            rollout_n=4,
            ppo_micro_batch_size_per_gpu=1,
            clip_ratio_low=0.2,
            clip_ratio_high=0.28,
            clip_ratio_c=1.5,
            policy_loss=PolicyLossConfig(**policy_loss),
        ),
        rollout_is_weights=weights,
    )
    return loss.detach(), torch.autograd.grad(loss, new)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", VERL)
def test_losses(drawn, assert_ours, case, dtype):
    for rows in drawn(dtype):
        assert_ours(VERL[case][2], rows, verl_loss(case, rows), DTYPES[dtype])


@pytest.mark.parametrize("case", ["vanilla token-mean", "gspo", "cispo", "gpg", "kl_cov"])
def test_correction_weights(drawn, assert_ours, case):
    for rows in drawn():
        weights = rows.mismatch.ratio
        theirs = verl_loss(case, rows, rows.padded(weights, 9.0))
        assert_ours(VERL[case][2], rows, theirs, 1e-7, weights=weights)


def assert_same_kl(kind, new, ref):
    found = []
    for function in (
        lambda new: KINDS[kind].having({"clamp": "zero"})(new, ref),
        lambda new: core.kl_penalty(new, ref, kind),
    ):
        leaf = new.clone().requires_grad_()
        value = function(leaf)
        found.append((value.detach(), torch.autograd.grad(value.sum(), leaf)[0]))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_kl(drawn, kind):
    for rows in drawn():
        assert_same_kl(kind, rows.new, rows.ref)


def test_k3_far_away():
    """Value and, with `zero`, the lost gradient. The k2 slopes of verl grow on, ours stop at 10."""
    gaps = torch.tensor([-80.0, -25, -3, 3, 25, 80]).double()
    assert_same_kl("k3", torch.full_like(gaps, -1), -1 - gaps)


@pytest.mark.parametrize("mode", MODES)
def test_aggregation(drawn, mode):
    for rows in drawn():
        scales, _ = token_scales(
            AGGREGATIONS[MODES[mode]].having({"fixed_length": 7}),
            rows.sequence,
            live=torch.ones(len(rows.mask), dtype=torch.bool),
        )
        theirs = core.agg_loss(rows.new, rows.mask.double(), mode, loss_scale_factor=7)
        mine = (rows.new[rows.mask] * scales).sum()
        assert mine.item() == pytest.approx(theirs.item(), rel=1e-7)


def test_value_loss(drawn):
    for rows in drawn():
        theirs, mine = (rows.new.clone().requires_grad_() for _ in range(2))
        wanted, fraction = core.compute_value_loss(theirs, rows.ref, rows.old, rows.mask.double(), cliprange_value=0.2)
        new, old, returns = (column[rows.mask] for column in (mine, rows.old, rows.ref))
        scales = torch.ones_like(old) / rows.tokens
        loss, stats = value_objective(new, old, returns, scales, clip=0.2)
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-9)
        assert stats.clipped.item() / rows.tokens == pytest.approx(fraction.item())
        gradients = (torch.autograd.grad(loss, mine)[0], torch.autograd.grad(wanted, theirs)[0])
        torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


def test_kl_controller():
    controller = core.AdaptiveKLController(0.1, 0.05, 1000)
    coef = 0.1
    for measured in (0.0, 0.04, 0.052, 0.3):
        controller.update(measured, 64)
        coef = next_kl_coef(coef, measured=measured, sequences=64, target=0.05, horizon=1000)
        assert coef == pytest.approx(controller.value, rel=1e-12)


ESTIMATORS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # ours, options; theirs
    "grpo": ("grpo", {}, {}),
    "grpo without std": ("no_std", {}, {"norm_adv_by_std_in_grpo": False}),
    "grpo_passk": ("grpo_passk", {}, {"config": {"norm_adv_by_std_in_grpo": True}}),
    "grpo_passk without std": ("grpo_passk", {"divide_by_std": False}, {"config": {"norm_adv_by_std_in_grpo": False}}),
    "rloo": ("rloo", {}, {}),
    "rloo_vectorized": ("rloo", {}, {}),
    "opo": ("opo", {}, {}),
    "gpg": ("gpg", {"gpg_alpha": "nonzero_rewards"}, {}),
    "gdpo": ("gdpo", {"gdpo_whiten": "token"}, {}),
    "reinforce_plus_plus_baseline": ("reinforce_pp_baseline", {}, {}),
    "reinforce_plus_plus": ("reinforce_pp", {"gamma": 0.97}, {"config": SimpleNamespace(gamma=0.97)}),
    "remax": ("remax", {}, {}),
    "gae": ("gae", {"gamma": 0.99, "lam": 0.9}, {"gamma": 0.99, "lam": 0.9}),
}


def members(rows, **columns):
    everybody = torch.ones(len(rows.mask), dtype=torch.bool)
    nothing = torch.zeros(rows.tokens, dtype=torch.float64)
    fields = {
        "rewards": rows.scores,
        "groups": torch.from_numpy(rows.groups),
        "live": everybody,
        "baseline": everybody,
        "lengths": rows.mask.sum(1),
        "sequence": rows.sequence,
        "token_penalties": nothing,
        "values": rows.new[rows.mask],
        "greedy": rows.advantages,
        "components": rows.scores[:, None],
        "component_weights": nothing[:1] + 1,
    }
    return AdvantageInputs(**(fields | columns))


@pytest.mark.parametrize("case", ESTIMATORS)
def test_advantages(drawn, case):
    """With a KL in the reward of every token, which outcome estimators sum up."""
    name, options, more = ESTIMATORS[case]
    for rows in drawn():
        mask, last = rows.mask.double(), rows.mask.long().cumsum(1).argmax(1)
        penalties = 0.1 * (rows.old - rows.ref) * mask * (case != "gdpo")  # no component of gdpo's
        rewards = -penalties
        rewards[torch.arange(len(mask)), last] += rows.scores
        read = {
            "remax": {"reward_baselines": rows.advantages},
            "gae": {"values": rows.new},
            "reinforce_plus_plus": {},
        }.get(case, {"index": rows.groups})
        wanted, returns = core.get_adv_estimator_fn(case.split()[0])(
            token_level_rewards=rewards, response_mask=mask, **read, **more
        )
        inputs = members(rows, token_penalties=penalties[rows.mask])
        found = compute(ADVANTAGES[name].having(options), inputs)
        torch.testing.assert_close(found.values, wanted[rows.mask], rtol=1e-9, atol=1e-9)
        if case == "gae":
            torch.testing.assert_close(found.returns, returns[rows.mask], rtol=1e-9, atol=1e-9)


def test_gdpo_of_several_terms(drawn):
    for rows in drawn():
        terms = {"first": rows.scores, "second": rows.advantages.sign()}
        ones = torch.ones_like(rows.mask, dtype=torch.int64)
        wanted, _ = core.get_adv_estimator_fn("gdpo")(
            token_level_rewards=torch.zeros_like(rows.new),
            response_mask=rows.mask.double(),
            index=rows.groups,
            config={"gdpo_reward_keys": list(terms), "gdpo_reward_weights": [1.0, 0.5]},
            non_tensor_batch={name: term.numpy() for name, term in terms.items()},
            batch={"prompts": ones[:, :1], "attention_mask": torch.cat([ones[:, :1], ones], 1)},
        )
        inputs = members(
            rows, components=torch.stack(list(terms.values()), 1), component_weights=torch.tensor([1.0, 0.5]).double()
        )
        found = compute(ADVANTAGES["gdpo"].having({"gdpo_whiten": "token"}), inputs)
        # It reads the terms in fp32.
        torch.testing.assert_close(found.values, wanted[rows.mask], rtol=1e-5, atol=1e-6)


WEIGHTS: dict[str, tuple[str, dict[str, Any], str, Any]] = {  # ours, bounds; level, threshold
    "truncated": ("tis.token", {"high": 1.05}, "token", 1.05),
    "truncated by sequence": ("tis.sequence", {"high": 1.05}, "sequence", 1.05),
    "banded": ("icepop", {"low": 0.95, "high": 1.05}, "token", "0.95_1.05"),
}


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("case", WEIGHTS)
def test_weights(drawn, case, normalise):
    name, bounds, level, threshold = WEIGHTS[case]
    if normalise and level == "sequence":
        pytest.skip("verl divides by a mean over sequences, we by one over tokens")
    for rows in drawn():
        weights, _ = helper.compute_rollout_correction_weights(
            rows.old - rows.rollout, rows.mask.double(), level, threshold, normalise
        )
        chosen = [corrections.CORRECTIONS[name].having(bounds)]
        found = corrections.apply(chosen, rows.mismatch).weights
        assert found is not None
        if normalise:
            found = corrections.self_normalise(found, rows.mismatch.live)
        torch.testing.assert_close(found, weights[rows.mask], rtol=1e-7, atol=1e-9)


# The band of verl's k1 is one of exp(-delta), ours of exp(delta): with 1 / high as low, the same.
REJECTIONS = {
    **{f"{level}_k1": {"low": 1 / 1.06, "high": 1.06} for level in ("token", "seq_mean")},
    "seq_sum_k1": {"low": 1 / 1.2, "high": 1.2},
    "token_k2": {"high": 0.004},
    "seq_mean_k2": {"high": 0.004},
    "seq_sum_k2": {"high": 0.02},
    "seq_max_k2": {"high": 0.015},
    "token_k3": {"high": 0.004},
    "seq_mean_k3": {"high": 0.004},
    "seq_sum_k3": {"high": 0.02},
    "seq_max_k3": {"high": 0.015},
}


@pytest.mark.parametrize("name", REJECTIONS)
def test_rejection(drawn, name):
    bounds = REJECTIONS[name]
    threshold = "_".join(str(bound) for bound in bounds.values())
    level, _, distance = name.rpartition("_")
    entry = corrections.CORRECTIONS[f"reject.{level}.{distance}"]
    for rows in drawn():
        wanted, _ = helper.compute_rollout_rejection_mask(rows.old - rows.rollout, rows.mask.double(), name, threshold)
        keep = corrections.apply([entry.having(bounds)], rows.mismatch).keep
        assert keep is not None and 0 < keep.sum() < len(keep)
        assert torch.equal(keep, wanted[rows.mask].bool())
