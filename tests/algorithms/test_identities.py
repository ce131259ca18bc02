"""What is equal on any ragged input: algorithms that coincide, and steps that nothing below may change."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from saccade.algorithms.advantages import ADVANTAGES, compute, whitened
from saccade.algorithms.aggregation import AGGREGATIONS
from saccade.algorithms.build import resolve
from saccade.algorithms.corrections import CORRECTIONS, measure
from saccade.algorithms.objective import objective, to_metrics
from saccade.algorithms.policy_losses import LOSSES
from saccade.algorithms.resolved_algorithm import Algorithm
from saccade.config import AlgorithmConfig, KLConfig
from tests.algorithms.ragged import (
    EXACT,
    FAST,
    GROUP_ESTIMATORS,
    PER_MEMBER,
    PER_TOKEN,
    TOKENS,
    Step,
    advantages,
    chosen,
    columns_of,
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
    ("clip", {}), ("clip", {"dual_clip": 3.0}), ("clip", {"delta": 4.0}), ("sapo", {}), ("cispo", {}),
    ("cispo", {"weight_floor": 0.8, "weight_cap": 1.28}), ("cpgd", {"drift_coef": 1.0}), ("pg", {}), ("gspo_token", {}),
    ("topr", {}), ("kimi", {}), ("kimi", {"kimi_level": "sequence"}), ("dppo_tv", {}), ("dppo_kl", {}), ("vespo", {}),
]  # fmt: skip


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
    result = compute(ADVANTAGES["gae"].with_options({"gamma": gamma, "lam": lam, "whiten": False}), members)
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
    gae = compute(ADVANTAGES["gae"].with_options({"gamma": 1.0, "lam": 1.0, "whiten": False}), replace(members, **zero))
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


BAND = {"low": 0.97, "high": 1.03}
SEQUENCE_BAND = {"low": 0.98, "high": 1.02}


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
    places += [{"coef": 0.1, "ratio_correct": True}]
    if not entry.components and advantage != "max_rl":  # it takes no rewards below 0
        places += [{"coef": 0.1, "place": "reward"}]
    kl = draw(st.sampled_from(places))
    clamp = {"kl_clamp": draw(st.sampled_from(["bounded", "zero"]))} if kl.get("kind") == "k3" else {}
    config = AlgorithmConfig.model_validate(
        {
            "advantage": advantage,
            "policy_loss": loss,
            "aggregation": draw(st.sampled_from(list(AGGREGATIONS))),
            "adv_clip": draw(st.sampled_from([None, 0.5])),
            "drop_constant": draw(st.booleans()) if entry.group else None,
            "correct": [bounded(name) for name in correct],
            "self_normalise": draw(st.booleans()) if any(CORRECTIONS[name].weighs for name in correct) else None,
            "entropy_top": top,
            "entropy_scope": draw(st.sampled_from(["step", "sequence"])) if top else None,
            "denominator": draw(st.sampled_from(["original", "kept"])) if filters else None,
            "entropy_coef": draw(st.sampled_from([0.0, 0.01])),
            "kl": kl,
            "args": clamp | LOSS_OPTIONS.get(loss, {}),
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
@settings(max_examples=4, deadline=None)
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
    members, tokens = chosen(order, step.members)
    moved = Step(members=members, **{name: getattr(step, name)[tokens] for name in TOKENS})
    loss_, *gradients = train(algorithm, moved)
    assert same(loss_, whole[0])
    for one, other in zip(gradients, whole[1:], strict=True):
        assert same(one, other[tokens])


def poisoned(step: Step, group: int, *, tokens: int, poison: float) -> Step:
    """With another member, excluded and full of poison, as are its log-probs."""
    members = step.members
    own = {"groups": group, "live": False, "baseline": False, "lengths": tokens, "sequence": len(members.rewards)}

    def longer(column: Tensor, rows: int, value: float) -> Tensor:
        return torch.cat([column, column.new_full((rows, *column.shape[1:]), value)])

    rows = dict.fromkeys(PER_MEMBER, 1) | dict.fromkeys(PER_TOKEN, tokens)
    known = {name: longer(getattr(members, name), count, own.get(name, poison)) for name, count in rows.items()}
    columns = {name: longer(getattr(step, name), tokens, -1 if name == "noise" else poison) for name in TOKENS}
    return Step(members=replace(members, **known), **columns)


@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=4, deadline=None)
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
@settings(max_examples=4, deadline=None)
@given(data=st.data(), step=steps(rewards=EXACT), poison=st.sampled_from([float("nan"), float("-inf"), float("inf")]))
def test_nothing_at_a_dead_position_reaches_loss_gradient_or_metrics(loss, data, step, poison):
    """Any token may be dead: its scale is 0."""
    algorithm = data.draw(algorithms(loss))
    columns = columns_of(algorithm, step)
    columns = replace(columns, scales=columns.scales.where(step.noise % 3 > 0, 0.0))
    live = columns.scales > 0
    floats = ("advantages", "old", "rollout", "ref", "keep", "weights", "rewards")
    dirty = {name: getattr(columns, name).where(live, poison) for name in floats if getattr(columns, name) is not None}
    results = []
    for known, new, entropy in (
        (columns, step.new, step.entropy),
        (replace(columns, **dirty), step.new.where(live, poison), step.entropy.where(live, poison)),
    ):
        new, entropy = new.clone().requires_grad_(), entropy.clone().requires_grad_()
        total, stats = objective(algorithm, new, entropy, known)
        total.backward()
        gradient = None if entropy.grad is None else entropy.grad.tolist()
        log = to_metrics([stats]).means()
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
    assert shrunk.counts["singleton"] == 1 and not shrunk.live[members.groups == 0].any()


@FAST
@given(steps(), st.booleans())
def test_no_correction_acts_where_engine_and_trainer_agree(step, unscored):
    rollout = step.old.where(torch.tensor(not unscored), float("nan"))
    live = torch.ones(len(step.old), dtype=torch.bool)
    mismatch = measure(step.old, rollout, live=live, sequence=step.members.sequence, sequences=len(step.members.groups))
    for name, entry in CORRECTIONS.items():
        if not entry.each_update:  # that one reads the current log-probs
            bounds = {"low": 0.99, "high": 1.01} if entry.reads("low") else {"high": 0.0}
            found = entry.function(mismatch, **bounds)
            assert found.weights is None or found.weights.eq(1).all(), name
            assert found.keep is None or found.keep.all(), name
