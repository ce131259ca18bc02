"""Facts that hold for any ragged input."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from saccade.algorithms.advantages import ADVANTAGES, AdvantageInputs, AdvantageOptions, compute
from saccade.algorithms.aggregation import AGGREGATIONS, token_scales
from saccade.algorithms.build import Algorithm, resolve
from saccade.algorithms.objective import Columns, objective
from saccade.algorithms.policy_losses import LOSSES, LossInputs, LossOptions
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
    rewards = draw(st.lists(grid, min_size=members, max_size=members))
    noise = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tokens = int(lengths.sum())

    def spread(scale: float) -> Tensor:
        return scale * torch.randn(tokens, generator=noise, dtype=torch.float64)

    old = -spread(1).abs()
    return Step(
        members=AdvantageInputs(
            rewards=torch.tensor(rewards, dtype=torch.float64),
            groups=torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)),
            live=torch.ones(members, dtype=torch.bool),
            baseline=torch.ones(members, dtype=torch.bool),
            lengths=lengths,
            sequence=torch.arange(members).repeat_interleave(lengths),
            token_penalties=torch.zeros(tokens, dtype=torch.float64),
        ),
        old=old,
        new=old + spread(0.4),
        ref=old + spread(0.4),
        rollout=old + spread(0.05),
    )


def advantages(name: str, members: AdvantageInputs, **changes) -> Tensor:
    return compute(ADVANTAGES[name], replace(members, **changes)).values


def chosen(order: Tensor, members: AdvantageInputs) -> tuple[AdvantageInputs, Tensor]:
    """The members in another order, or some of them, and which tokens those are."""
    tokens = torch.cat([torch.where(members.sequence == member)[0] for member in order])
    lengths = members.lengths[order]
    names = ("rewards", "groups", "live", "baseline")
    moved = replace(
        members,
        **{name: getattr(members, name)[order] for name in names},
        lengths=lengths,
        sequence=torch.arange(len(order)).repeat_interleave(lengths),
        token_penalties=members.token_penalties[tokens],
    )
    return moved, tokens


def loss_and_gradient(
    name: str, step: Step, scales: Tensor, advantages: Tensor, old: Tensor, **options: float
) -> tuple[Tensor, Tensor]:
    sequence, count = step.members.sequence, len(step.members.rewards)
    inputs = LossInputs(
        old=old,
        advantages=advantages,
        sequence=sequence,
        sequences=count,
        sequence_sum=lambda x: x.new_zeros(count).index_add(0, sequence, x),
    )
    new = step.new.clone().requires_grad_()
    losses, _ = LOSSES[name].function(new, inputs, LossOptions(**options))
    total = (losses * scales).sum()
    return total.detach(), torch.autograd.grad(total, new)[0]


def scales_of(name: str, members: AdvantageInputs) -> Tensor:
    return token_scales(
        AGGREGATIONS[name].function,
        members.sequence,
        live=members.live,
        group=members.groups,
        fixed_length=7,
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
@given(steps())
def test_grpo_times_its_divisor_is_no_std(step):
    members = step.members
    divisor = members.per_token(members.group_std + members.options.std_eps)
    assert same(advantages("grpo", members) * divisor, advantages("no_std", members))


# 3
@FAST
@given(steps())
def test_gspo_and_its_token_form_agree_on_sequence_advantages(step):
    scales, values = scales_of("seq_mean", step.members), advantages("no_std", step.members)
    one, other = (
        loss_and_gradient(name, step, scales, values, step.old) for name in ("gspo", "gspo_token")
    )
    assert same(one[0], other[0]) and same(one[1], other[1])
    free = {"clip_low": 50.0, "clip_high": 50.0}
    one, other = (
        loss_and_gradient(name, step, scales, values, step.old, **free) for name in ("gspo", "gmpo")
    )
    assert same(one[0], other[0]) and same(one[1], other[1])


# 4
@FAST
@given(steps(), st.sampled_from(list(AGGREGATIONS)))
def test_on_policy_gradient_is_that_of_the_policy_gradient(step, aggregation):
    scales, values = scales_of(aggregation, step.members), advantages("grpo", step.members)
    expected = -values * scales
    for name in ("clip", "pg", "cispo", "sapo", "gspo_token"):
        for bound in ({}, {"dual_clip": 3.0}, {"delta": 4.0}):
            _, gradient = loss_and_gradient(name, step, scales, values, step.new, **bound)
            assert same(gradient, expected), name
    scales = scales_of("seq_mean", step.members)
    for name in ("gspo", "gmpo"):
        _, gradient = loss_and_gradient(name, step, scales, values, step.new)
        assert same(gradient, -values * scales), name


# 5, 6
@FAST
@given(steps())
def test_bounds(step):
    scales, values = scales_of("token_mean", step.members), advantages("grpo", step.members)
    ratio = (step.new - step.old).exp()
    _, gradient = loss_and_gradient("cispo", step, scales, values, step.old)
    assert same(gradient, -values * ratio.clamp(0, 5) * scales)
    runs = [
        loss_and_gradient("clip", step, scales, values, step.old, **options)
        for options in ({"delta": 1.5}, {"dual_clip": 1.5}, {"dual_clip": 1e12}, {})
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


# 9
@FAST
@given(steps(), st.floats(-3, 3))
def test_a_constant_added_to_rewards_changes_no_group_estimator(step, shift):
    members = step.members
    for name in GROUP_ESTIMATORS:
        if name != "max_rl":
            moved = advantages(name, members, rewards=members.rewards + shift)
            assert same(moved, advantages(name, members)), name


@FAST
@given(steps(), st.floats(0.1, 10))
def test_grpo_without_eps_ignores_the_scale_of_rewards(step, factor):
    members = replace(step.members, options=AdvantageOptions(std_eps=0.0))
    scaled = advantages("grpo", members, rewards=factor * members.rewards)
    assert same(scaled, advantages("grpo", members))


# 10
def train(algorithm: Algorithm, step: Step, parts: list[Tensor] | None = None):
    """(loss, gradient of the new log-probs), with the members split into micro-batches."""
    members = step.members
    result = compute(
        algorithm.estimator,
        replace(members, options=algorithm.advantage_options),
        adv_clip=algorithm.adv_clip,
        drop_constant=algorithm.drop_constant,
    )
    scales = token_scales(
        algorithm.aggregate.function,
        members.sequence,
        live=result.live,
        group=members.groups,
        fixed_length=algorithm.fixed_length,
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
@FAST
@given(steps(), st.sampled_from(list(ADVANTAGES)), st.integers(0, 3), st.booleans())
def test_an_excluded_member_changes_nothing(step, name, group, poisoned):
    members, poison = step.members, float("nan") if poisoned else 5.0
    count, tokens = len(members.rewards), len(members.sequence)
    more = AdvantageInputs(
        rewards=torch.cat([members.rewards, members.rewards.new_tensor([poison])]),
        groups=torch.cat([members.groups, torch.tensor([group])]),
        live=torch.cat([members.live, torch.tensor([False])]),
        baseline=torch.cat([members.baseline, torch.tensor([False])]),
        lengths=torch.cat([members.lengths, torch.tensor([2])]),
        sequence=torch.cat([members.sequence, torch.tensor([count, count])]),
        token_penalties=torch.cat(
            [members.token_penalties, members.token_penalties.new_tensor([poison, poison])]
        ),
    )
    before, after = compute(ADVANTAGES[name], members), compute(ADVANTAGES[name], more)
    assert same(after.values[:tokens], before.values) and after.values[tokens:].abs().sum() == 0
    assert after.live.tolist() == [*before.live.tolist(), False]
    for aggregation in AGGREGATIONS:
        scales = scales_of(aggregation, more)
        assert same(scales[:tokens], scales_of(aggregation, members))
        assert scales[tokens:].abs().sum() == 0


# 12
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
