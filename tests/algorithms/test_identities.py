"""Facts that hold for any ragged input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from saccade.algorithms.advantage_inputs import PER_MEMBER, PER_TOKEN
from saccade.algorithms.advantages import ADVANTAGES, AdvantageInputs, compute, whitened
from saccade.algorithms.aggregation import AGGREGATIONS, token_scales
from saccade.algorithms.algorithm import Algorithm
from saccade.algorithms.build import resolve
from saccade.algorithms.corrections import CORRECTIONS, apply, measure, self_normalise
from saccade.algorithms.covariance import SelectionInputs
from saccade.algorithms.filters import high_entropy
from saccade.algorithms.objective import Columns, objective, to_metrics
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
    entropy: Tensor
    noise: Tensor  # int64, who a token is


TOKENS = ("old", "new", "ref", "rollout", "entropy", "noise")
ROUNDED = (0.0, 0.1, 0.5, 1.0, 2.0)
EXACT = (0.0, 0.25, 0.5, 1.0, 2.0)  # sums have no rounding, so no order makes a 0 positive


@st.composite
def steps(draw: st.DrawFn, rewards: Sequence[float] = ROUNDED) -> Step:
    sizes = draw(st.lists(st.integers(2, 4), min_size=1, max_size=4))
    members = sum(sizes)
    lengths = torch.tensor(draw(st.lists(st.integers(1, 6), min_size=members, max_size=members)))
    grid = st.sampled_from(rewards)
    scores, other = (
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
            rewards=scores,
            groups=groups,
            live=torch.ones(members, dtype=torch.bool),
            baseline=torch.ones(members, dtype=torch.bool),
            lengths=lengths,
            sequence=torch.arange(members).repeat_interleave(lengths),
            token_penalties=torch.zeros(tokens, dtype=torch.float64),
            values=spread(0.3),
            final_values=spread(0.3, members),
            greedy=spread(1, len(sizes))[groups],
            components=torch.stack([scores, other], 1),
            component_weights=torch.tensor([1, 0.5], dtype=torch.float64),
            domain_weights=spread(1, len(sizes)).exp()[groups],
            drift=spread(1, members).abs(),
        ),
        old=old,
        new=old + spread(0.4),
        ref=old + spread(0.4),
        rollout=old + spread(0.05),
        entropy=spread(1).abs(),
        noise=torch.randperm(tokens, generator=noise),
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
    columns = {name: getattr(step, name)[first] for name in TOKENS}
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
def columns_of(algorithm: Algorithm, step: Step) -> Columns:
    """What a step is given before training on it, over all of its members."""
    members, sequence = step.members, step.members.sequence
    if algorithm.kl_in_reward:
        distance = call(
            algorithm.divergence.function, step.old, step.ref, options=algorithm.kl.options
        )
        members = replace(members, token_penalties=algorithm.kl.coef * distance)
    result = compute(
        algorithm.estimator,
        members,
        algorithm.advantage_options,
        whiten=algorithm.whiten,
        whiten_std=algorithm.whiten_std,
        adv_clip=algorithm.adv_clip,
        drop_constant=algorithm.drop_constant,
    )

    def scales_over(counted: Tensor | None) -> Tensor:
        return token_scales(
            algorithm.aggregate.function,
            sequence,
            live=result.live,
            group=members.groups,
            counted=counted,
            options=algorithm.aggregation_options,
        ).values

    scales = scales_over(None)
    live = scales > 0
    mismatch = measure(step.old, step.rollout, live=live, sequence=sequence)
    found = apply([(c.entry, c.options) for c in algorithm.at_once], mismatch)
    keep = live if found.keep is None else live & found.keep
    if algorithm.entropy.top:
        scope = algorithm.entropy.scope
        keep = keep & high_entropy(
            step.entropy, live, sequence, fraction=algorithm.entropy.top, scope=scope
        )
    factor = keep.double()
    if algorithm.denominator == "kept":
        factor = (scales_over(keep) / scales).where(keep, 0.0)
    weights = found.weights
    if algorithm.self_normalise and weights is not None:
        weights = self_normalise(weights, live)
    selected = None
    if algorithm.loss.select is not None and live.any():
        inputs = SelectionInputs(
            new=step.new[live],
            old=step.old[live],
            advantages=result.values[live],
            noise=step.noise[live],
        )
        picked = call(algorithm.loss.select, inputs, options=algorithm.loss_options)
        selected = torch.zeros_like(live).masked_scatter(live, picked)
    elif algorithm.loss.select is not None:
        selected = live
    return Columns(
        advantages=result.values,
        scales=scales,
        sequence=sequence,
        sequences=len(members.rewards),
        old=step.old,
        rollout=step.rollout,
        ref=step.ref,
        keep=factor,
        weights=weights,
        rewards=members.rewards[sequence],
        selected=selected,
    )


def train(algorithm: Algorithm, step: Step, parts: Sequence[Tensor] | None = None):
    """(loss, gradients of the log-probs and of the entropy), the members in micro-batches."""
    known = columns_of(algorithm, step)
    new, entropy = (x.clone().requires_grad_() for x in (step.new, step.entropy))
    total = torch.zeros((), dtype=torch.float64)
    for part in parts or [torch.arange(len(step.members.rewards))]:
        batch, tokens = chosen(part, step.members)
        cut: dict[str, Any] = {
            name: value[tokens] for name, value in vars(known).items() if isinstance(value, Tensor)
        }
        cut |= {"sequence": batch.sequence, "sequences": len(part)}
        columns = replace(known, **cut)
        loss, _ = objective(algorithm, new[tokens], entropy[tokens], columns)
        loss.backward()
        total = total + loss.detach()
    assert new.grad is not None
    return total, new.grad, torch.zeros_like(new) if entropy.grad is None else entropy.grad


BAND = {"low": 0.97, "high": 1.03}
SEQUENCE_BAND = {"low": 0.98, "high": 1.02}
ONCE = [name for name, entry in CORRECTIONS.items() if not entry.each_update]


def bounded(name: str) -> dict[str, float | str]:
    """A correction with bounds that drop some tokens of a random step and leave others."""
    if name == "opsm":
        return {"name": name, "threshold": 0.01}
    if not CORRECTIONS[name].reads("low"):
        return {"name": name, "high": 0.002}
    return {"name": name, **(SEQUENCE_BAND if "seq" in name else BAND)}


@st.composite
def algorithms(draw: st.DrawFn, loss: str) -> Algorithm:
    """Any advantage and aggregation with this loss, and any filter, correction and KL."""
    advantage = draw(st.sampled_from(list(ADVANTAGES)))
    entry = ADVANTAGES[advantage]
    lists = [["tis.token", "opsm"], ["reject.token.k3", "icepop"], ["seq_mask", "tis.sequence"]]
    lists += [[name] for name in CORRECTIONS]
    if LOSSES[loss].applies_weights:  # it would multiply the weight of a sequence with itself
        lists = [names for names in lists if not any(CORRECTIONS[n].by_sequence for n in names)]
    correct = draw(st.one_of(st.just([]), st.sampled_from(lists)))
    top = draw(st.sampled_from([None, 0.3]))
    filters = top is not None or any(name != "opsm" for name in correct)
    places: list[dict[str, object]] = [{"coef": 0}]
    places += [{"coef": 0.1, "kind": kind} for kind in ("k2", "k3", "k1+", "k3+")]
    places += [{"coef": 0.1, "ratio_correct": True}, {"coef": 0.1, "clamp": "zero"}]
    if not entry.components and advantage != "max_rl":  # it takes no rewards below 0
        places += [{"coef": 0.1, "place": "reward"}]
    config = AlgorithmConfig.model_validate(
        {
            "advantage": advantage,
            "policy_loss": loss,
            "aggregation": draw(st.sampled_from(list(AGGREGATIONS))),
            "adv_clip": draw(st.sampled_from([None, 0.5])),
            "drop_constant": draw(st.booleans()) if entry.group else None,
            "correct": [bounded(name) for name in correct],
            "self_normalise": draw(st.booleans())
            if any(CORRECTIONS[name].weighs for name in correct)
            else None,
            "entropy_top": top,
            "entropy_scope": draw(st.sampled_from(["step", "sequence"])) if top else None,
            "denominator": draw(st.sampled_from(["original", "kept"])) if filters else None,
            "entropy_coef": draw(st.sampled_from([0.0, 0.01])),
            "kl": draw(st.sampled_from(places)),
            **LOSS_OPTIONS.get(loss, {}),
        }
    )
    return resolve(config, max_tokens=7)


# Such that the options act on a random step.
LOSS_OPTIONS: dict[str, dict[str, object]] = {
    "kl_cov": {"cov_fraction": 0.2},
    "clip_cov": {"cov_fraction": 0.2, "cov_low": -10.0, "cov_high": 10.0},
    "kimi": {"kimi_level": "sequence"},
    "cispo": {"weight_cap": 1.1},
    "gspo": {"clip": 0.1},
    "gspo_token": {"clip": 0.1},
    "luspo": {"clip": 0.1},
}


@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=10, deadline=None)
@given(data=st.data(), step=steps(rewards=EXACT), random=st.randoms(use_true_random=False))
def test_no_partition_and_no_order_changes_loss_or_gradient(loss, data, step, random):
    algorithm = data.draw(algorithms(loss))
    whole = train(algorithm, step)
    count = len(step.members.rewards)
    order = torch.tensor(random.sample(range(count), count))
    parts = order.split(random.randint(1, count))
    for one, other in zip(train(algorithm, step, parts), whole, strict=True):
        assert same(one, other)
    if algorithm.advantage == "grpo_passk":  # its winner on ties is the first
        return
    moved, tokens = reordered(step, order)
    loss_, *gradients = train(algorithm, moved)
    assert same(loss_, whole[0])
    for one, other in zip(gradients, whole[1:], strict=True):
        assert same(one, other[tokens])


def reordered(step: Step, order: Tensor) -> tuple[Step, Tensor]:
    members, tokens = chosen(order, step.members)
    columns = {name: getattr(step, name)[tokens] for name in TOKENS}
    return Step(members=members, **columns), tokens


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


def poisoned(step: Step, group: int, *, tokens: int, poison: float) -> Step:
    """With another member, whose log-probs are poison too."""
    columns = {
        name: torch.cat([getattr(step, name), getattr(step, name).new_full((tokens,), poison)])
        for name in TOKENS
        if name != "noise"
    }
    noise = torch.cat([step.noise, -torch.ones(tokens, dtype=torch.int64)])
    members = with_another(step.members, group, tokens=tokens, poison=poison)
    return Step(members=members, noise=noise, **columns)


@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=6, deadline=None)
@given(
    data=st.data(),
    step=steps(rewards=EXACT),
    group=st.integers(0, 3),
    poison=st.sampled_from([float("nan"), float("-inf"), 5.0]),
)
def test_an_excluded_member_changes_no_loss_and_no_gradient(loss, data, step, group, poison):
    algorithm = data.draw(algorithms(loss))
    more = poisoned(step, group, tokens=2, poison=poison)
    before, after = train(algorithm, step), train(algorithm, more)
    assert same(after[0], before[0])
    for one, other in zip(after[1:], before[1:], strict=True):
        assert same(one[:-2], other) and one[-2:].tolist() == [0, 0]


@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=6, deadline=None)
@given(
    data=st.data(),
    step=steps(rewards=EXACT),
    poison=st.sampled_from([float("nan"), float("-inf"), float("inf")]),
)
def test_nothing_at_a_dead_position_reaches_loss_gradient_or_metrics(loss, data, step, poison):
    """Any token may be dead: its scale is 0."""
    algorithm = data.draw(algorithms(loss))
    columns = columns_of(algorithm, step)
    columns = replace(columns, scales=columns.scales.where(step.noise % 3 > 0, 0.0))
    live = columns.scales > 0
    floats = ("advantages", "old", "rollout", "ref", "keep", "weights", "rewards")
    dirty = {
        name: getattr(columns, name).where(live, poison)
        for name in floats
        if getattr(columns, name) is not None
    }
    results = []
    for known, new, entropy in (
        (columns, step.new, step.entropy),
        (
            replace(columns, **dirty),
            step.new.where(live, poison),
            step.entropy.where(live, poison),
        ),
    ):
        new, entropy = new.clone().requires_grad_(), entropy.clone().requires_grad_()
        total, stats = objective(algorithm, new, entropy, known)
        total.backward()
        gradient = None if entropy.grad is None else entropy.grad.tolist()
        log = to_metrics(algorithm, [stats]).means()
        results.append((total.item(), new.grad.tolist(), gradient, log))
    assert results[0] == results[1]


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


@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=5, deadline=None)
@given(data=st.data(), step=steps(rewards=EXACT), name=st.sampled_from(ONCE))
def test_where_engine_and_trainer_agree_no_correction_changes_loss_or_gradient(
    loss, data, step, name
):
    algorithm = data.draw(algorithms(loss))
    agreeing = replace(step, rollout=step.old)
    without = replace(algorithm, corrections=(), self_normalise=False)
    config = AlgorithmConfig.model_validate({"correct": [bounded(name)]})
    corrections, weighs = resolve(config, max_tokens=7).corrections, CORRECTIONS[name].weighs
    corrected = replace(without, corrections=corrections, self_normalise=weighs)
    for one, other in zip(train(corrected, agreeing), train(without, agreeing), strict=True):
        assert torch.equal(one, other)


def test_every_combination_is_legal():
    for advantage, loss, aggregation in product(ADVANTAGES, LOSSES, AGGREGATIONS):
        config = AlgorithmConfig(advantage=advantage, policy_loss=loss, aggregation=aggregation)
        algorithm = resolve(config, max_tokens=7)
        assert algorithm.loss is LOSSES[loss]
        expected = {"fixed_length": 7} if aggregation == "fixed" else {}
        assert algorithm.aggregation_options == expected
