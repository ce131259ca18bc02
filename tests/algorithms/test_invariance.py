"""What may not change a step, whatever its algorithm: partitions, order, members and tokens that
do not train, corrections where there is no gap.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from saccade.algorithms.advantages import ADVANTAGES, AdvantageInputs, compute
from saccade.algorithms.aggregation import AGGREGATIONS
from saccade.algorithms.build import resolve
from saccade.algorithms.corrections import CORRECTIONS, measure
from saccade.algorithms.objective import objective, to_metrics
from saccade.algorithms.policy_losses import LOSSES
from saccade.algorithms.resolved_algorithm import Algorithm
from saccade.config import AlgorithmConfig
from tests.algorithms.ragged import (
    EXACT,
    FAST,
    GROUP_ESTIMATORS,
    PER_MEMBER,
    PER_TOKEN,
    TOKENS,
    Step,
    chosen,
    columns_of,
    same,
    steps,
    train,
)

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
    moved, tokens = reordered(step, order)
    loss_, *gradients = train(algorithm, moved)
    assert same(loss_, whole[0])
    for one, other in zip(gradients, whole[1:], strict=True):
        assert same(one, other[tokens])


def reordered(step: Step, order: Tensor) -> tuple[Step, Tensor]:
    members, tokens = chosen(order, step.members)
    columns = {name: getattr(step, name)[tokens] for name in TOKENS}
    return Step(members=members, **columns), tokens


def with_another(members: AdvantageInputs, group: int, *, tokens: int, poison: float):
    """One more member: excluded and full of `poison`."""
    own = {"groups": group, "live": False, "baseline": False, "lengths": tokens, "sequence": len(members.rewards)}

    def longer(name: str, rows: int) -> Tensor:
        column = getattr(members, name)
        more = column.new_full((rows, *column.shape[1:]), own.get(name, poison))
        return torch.cat([column, more])

    columns = {name: longer(name, 1) for name in PER_MEMBER}
    return replace(members, **columns, **{name: longer(name, tokens) for name in PER_TOKEN})


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
