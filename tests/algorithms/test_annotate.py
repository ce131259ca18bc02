"""What the forests of a step are given before training on them."""

from dataclasses import replace

import numpy as np
import pytest
from pytest import approx

from saccade.algorithms import algorithm_state, annotate, select
from saccade.algorithms.algorithm_state import restore
from saccade.algorithms.build import resolve
from saccade.config import AlgorithmConfig
from saccade.types import Group, Trajectory
from tests.algorithms.by_member import KEYS, LENGTHS, Records, advantaged, exact, loss_of, rows


def test_who_is_excluded_by_status_may_stay_in_the_baseline(algorithm, records):
    group = records.changed(records.group("a", [1.0, 0.0, 0.0]), status=["ok", "ok", "overturn"])
    for option, mean in (("false", 1 / 2), ("true", 1 / 3)):
        row = algorithm("advantage=no_std", "exclude_status=[overturn]", f"excluded_in_baseline={option}")
        groups = select.mark_members([group], row)[0]
        updates = advantaged(row, records, groups)[0]
        values = records.column(updates, "advantages")
        assert {key: v[0] for key, v in values.items()} == exact({("a", 0): 1 - mean, ("a", 1): -mean})
        assert records.column(updates, "scales")["a", 0] == exact([1 / 4] * 2)  # S is 2, n is 2


def test_a_step_in_which_nothing_trains(algorithm, records):
    groups = [records.group("a", [0.0, 0.0]), records.group("b", [1.0, 1.0])]
    row = algorithm("drop_constant=true")
    known = algorithm_state.restore(row, None)
    groups = select.mark_members(groups, row)[0]
    updates = records.packed(select.split_updates(groups, 1, seed=0))
    assert updates == [] and annotate.add_advantages(updates, groups, row, known)[0] == []
    assert annotate.add_advantages([], [], row, known)[0] == []
    assert annotate.add_corrections([], algorithm("preset=[grpo,tis]"))[0] == []


def test_a_kl_in_the_reward_lowers_it_before_the_baseline(algorithm, written, records, golden):
    row = algorithm("preset=rloo", "kl.coef=0.5")
    values = records.column(written(row), "advantages")
    penalty = [sum(gap) for gap in rows(golden.old - golden.ref).values()]
    scores = [r - 0.5 * p for r, p in zip((2.0, 0.0, 0.5, 2.0), penalty, strict=True)]
    leads = [scores[0] - scores[1], scores[2] - scores[3]]
    expected = [leads[0], -leads[0], leads[1], -leads[1]]
    assert [values[key][0] for key in KEYS] == exact(expected, 1e-5)


def test_a_failed_greedy_rollout_excludes_its_group(algorithm, records):
    row = algorithm("preset=remax", "kl.coef=0", "aggregation=token_mean")
    greedy = {"a": records.member("a", 0, 0.25, 2), "b": records.member("b", 0, None, 2), "c": None}
    groups = [replace(records.group(uid, [1.0]), greedy=one) for uid, one in greedy.items()]
    updates, metrics = advantaged(row, records, groups)
    assert records.column(updates, "scales") == {("a", 0): [0.5, 0.5], ("b", 0): [0, 0], ("c", 0): [0, 0]}
    assert records.column(updates, "advantages")["a", 0] == [0.75, 0.75]
    assert records.column(updates, "advantages")["b", 0] == [0, 0]
    assert metrics.means()["group/no_baseline"] == 2


@pytest.mark.parametrize("bootstrap", ["false", "true"])
def test_only_a_truncated_response_is_worth_what_the_critic_says(algorithm, records, bootstrap):
    row = algorithm(
        *("preset=ppo", "kl.coef=0", "args.lam=1", "args.whiten=false"), f"critic.bootstrap_truncated={bootstrap}"
    )
    groups = [records.changed(records.group("a", [1.0, 1.0, 1.0]), status=["ok", "truncated", "void"])]
    updates = records.packed([groups], micro_tokens=6, ends=True)
    assert len(updates[0]) > 1
    scored = [(np.full(b.target_count, 0.25), np.array([0.5 + key[1] for key in b.keys])) for b in updates[0]]
    updates = annotate.with_scores(updates, ("values", "last_values"), scored)
    updates = annotate.add_advantages(updates, groups, row, algorithm_state.restore(row, None))[0]
    returns = {key: values[0] for key, values in records.column(updates, "returns").items()}
    truncated = 1.0 + 1.5 * (bootstrap == "true")
    assert returns == exact({("a", 0): 1.0, ("a", 1): truncated, ("a", 2): 1.0})
    advantages = records.column(updates, "advantages")
    assert advantages["a", 1] == exact([truncated - 0.25] * 2)


def test_domains_weigh_the_groups(algorithm, records):
    row = algorithm("preset=drpo", "args.reward_range=[0,2]", "kl.coef=0")
    groups = [
        records.group("a", [1.0, 0.0], LENGTHS[:2], extra={"domain": "xray"}),
        records.group("b", [0.5, 2.0], LENGTHS[2:], extra={"domain": "ct"}),
    ]
    known = algorithm_state.observe(algorithm_state.restore(row, None), groups, row)
    updates = annotate.add_advantages(records.packed([groups]), groups, row, known)[0]
    values = records.column(updates, "advantages")
    expected = [1.209362, -1.209362, -0.193498, 0.193498]
    assert [values[key][0] for key in KEYS] == pytest.approx(expected, abs=1e-6)


def test_members_far_from_the_reference_are_damped(algorithm, written, records, golden):
    damped = [
        algorithm("preset=drpo", "args.reward_range=[0,2]", f"args.drpo_kl_damp={quantile}") for quantile in (0, 0.75)
    ]
    before, after = (records.column(written(row), "advantages") for row in damped)
    gap = golden.old - golden.ref
    drift = [sum(k3) for k3 in rows((-gap).exp() - 1 + gap).values()]
    plain = np.array([before[key][0] for key in KEYS])
    strain = np.abs(plain) * drift
    limit = np.quantile(strain, 0.75)
    expected = plain * limit / (strain + limit)
    assert [after[key][0] for key in KEYS] == exact(expected.tolist(), 1e-5)


def standard(values):
    values = np.array(values, dtype=float)
    return (values - values.mean()) / (values.std(ddof=1) + 1e-6) if np.ptp(values) else 0 * values


def of_terms(algorithm, records, groups, weights):
    row = algorithm("preset=gdpo")
    updates = advantaged(row, records, groups, weights)[0]
    return {key: values[0] for key, values in records.column(updates, "advantages").items()}


def test_each_source_has_its_own_weights_and_lacks_terms_without_harm(algorithm, records):
    accuracy, form, speed = [1.0, 0.0, 0.5], [0.3, 0.2, 0.7], [2.0, 5.0, 9.0]
    groups = []
    for uid, source, name, other in (("a", "x", "fmt", form), ("b", "y", "speed", speed)):
        parts = [{"acc": a, name: value} for a, value in zip(accuracy, other, strict=True)]
        groups.append(records.changed(records.group(uid, [0.0] * 3, data_source=source), parts=parts))
    weights = {"x": {"acc": 1.0, "fmt": 0.5}, "y": {"acc": 2.0, "speed": -1.0}}
    found = of_terms(algorithm, records, groups, weights.__getitem__)
    total = np.concatenate([standard(accuracy) + 0.5 * standard(form), 2 * standard(accuracy) - standard(speed)])
    expected = (total - total.mean()) / (total.std(ddof=1) + 1e-4)
    assert list(found.values()) == exact(expected.tolist(), 1e-5)


def test_what_an_environment_gave_is_a_term_too(algorithm, records):
    given = {"parts": [{"acc": 1.0}] * 3, "turn_rewards": [(0.5, 0.5), (), (0.1, 0.2)]}
    groups = [records.changed(records.group("a", [0.0] * 3), **given)]
    found = of_terms(algorithm, records, groups, lambda source: {"acc": 1.0})
    total = standard([1.0, 0.0, 0.3])
    assert list(found.values()) == exact((total / (total.std(ddof=1) + 1e-4)).tolist(), 1e-5)


def test_tokens_of_older_weights_are_marked_and_in_no_mismatch(algorithm, records):
    row = algorithm("kl.coef=0", "old=recompute")
    (group,) = [records.group("a", [0.0, 1.0], [3, 2])]
    versions = [np.array([-1, -1, -1, 4, 3, 4]), np.array([-1, -1, -1, 4, 4])]
    group = records.changed(group, versions=versions)
    updates = records.filled(
        records.packed([[group]], micro_tokens=5), old_logprobs={("a", 0): [-1.0, -9.0, -1.5], ("a", 1): [-1.0, -1.25]}
    )
    known = algorithm_state.restore(row, None)
    marked = annotate.add_advantages(updates, [group], row, known, version=4)[0]
    assert records.column(marked, "ages") == {("a", 0): [0, 1, 0], ("a", 1): [0, 0]}
    new = {("a", 0): [-1.0] * 3, ("a", 1): [-1.0] * 2}
    _, log = loss_of(row, marked[0], new)
    assert log["mismatch/logp_gap_mean"] == exact(0.75 / 4)
    assert log["mismatch/logp_gap_max"] == 0.5 and log["mismatch/unscored_frac"] == 0
    fresh = annotate.add_advantages(updates, [group], row, known, version=3)[0]
    assert fresh[0][0].ages is None
    assert loss_of(row, fresh[0], new)[1]["mismatch/logp_gap_max"] == 8.0


@pytest.mark.parametrize("loss", ["kl_cov", "clip_cov"])
def test_neither_batching_nor_order_changes_the_selection(algorithm, written, records, golden, loss):
    band = ["args.cov_low=-10", "args.cov_high=10"] if loss == "clip_cov" else []
    row = algorithm(f"preset={loss}", "args.cov_fraction=0.2", *band)
    new, found = rows(golden.new), []
    for packing in ({}, {"budget": 8}, {"flip": True}, {"budget": 8, "flip": True}):
        (batches,) = written(row, **packing)
        current = [np.concatenate([new[key] for key in b.keys]) for b in batches]
        selected = annotate.write_selection(batches, current, row, seed="1/2")
        found.append(records.column([selected], "selected"))
    assert found[0] == found[1] == found[2] == found[3]
    assert sum(map(sum, found[0].values())) == 3
    other = annotate.write_selection(batches, current, row, seed="1/3")
    differs = records.column([other], "selected") != found[0]
    assert differs == (loss == "clip_cov")  # the largest are the largest, whatever the seed


def test_the_critic_has_a_mean_over_live_tokens(algorithm, written, records):
    row = algorithm(
        "aggregation=seq_mean", "advantage=no_std", "hot_first_token.temperature=2", "hot_first_token.first_token=mask"
    )
    updates = written(row, budget=8)
    seen = [annotate.for_critic(batches) for batches in updates]
    scales = records.column(seen, "scales")
    for key, length in zip(KEYS, LENGTHS, strict=True):
        assert scales[key] == exact([0] + [1 / 14] * (length - 1))
    assert records.column(updates, "scales")["a", 0][1] == exact(1 / 20)  # the policy's own stays


def test_advantages_are_shown_on_the_members(algorithm, records):
    row = algorithm()
    groups = select.mark_members([records.group("a", [1.0, None, 0.0])], row)[0]
    updates = advantaged(row, records, groups)[0]
    (shown,) = annotate.show_columns(groups, updates)
    right, lost, wrong = (t.advantages for t in shown.trajectories)
    assert lost is None and right is not None and wrong is not None
    assert right.tolist() == exact([2**-0.5] * 2, 1e-5)
    assert wrong.tolist() == exact([-(2**-0.5)] * 2, 1e-5)


def member(repeat: int, reward: float | None, status: str = "ok", **parts: float) -> Trajectory:
    return Records.member("g", repeat, reward, 1, status=status, parts=parts, trained=repeat >= 0)


def group(*members: Trajectory, greedy: Trajectory | None = None) -> Group:
    return replace(Records.group("g", []), trajectories=members, greedy=greedy)


def rewards(groups: list[Group]) -> list[float | None]:
    return [t.reward for one in groups for t in one.trajectories]


def shape(groups, *, normalise="off", clip=None, moments=None, components=()):
    config = AlgorithmConfig(preset="gdpo" if components else "grpo", exclude_status=["truncated"])
    row = resolve(config, max_tokens=9).model_copy(update={"reward_clip": clip, "reward_normalise": normalise})
    state = replace(restore(row, None), moments=moments or {})
    groups, state, metrics = select.shape_rewards(groups, row, state, lambda source: dict.fromkeys(components, 1.0))
    return groups, state.moments, metrics.means()


FOUR = group(*(member(i, r) for i, r in enumerate([1.0, 0.0, 0.5, 2.0])))


@pytest.mark.parametrize(
    ("normalise", "shift", "high", "clipped"),
    [("std", 0.0, 2.1, 1), ("mean_std", 0.875, 1.4, 0)],  # 2.0 becomes 2.34 and 1.32
)
def test_the_step_enters_the_moments_before_they_are_used_and_limits_come_last(normalise, shift, high, clipped):
    std = np.std([1.0, 0.0, 0.5, 2.0], ddof=1)
    scaled = [(r - shift) / std for r in (1.0, 0.0, 0.5, 2.0)]
    groups, moments, metrics = shape([FOUR], normalise=normalise)
    assert rewards(groups) == approx(scaled) and moments[""].count == 4
    assert metrics["reward/clip_frac"] == 0
    groups, limited, metrics = shape([FOUR], normalise=normalise, clip=(-9.0, high))
    assert rewards(groups) == approx([min(r, high) for r in scaled])
    assert limited == moments  # they never see what was cut off
    assert metrics["reward/clip_frac"] == clipped / 4


def test_moments_run_on_over_the_steps():
    steps, moments = [[1.0, 0.0], [3.0, 5.0], [0.5, 0.5]], {}
    for n, values in enumerate(steps):
        groups, later, _ = shape([group(*map(member, range(2), values))], normalise="std", moments=moments)
        std = np.std(np.ravel(steps[: n + 1]), ddof=1)
        assert rewards(groups) == approx([r / std for r in values])
        assert sum(known.count for known in moments.values()) == 2 * n  # what was passed in is left alone
        moments = later


def test_members_that_do_not_count_are_scaled_and_move_nothing():
    others = [member(4, 100.0, "truncated"), member(5, None, "error")]
    baseline = member(-1, 3.0)
    extended = group(*FOUR.trajectories, *others, greedy=baseline)
    options = {"normalise": "mean_std", "clip": (-1.0, 1.0)}
    plain, wanted, share = shape([FOUR], **options)
    groups, moments, metrics = shape([extended], **options)
    assert moments == wanted and metrics == share
    assert rewards(groups) == [*rewards(plain), 1.0, None]
    assert groups[0].greedy.reward == 1.0 and groups[0].greedy.outcome == 3.0
    assert not groups[0].greedy.trained
    (free,), _, _ = shape([extended], normalise="std")
    assert free.greedy.reward == approx(3.0 / wanted[""].divisor)


def test_components_have_scales_of_their_own():
    table = [(1.0, 30.0), (0.0, 10.0), (1.0, 20.0), (0.0, 60.0)]
    one = group(*(member(i, a + b, math=a, style=b, other=7.0) for i, (a, b) in enumerate(table)))
    names = ["math", "style"]
    groups, moments, metrics = shape([one], normalise="std", clip=(0.0, 2.0), components=names)
    assert set(moments) == {"", "math", "style"}
    for place, name in enumerate(names):
        column = np.array(table)[:, place]
        wanted = np.clip(column / column.std(ddof=1), 0, 2)
        assert [t.parts[name] for t in groups[0].trajectories] == approx(wanted.tolist())
        assert moments[name].mean == approx(column.mean())
    assert {t.parts["other"] for t in groups[0].trajectories} == {7.0}
    assert metrics["reward/clip_frac"] == 1 / 8  # 60 / 21.6 alone
    total = np.array(table).sum(1)
    assert rewards(groups) == approx(np.clip(total / total.std(ddof=1), 0, 2).tolist())
