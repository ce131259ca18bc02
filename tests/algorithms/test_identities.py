"""Facts that hold for any ragged input."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from saccade.algorithms.advantage_inputs import PER_MEMBER, PER_TOKEN
from saccade.algorithms.advantages import ADVANTAGES, AdvantageInputs, compute, whitened
from saccade.algorithms.aggregation import AGGREGATIONS, token_scales
from saccade.algorithms.build import Algorithm, resolve
from saccade.algorithms.corrections import CORRECTIONS, measure
from saccade.algorithms.objective import Columns, objective
from saccade.algorithms.policy_losses import LOSSES, LossInputs, cispo_bounds
from saccade.algorithms.table import call
from saccade.config import AlgorithmConfig, KLConfig

GROUP_ESTIMATORS = [name for name, entry in ADVANTAGES.items() if entry.group]
FAST = settings(max_examples=25, deadline=None)
TIGHT = 1e-10


@dataclass(frozen=True, kw_only=True)
class Step:
    """A whole step: members in groups, and the log-probs of their tokens."""

    members: AdvantageInputs
    old: Tensor
    new: Tensor
    ref: Tensor
    rollout: Tensor


@st.composite
def steps(draw: st.DrawFn) -> Step:
    sizes = draw(st.lists(st.integers(2, 4), min_size=1, max_size=4))
    members = sum(sizes)
    lengths = torch.tensor(draw(st.lists(st.integers(1, 6), min_size=members, max_size=members)))
    grid = st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0])
    rewards, other = (
        torch.tensor(draw(st.lists(grid, min_size=members, max_size=members)), dtype=torch.float64)
        for _ in range(2)
    )
    groups = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    noise = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tokens = int(lengths.sum())

    def spread(scale: float, count: int = tokens) -> Tensor:
        return scale * torch.randn(count, generator=noise, dtype=torch.float64)

    old = -spread(1).abs()
    return Step(
        members=AdvantageInputs(
            rewards=rewards,
            groups=groups,
            live=torch.ones(members, dtype=torch.bool),
            baseline=torch.ones(members, dtype=torch.bool),
            lengths=lengths,
            sequence=torch.arange(members).repeat_interleave(lengths),
            token_penalties=torch.zeros(tokens, dtype=torch.float64),
            values=spread(0.3),
            final_values=spread(0.3, members),
            greedy=spread(1, len(sizes))[groups],
            components=torch.stack([rewards, other], 1),
            component_weights=torch.tensor([1, 0.5], dtype=torch.float64),
            domain_weights=spread(1, len(sizes)).exp()[groups],
            drift=spread(1, members).abs(),
        ),
        old=old,
        new=old + spread(0.4),
        ref=old + spread(0.4),
        rollout=old + spread(0.05),
    )


def advantages(name: str, members: AdvantageInputs, options=None, **changes) -> Tensor:
    return compute(ADVANTAGES[name], replace(members, **changes), options or {}).values


def chosen(order: Tensor, members: AdvantageInputs) -> tuple[AdvantageInputs, Tensor]:
    """The members in another order, or some of them, and which tokens those are."""
    tokens = torch.cat([torch.where(members.sequence == member)[0] for member in order])
    columns = {name: getattr(members, name)[order] for name in PER_MEMBER}
    columns |= {name: getattr(members, name)[tokens] for name in PER_TOKEN}
    columns["sequence"] = torch.arange(len(order)).repeat_interleave(members.lengths[order])
    return replace(members, **columns), tokens


def loss_and_gradient(
    name: str, step: Step, scales: Tensor, advantages: Tensor, old: Tensor, **options: float | str
) -> tuple[Tensor, Tensor]:
    """Options that the loss does not have are ignored."""
    sequence, count = step.members.sequence, len(step.members.rewards)
    inputs = LossInputs(
        old=old,
        advantages=advantages,
        sequence=sequence,
        sequences=count,
        live=torch.ones(len(sequence), dtype=torch.bool),
        sequence_sum=lambda x: x.new_zeros(count).index_add(0, sequence, x),
        rewards=step.members.rewards[sequence],
    )
    new = step.new.clone().requires_grad_()
    losses, _ = call(LOSSES[name].function, new, inputs, options=options)
    total = (losses * scales).sum()
    return total.detach(), torch.autograd.grad(total, new)[0]


def scales_of(name: str, members: AdvantageInputs) -> Tensor:
    return token_scales(
        AGGREGATIONS[name].function,
        members.sequence,
        live=members.live,
        group=members.groups,
        options={"fixed_length": 7},
    ).values


def same(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=TIGHT, atol=TIGHT)


# 1
@FAST
@given(steps(), st.sampled_from(["token_mean", "seq_mean"]))
def test_dapo_with_equal_clip_widths_is_grpo(step, aggregation):
    equal = {"clip_low": 0.2, "clip_high": 0.2}
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


# 2
@FAST
@given(steps(), st.sampled_from(["token_mean", "seq_mean"]))
def test_on_one_token_the_sequence_ratio_is_that_of_the_token(step, aggregation):
    first = step.members.sequence.diff(prepend=torch.tensor([-1])) != 0
    tokens = {name: getattr(step.members, name)[first] for name in PER_TOKEN}
    alone = {"lengths": torch.ones_like(step.members.lengths)}
    columns = {name: getattr(step, name)[first] for name in ("old", "new", "ref", "rollout")}
    short = Step(members=replace(step.members, **tokens, **alone), **columns)
    scales, values = scales_of(aggregation, short.members), advantages("grpo", short.members)
    one, *others = (
        loss_and_gradient(name, short, scales, values, short.old, clip_low=0.2, clip_high=0.28)
        for name in ("clip", "gspo", "gspo_token")
    )
    for other in others:
        assert same(one[0], other[0]) and same(one[1], other[1])


# 3
@FAST
@given(steps())
def test_gspo_and_its_token_form_agree_on_sequence_advantages(step):
    scales, values = scales_of("seq_mean", step.members), advantages("no_std", step.members)
    for width, names in (
        (3e-4, ("gspo", "gspo_token")),
        (0.2, ("gspo", "gspo_token")),
        (50.0, ("gspo", "gmpo")),
    ):
        one, other = (
            loss_and_gradient(name, step, scales, values, step.old, clip_low=width, clip_high=width)
            for name in names
        )
        assert same(one[0], other[0]) and same(one[1], other[1])


# 4
ON_POLICY: list[tuple[str, dict[str, float | str]]] = [
    ("clip", {}),
    ("clip", {"dual_clip": 3.0}),
    ("clip", {"delta": 4.0}),
    ("sapo", {}),
    ("cispo", {}),
    ("cispo", {"weight_bound": "around_one", "clip_low": 0.2, "clip_high": 0.28}),
    ("cispo", {"weight_bound": "delta", "clip_low": 1.0, "clip_high": 4.0}),
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


# 5
@FAST
@given(steps(), st.sampled_from(["cap", "around_one", "delta"]), st.floats(0, 1.5))
def test_cispo_leaves_every_token_its_gradient(step, bound, width):
    scales, values = scales_of("token_mean", step.members), advantages("grpo", step.members)
    options = {"weight_bound": bound, "weight_cap": 1.1, "clip_low": width, "clip_high": width}
    _, gradient = loss_and_gradient("cispo", step, scales, values, step.old, **options)
    ratio = (step.new - step.old).exp()
    assert same(gradient, -values * ratio.clamp(*cispo_bounds(**options)) * scales)


# 6
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


# 8
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
@given(steps())
def test_gae_without_values_or_discount_is_the_return(step):
    members = replace(step.members, token_penalties=0.1 * (step.old - step.ref))
    zero = {"values": torch.zeros_like(step.old), "final_values": None}
    gae = compute(
        ADVANTAGES["gae"], replace(members, **zero), {"gamma": 1.0, "lam": 1.0}, whiten=False
    )
    assert same(gae.values, advantages("reinforce", members))
    assert gae.returns is not None and same(gae.returns, gae.values)


@FAST
@given(steps(), st.floats(0.5, 1), st.floats(0, 1))
def test_gae_is_its_recursion(step, gamma, lam):
    members = replace(step.members, token_penalties=0.1 * (step.old - step.ref))
    result = compute(ADVANTAGES["gae"], members, {"gamma": gamma, "lam": lam}, whiten=False)
    assert members.values is not None and members.final_values is not None
    expected = torch.zeros_like(step.old)
    for member, reward in enumerate(members.rewards):
        value, advantage = members.final_values[member], 0.0
        for token in reversed(torch.where(members.sequence == member)[0].tolist()):
            now = members.values[token]
            surprise = reward - members.token_penalties[token] + gamma * value - now
            value, reward, advantage = now, 0.0, surprise + gamma * lam * advantage
            expected[token] = advantage
    assert same(result.values, expected)
    assert result.returns is not None and same(result.returns, expected + members.values)


# 9
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


# 10
def train(algorithm: Algorithm, step: Step, parts: list[Tensor] | None = None):
    """(loss, gradient of the new log-probs), with the members split into micro-batches."""
    members = step.members
    result = compute(
        algorithm.estimator,
        members,
        algorithm.advantage_options,
        whiten=algorithm.whiten,
        whiten_std=algorithm.whiten_std,
        adv_clip=algorithm.adv_clip,
        drop_constant=algorithm.drop_constant,
    )
    scales = token_scales(
        algorithm.aggregate.function,
        members.sequence,
        live=result.live,
        group=members.groups,
        options=algorithm.aggregation_options,
    ).values
    new = step.new.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for part in parts or [torch.arange(len(members.rewards))]:
        batch, tokens = chosen(part, members)
        columns = Columns(
            advantages=result.values[tokens],
            scales=scales[tokens],
            sequence=batch.sequence,
            sequences=len(part),
            old=step.old[tokens],
            rollout=step.rollout[tokens],
            ref=step.ref[tokens],
        )
        loss, _ = objective(algorithm, new[tokens], None, columns)
        loss.backward()
        total = total + loss.detach()
    assert new.grad is not None
    return total, new.grad


COMBINATIONS = [
    (advantage, loss, aggregation)
    for advantage in ADVANTAGES
    for loss in LOSSES
    for aggregation in AGGREGATIONS
]


@settings(max_examples=60, deadline=None)
@given(steps(), st.sampled_from(COMBINATIONS), st.booleans(), st.randoms(use_true_random=False))
def test_no_partition_and_no_order_changes_loss_or_gradient(step, names, drop, random):
    advantage, loss, aggregation = names
    config = AlgorithmConfig(
        advantage=advantage,
        policy_loss=loss,
        aggregation=aggregation,
        drop_constant=drop if ADVANTAGES[advantage].group else None,
    )
    algorithm = resolve(config, max_tokens=7)
    whole = train(algorithm, step)

    count = len(step.members.rewards)
    order = torch.tensor(random.sample(range(count), count))
    parts = list(order.split(random.randint(1, count)))
    for one, other in zip(train(algorithm, step, parts), whole, strict=True):
        assert same(one, other)

    if advantage == "grpo_passk":  # its winner on ties is the first
        return
    moved, tokens = chosen(order, step.members)
    columns = {name: getattr(step, name)[tokens] for name in ("old", "new", "ref", "rollout")}
    reordered = train(algorithm, Step(members=moved, **columns))
    assert same(reordered[0], whole[0]) and same(reordered[1], whole[1][tokens])


# 11
def with_another(members: AdvantageInputs, group: int, *, tokens: int, poison: float):
    """One more member: excluded and full of `poison`, or taking part and without tokens."""
    own = {"groups": group, "live": not tokens, "baseline": not tokens, "lengths": tokens}
    own["sequence"] = len(members.rewards)

    def longer(name: str, rows: int) -> Tensor:
        column = getattr(members, name)
        more = column.new_full((rows, *column.shape[1:]), own.get(name, poison))
        return torch.cat([column, more])

    columns = {name: longer(name, 1) for name in PER_MEMBER}
    return replace(members, **columns, **{name: longer(name, tokens) for name in PER_TOKEN})


@FAST
@given(
    steps(),
    st.sampled_from(list(ADVANTAGES)),
    st.integers(0, 3),
    st.sampled_from([(2, float("nan")), (2, float("-inf")), (2, 5.0), (0, 5.0)]),
)
def test_a_member_that_does_not_train_changes_nothing(step, name, group, kind):
    members, tokens = step.members, len(step.members.sequence)
    more = with_another(members, group, tokens=kind[0], poison=kind[1])
    before, after = compute(ADVANTAGES[name], members), compute(ADVANTAGES[name], more)
    assert same(after.values[:tokens], before.values) and after.values[tokens:].abs().sum() == 0
    assert before.returns is not None and after.returns is not None
    assert same(after.returns[:tokens], before.returns) and after.returns[tokens:].sum() == 0
    assert after.live.tolist() == [*before.live.tolist(), False]
    for aggregation in AGGREGATIONS:
        scales = scales_of(aggregation, more)
        assert same(scales[:tokens], scales_of(aggregation, members))
        assert scales[tokens:].abs().sum() == 0


@FAST
@given(steps(), st.sampled_from(GROUP_ESTIMATORS))
def test_a_group_shrunk_to_one_member_is_as_if_absent(step, name):
    members = step.members
    others = torch.where(members.groups != 0)[0]
    assume(len(others))
    survivors = members.groups != 0
    survivors[0] = True
    shrunk = compute(ADVANTAGES[name], replace(members, live=survivors, baseline=survivors))
    rest, tokens = chosen(others, members)
    assert same(shrunk.values[tokens], compute(ADVANTAGES[name], rest).values)
    assert not shrunk.values[members.per_token(members.groups == 0)].any()
    assert shrunk.singleton == 1 and not shrunk.live[members.groups == 0].any()


# 12
@FAST
@given(steps(), st.booleans())
def test_no_correction_acts_where_engine_and_trainer_agree(step, unscored):
    rollout = step.old.where(torch.tensor(not unscored), float("nan"))
    live = torch.ones(len(step.old), dtype=torch.bool)
    mismatch = measure(step.old, rollout, live=live, sequence=step.members.sequence)
    for name, entry in CORRECTIONS.items():
        if not entry.each_update:  # that one reads the current log-probs
            bounds = {"low": 0.99, "high": 1.01} if entry.reads("low") else {"high": 0.0}
            found = entry.function(mismatch, **bounds)
            assert found.weights is None or found.weights.eq(1).all(), name
            assert found.keep is None or found.keep.all(), name


@FAST
@given(steps())
def test_neutral_weights_and_masks_change_nothing(step):
    algorithm = resolve(AlgorithmConfig(), max_tokens=7)
    weights = (step.old - step.old).exp()
    columns = Columns(
        advantages=advantages("grpo", step.members),
        scales=scales_of("seq_mean", step.members),
        sequence=step.members.sequence,
        sequences=len(step.members.rewards),
        old=step.old,
        rollout=step.old,
        ref=step.ref,
    )
    plain, _ = objective(algorithm, step.new, None, columns)
    neutral = replace(columns, weights=weights, keep=torch.ones_like(weights))
    assert torch.equal(plain, objective(algorithm, step.new, None, neutral)[0])


def test_every_combination_is_legal():
    for advantage, loss, aggregation in COMBINATIONS:
        config = AlgorithmConfig(advantage=advantage, policy_loss=loss, aggregation=aggregation)
        algorithm = resolve(config, max_tokens=7)
        assert algorithm.loss is LOSSES[loss]
        assert pytest.approx(7) == algorithm.fixed_length
