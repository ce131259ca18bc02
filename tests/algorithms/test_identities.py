"""Algorithms that are equal where they should be, on any ragged input."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from saccade.algorithms.advantages import ADVANTAGES, compute, whitened
from saccade.algorithms.aggregation import AGGREGATIONS
from saccade.algorithms.build import resolve
from saccade.config import AlgorithmConfig, KLConfig
from tests.algorithms.ragged import (
    FAST,
    GROUP_ESTIMATORS,
    PER_TOKEN,
    TOKENS,
    Step,
    advantages,
    loss_and_gradient,
    same,
    scales_of,
    steps,
    train,
)


@FAST
@given(steps(), st.sampled_from(["token_mean", "seq_mean"]))
def test_dapo_with_equal_clip_widths_is_grpo(step, aggregation):
    equal = {"args": {"clip": 0.2}}
    dapo, grpo = (
        resolve(AlgorithmConfig(preset=preset, aggregation=aggregation, **changes), max_tokens=9)
        for preset, changes in (("dapo", equal), ("grpo", {"kl": KLConfig(coef=0)}))
    )
    for one, other in zip(train(dapo, step), train(grpo, step), strict=True):
        assert same(one, other)


@FAST
@given(steps(), st.sampled_from([1e-6, 1e-4, 0.5]))
def test_grpo_times_its_divisor_is_no_std(step, std_eps):
    members = step.members
    divisor = members.per_token(members.group_std + std_eps)
    grpo = advantages("grpo", members, {"std_eps": std_eps})
    assert same(grpo * divisor, advantages("no_std", members))


@FAST
@given(steps(), st.sampled_from(["token_mean", "seq_mean"]))
def test_on_one_token_the_sequence_ratio_is_that_of_the_token(step, aggregation):
    first = step.members.sequence.diff(prepend=torch.tensor([-1])) != 0
    tokens = {name: getattr(step.members, name)[first] for name in PER_TOKEN}
    alone = {"lengths": torch.ones_like(step.members.lengths)}
    columns = {name: getattr(step, name)[first] for name in TOKENS}
    short = Step(members=replace(step.members, **tokens, **alone), **columns)
    scales, values = scales_of(aggregation, short.members), advantages("grpo", short.members)
    one, *others = (
        loss_and_gradient(name, short, scales, values, short.old, clip_low=0.2, clip_high=0.28)
        for name in ("clip", "gspo", "gspo_token")
    )
    for other in others:
        assert same(one[0], other[0]) and same(one[1], other[1])


@FAST
@given(steps())
def test_gspo_and_its_token_form_agree_on_sequence_advantages(step):
    scales, values = scales_of("seq_mean", step.members), advantages("no_std", step.members)
    for width, names in ((3e-4, ("gspo", "gspo_token")), (0.2, ("gspo", "gspo_token")), (50.0, ("gspo", "gmpo"))):
        one, other = (
            loss_and_gradient(name, step, scales, values, step.old, clip_low=width, clip_high=width) for name in names
        )
        assert same(one[0], other[0]) and same(one[1], other[1])


ON_POLICY: list[tuple[str, dict[str, float | str]]] = [
    ("clip", {}),
    ("clip", {"dual_clip": 3.0}),
    ("clip", {"delta": 4.0}),
    ("sapo", {}),
    ("cispo", {}),
    ("cispo", {"weight_floor": 0.8, "weight_cap": 1.28}),
    ("cpgd", {"drift_coef": 1.0}),
    ("pg", {}),
    ("gspo_token", {}),
    ("topr", {}),
    ("kimi", {}),
    ("kimi", {"kimi_level": "sequence"}),
    ("dppo_tv", {}),
    ("dppo_kl", {}),
    ("vespo", {}),
]


@FAST
@given(steps(), st.sampled_from(list(AGGREGATIONS)))
def test_on_policy_gradient_is_that_of_the_policy_gradient(step, aggregation):
    scales, values = scales_of(aggregation, step.members), advantages("grpo", step.members)
    scales = scales * step.ref.exp() * (step.rollout < step.ref)  # weights and a mask
    for name, options in ON_POLICY:
        _, gradient = loss_and_gradient(name, step, scales, values, step.new, **options)
        assert same(gradient, -values * scales), name
    scales = scales_of("seq_mean", step.members)
    for name in ("gspo", "gmpo"):
        _, gradient = loss_and_gradient(name, step, scales, values, step.new)
        assert same(gradient, -values * scales), name


@FAST
@given(steps(), st.floats(0, 1), st.floats(1, 2.5))
def test_cispo_leaves_every_token_its_gradient(step, low, high):
    scales, values = scales_of("token_mean", step.members), advantages("grpo", step.members)
    options = {"weight_floor": low, "weight_cap": high}
    _, gradient = loss_and_gradient("cispo", step, scales, values, step.old, **options)
    ratio = (step.new - step.old).exp()
    assert same(gradient, -values * ratio.clamp(low, high) * scales)


@FAST
@given(steps(), st.floats(1.21, 4))
def test_delta_is_dual_clip_and_both_can_be_off(step, bound):
    scales, values = scales_of("token_mean", step.members), advantages("grpo", step.members)
    off = {"dual_clip": 0.0, "delta": 0.0}
    runs = [
        loss_and_gradient("clip", step, scales, values, step.old, **options)
        for options in ({"delta": bound}, {"dual_clip": bound}, {"dual_clip": 1e12}, off)
    ]
    for one, other in (runs[:2], runs[2:]):
        assert same(one[0], other[0]) and same(one[1], other[1])


@FAST
@given(steps())
def test_relations_between_estimators(step):
    members = step.members
    factor = members.per_token(members.group_size / (members.group_size - 1))
    assert same(advantages("rloo", members), factor * advantages("no_std", members))
    equal = replace(members, lengths=torch.full_like(members.lengths, 3))
    assert same(advantages("opo", equal), advantages("no_std", equal))
    assert torch.equal(advantages("cpgd", members), advantages("grpo", members))


@FAST
@given(steps())
def test_gdpo_of_one_term_is_whitened_grpo(step):
    members = step.members
    one_term = {"components": members.rewards[:, None], "component_weights": torch.ones(1)}
    grpo, differs = advantages("grpo", members), ~members.per_token(members.constant)
    by_token = advantages("gdpo", members, {"gdpo_whiten": "token"}, **one_term)
    assert same(by_token, whitened(grpo, torch.ones_like(differs)).where(differs, 0.0))
    firsts = grpo[members.sequence.diff(prepend=torch.tensor([-1])) != 0]
    by_member = members.per_token((firsts - firsts.mean()) / (firsts.std() + 1e-4))
    assert same(advantages("gdpo", members, **one_term), by_member.where(differs, 0.0))


@FAST
@given(steps(), st.floats(0.5, 1), st.floats(0, 1))
def test_gae_is_its_recursion(step, gamma, lam):
    members = replace(step.members, token_penalties=0.1 * (step.old - step.ref))
    result = compute(ADVANTAGES["gae"].having({"gamma": gamma, "lam": lam, "whiten": False}), members)
    expected = torch.zeros_like(step.old)
    for member, reward in enumerate(members.rewards):
        value, advantage = members.final_values[member], 0.0
        for token in reversed(torch.where(members.sequence == member)[0].tolist()):
            surprise = reward - members.token_penalties[token] + gamma * value - members.values[token]
            value, reward, advantage = members.values[token], 0.0, surprise + gamma * lam * advantage
            expected[token] = advantage
    assert same(result.values, expected) and same(result.returns, expected + members.values)


@FAST
@given(steps())
def test_gae_without_values_or_discount_is_the_return(step):
    members = replace(step.members, token_penalties=0.1 * (step.old - step.ref))
    zero = {"values": torch.zeros_like(step.old), "final_values": None}
    gae = compute(ADVANTAGES["gae"].having({"gamma": 1.0, "lam": 1.0, "whiten": False}), replace(members, **zero))
    assert same(gae.values, advantages("reinforce", members))
    assert gae.returns is not None and same(gae.returns, gae.values)


@FAST
@given(steps(), st.floats(-3, 3))
def test_a_constant_added_to_rewards_changes_no_group_estimator(step, shift):
    members = step.members
    assert members.components is not None
    moved = {"rewards": members.rewards + shift, "components": members.components + shift}
    for name in GROUP_ESTIMATORS:
        if name != "max_rl":
            assert same(advantages(name, members, **moved), advantages(name, members)), name


@FAST
@given(steps(), st.floats(0.1, 10))
def test_grpo_without_eps_ignores_the_scale_of_rewards(step, factor):
    members, exact = step.members, {"std_eps": 0.0}
    scaled = advantages("grpo", members, exact, rewards=factor * members.rewards)
    assert same(scaled, advantages("grpo", members, exact))
