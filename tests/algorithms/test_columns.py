"""What the forests of a step are given before training on them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from saccade.algorithms import columns, memory, stages
from saccade.algorithms.corrections import effective_sample_size
from saccade.algorithms.objective import Columns, Stats, objective, to_metrics
from saccade.types import Metrics

LENGTHS = (6, 4, 5, 3)
KEYS = [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
NO_KL = ("kl.coef=0", "clip_high=0.28", "advantage=no_std", "aggregation=token_mean")


@pytest.fixture
def written(records, golden):
    """The reference fixture as two groups, with their advantages written; by token, rows are in
    the order of the fixture while nothing is packed otherwise.
    """

    def write(row, *, budget=1000, flip=False, updates=1, metrics=None):
        groups = [
            records.group("a", [2.0, 0.0], LENGTHS[:2]),
            records.group("b", [0.5, 2.0], LENGTHS[2:]),
        ]
        groups = groups[::-1] if flip else groups
        parts = [groups] if updates == 1 else [[group] for group in groups]
        packed = records.filled(
            records.packed(parts, budget),
            old_logprobs=rows(golden.old),
            rollout_logprobs=rows(golden.rollout),
            ref_logprobs=rows(golden.ref),
            old_entropies=rows(1 + (2 * golden.sequence + 3 * golden.position).double().sin()),
        )
        found = Metrics() if metrics is None else metrics
        known = memory.observe(memory.recall(row, None), groups, row)
        return columns.write_advantages(packed, groups, row, known, found)

    return write


def rows(values):
    """A column of the fixture by member."""
    parts = torch.as_tensor(values).split(LENGTHS)
    return {key: part.tolist() for key, part in zip(KEYS, parts, strict=True)}


def loss_of(row, batches, new):
    """The loss of an optimizer step over its forests, and its metrics; `new` by member."""
    total, stats = 0.0, list[Stats]()
    for batch in batches:

        def column(name, batch=batch):
            values = getattr(batch, name)
            return None if values is None else torch.from_numpy(values).double()

        current = np.concatenate([new[key] for key in batch.keys])
        loss, one = objective(
            row,
            torch.from_numpy(current),
            None,
            Columns(
                advantages=column("advantages"),
                scales=column("scales"),
                sequence=torch.from_numpy(batch.sequence),
                sequences=len(batch.keys),
                old=column("old_logprobs"),
                rollout=column("rollout_logprobs"),
                ref=column("ref_logprobs"),
                keep=column("keep"),
                weights=column("weights"),
                rewards=column("rewards"),
                selected=None if batch.selected is None else column("selected").bool(),
                stale=None if batch.stale is None else column("stale").bool(),
            ),
        )
        total, stats = total + loss.item(), [*stats, one]
    return total, to_metrics(row, stats).means()


def exact(values, rel=1e-6):
    return pytest.approx(values, rel=rel, abs=1e-7)


# -- advantages ------------------------------------------------------------------------------------


def test_advantages_leave_out_who_was_not_scored(algorithm, records):
    row, known = algorithm(), memory.recall(algorithm(), None)
    groups = [records.group("a", [1.0, None, 0.0, 0.0])]
    groups = stages.choose_members(groups, row, Metrics())
    updates = columns.write_advantages(records.packed([groups]), groups, row, known, Metrics())
    values = records.column(updates, "advantages")
    assert set(values) == {("a", 0), ("a", 2), ("a", 3)}
    std = np.std([1.0, 0.0, 0.0], ddof=1)
    assert values["a", 0] == exact([(1 - 1 / 3) / (std + 1e-6)] * 2)
    assert values["a", 2] == exact([-(1 / 3) / (std + 1e-6)] * 2)
    assert records.column(updates, "rewards")["a", 0] == [1.0, 1.0]


def test_who_is_excluded_by_status_may_stay_in_the_baseline(algorithm, records):
    group = records.changed(records.group("a", [1.0, 0.0, 0.0]), status=["ok", "ok", "overturn"])
    for option, mean in (("false", 1 / 2), ("true", 1 / 3)):
        row = algorithm(
            "advantage=no_std", "exclude_status=[overturn]", f"excluded_in_baseline={option}"
        )
        groups = stages.choose_members([group], row, Metrics())
        updates = columns.write_advantages(
            records.packed([groups]), groups, row, memory.recall(row, None), Metrics()
        )
        values = records.column(updates, "advantages")
        assert {key: v[0] for key, v in values.items()} == exact(
            {("a", 0): 1 - mean, ("a", 1): -mean}
        )
        assert records.column(updates, "scales")["a", 0] == exact([1 / 4] * 2)  # S is 2, n is 2


def test_a_group_shrunk_to_one_member_does_not_train(algorithm, records):
    row, metrics = algorithm("aggregation=token_mean"), Metrics()
    groups = [records.group("a", [1.0, None]), records.group("b", [1.0, 0.0])]
    groups = stages.choose_members(groups, row, metrics)
    updates = columns.write_advantages(
        records.packed([groups]), groups, row, memory.recall(row, None), metrics
    )
    scales = records.column(updates, "scales")
    assert scales["a", 0] == [0, 0] and scales["b", 0] == [0.25, 0.25]
    log = metrics.means()
    assert log["group/singleton"] == 1
    assert (log["policy/live_tokens"], log["policy/live_sequences"]) == (4, 2)


def test_scales_of_an_update_add_up_to_one_however_it_is_packed(algorithm, records):
    groups = [records.group(str(i), [0.0, 1.0, 0.0, 1.0], [1, 2, 3, 4]) for i in range(4)]
    row = algorithm("preset=dapo", updates_per_step=2)
    parts = stages.split_updates(groups, 2, seed=0)
    wide, narrow = (
        columns.write_advantages(
            records.packed(parts, budget), groups, row, memory.recall(row, None), Metrics()
        )
        for budget in (1000, 8)
    )
    assert len(narrow[0]) > len(wide[0]) == 1
    for updates in (wide, narrow):
        for batches in updates:
            total = sum(sum(values) for values in records.column([batches], "scales").values())
            assert total == exact(1.0)
    for name in ("advantages", "scales", "rewards"):
        assert records.column(wide, name) == records.column(narrow, name)


def test_a_mean_over_sequences_weighs_them_alike(algorithm, records):
    groups, row = [records.group("a", [0.0, 1.0, 0.0, 1.0], [1, 2, 4, 8])], algorithm()
    updates = columns.write_advantages(
        records.packed([groups]), groups, row, memory.recall(row, None), Metrics()
    )
    scales = records.column(updates, "scales")
    assert [sum(scales["a", i]) for i in range(4)] == exact([0.25] * 4)


def test_a_step_in_which_nothing_trains(algorithm, records):
    groups = [records.group("a", [0.0, 0.0]), records.group("b", [1.0, 1.0])]
    row = algorithm("drop_constant=true")
    known = memory.recall(row, None)
    groups = stages.choose_members(groups, row, Metrics())
    updates = records.packed(stages.split_updates(groups, 1, seed=0))
    assert updates == [] and columns.write_advantages(updates, groups, row, known, Metrics()) == []
    assert columns.write_advantages([], [], row, known, Metrics()) == []
    assert columns.write_corrections([], algorithm("preset=grpo+tis"), Metrics()) == []


def test_a_kl_in_the_reward_lowers_it_before_the_baseline(algorithm, written, records, golden):
    row = algorithm("preset=rloo", "kl.coef=0.5")
    values = records.column(written(row), "advantages")
    penalty = [sum(gap) for gap in rows(golden.old - golden.ref).values()]
    scores = [r - 0.5 * p for r, p in zip((2.0, 0.0, 0.5, 2.0), penalty, strict=True)]
    leads = [scores[0] - scores[1], scores[2] - scores[3]]
    expected = [leads[0], -leads[0], leads[1], -leads[1]]
    assert [values[key][0] for key in KEYS] == exact(expected, 1e-5)


def test_a_failed_greedy_rollout_excludes_its_group(algorithm, records):
    row, metrics = algorithm("preset=remax", "kl.coef=0", "aggregation=token_mean"), Metrics()
    greedy = {"a": records.member("a", 0, 0.25, 2), "b": records.member("b", 0, None, 2), "c": None}
    groups = [replace(records.group(uid, [1.0]), greedy=one) for uid, one in greedy.items()]
    updates = columns.write_advantages(
        records.packed([groups]), groups, row, memory.recall(row, None), metrics
    )
    assert records.column(updates, "scales") == {
        ("a", 0): [0.5, 0.5],
        ("b", 0): [0, 0],
        ("c", 0): [0, 0],
    }
    assert records.column(updates, "advantages")["a", 0] == [0.75, 0.75]
    assert records.column(updates, "advantages")["b", 0] == [0, 0]
    assert metrics.means()["group/no_baseline"] == 2


@pytest.mark.parametrize("bootstrap", ["false", "true"])
def test_only_a_truncated_response_is_worth_what_the_critic_says(algorithm, records, bootstrap):
    row = algorithm(
        *("preset=ppo", "kl.coef=0", "lam=1", "whiten=false"),
        f"critic.bootstrap_truncated={bootstrap}",
    )
    groups = [
        records.changed(records.group("a", [1.0, 1.0, 1.0]), status=["ok", "truncated", "void"])
    ]
    updates = records.packed([groups], micro_tokens=6, ends=True)
    assert len(updates[0]) > 1
    scored = [
        (np.full(len(b.reads), 0.25), np.array([0.5 + key[1] for key in b.keys]))
        for b in updates[0]
    ]
    updates = columns.with_scores(updates, ("values", "last_values"), scored)
    updates = columns.write_advantages(updates, groups, row, memory.recall(row, None), Metrics())
    returns = {key: values[0] for key, values in records.column(updates, "returns").items()}
    truncated = 1.0 + 1.5 * (bootstrap == "true")
    assert returns == exact({("a", 0): 1.0, ("a", 1): truncated, ("a", 2): 1.0})
    advantages = records.column(updates, "advantages")
    assert advantages["a", 1] == exact([truncated - 0.25] * 2)


def test_domains_weigh_the_groups(algorithm, records):
    row = algorithm("preset=drpo", "reward_range=[0,2]", "kl.coef=0")
    groups = [
        records.group("a", [1.0, 0.0], LENGTHS[:2], extra={"domain": "xray"}),
        records.group("b", [0.5, 2.0], LENGTHS[2:], extra={"domain": "ct"}),
    ]
    known = memory.observe(memory.recall(row, None), groups, row)
    updates = columns.write_advantages(records.packed([groups]), groups, row, known, Metrics())
    values = records.column(updates, "advantages")
    expected = [1.209362, -1.209362, -0.193498, 0.193498]
    assert [values[key][0] for key in KEYS] == pytest.approx(expected, abs=1e-6)


def test_members_far_from_the_reference_are_damped(algorithm, written, records, golden):
    before, after = (
        records.column(
            written(algorithm("preset=drpo", "reward_range=[0,2]", f"drpo_kl_damp={quantile}")),
            "advantages",
        )
        for quantile in (0, 0.75)
    )
    gap = golden.old - golden.ref
    drift = [sum(k3) for k3 in rows((-gap).exp() - 1 + gap).values()]
    plain = np.array([before[key][0] for key in KEYS])
    strain = np.abs(plain) * drift
    limit = np.quantile(strain, 0.75)
    expected = plain * limit / (strain + limit)
    assert [after[key][0] for key in KEYS] == exact(expected.tolist(), 1e-5)


# -- terms of the reward ---------------------------------------------------------------------------


def standard(values):
    values = np.array(values, dtype=float)
    return (values - values.mean()) / (values.std(ddof=1) + 1e-6) if np.ptp(values) else 0 * values


def of_terms(algorithm, records, groups, weights):
    row = algorithm("preset=gdpo")
    updates = columns.write_advantages(
        records.packed([groups]), groups, row, memory.recall(row, None), Metrics(), weights
    )
    return {key: values[0] for key, values in records.column(updates, "advantages").items()}


def test_terms_are_compared_one_by_one(algorithm, records):
    accuracy, form = (1, 0, 1, 0), (1, 1, 0, 1)
    parts = [{"acc": a, "fmt": f} for a, f in zip(accuracy, form, strict=True)]
    groups = [
        records.changed(records.group("a", [0.0, 0.0]), parts=parts[:2]),
        records.changed(records.group("b", [0.0, 0.0]), parts=parts[2:]),
    ]
    found = of_terms(algorithm, records, groups, lambda source: {"acc": 1.0, "fmt": 0.5})
    assert [found[key] for key in KEYS] == pytest.approx(
        [1.095275, -1.095275, 0.547638, -0.547638], abs=1e-6
    )


def test_each_source_has_its_own_weights_and_lacks_terms_without_harm(algorithm, records):
    accuracy, form, speed = [1.0, 0.0, 0.5], [0.3, 0.2, 0.7], [2.0, 5.0, 9.0]
    groups = [
        records.changed(
            records.group("a", [0.0] * 3, data_source="x"),
            parts=[{"acc": a, "fmt": f} for a, f in zip(accuracy, form, strict=True)],
        ),
        records.changed(
            records.group("b", [0.0] * 3, data_source="y"),
            parts=[{"acc": a, "speed": s} for a, s in zip(accuracy, speed, strict=True)],
        ),
    ]
    weights = {"x": {"acc": 1.0, "fmt": 0.5}, "y": {"acc": 2.0, "speed": -1.0}}
    found = of_terms(algorithm, records, groups, weights.__getitem__)
    total = np.concatenate(
        [
            standard(accuracy) + 0.5 * standard(form),
            2 * standard(accuracy) - standard(speed),
        ]
    )
    expected = (total - total.mean()) / (total.std(ddof=1) + 1e-4)
    assert list(found.values()) == exact(expected.tolist(), 1e-5)


def test_what_an_environment_gave_is_a_term_too(algorithm, records):
    groups = [
        records.changed(
            records.group("a", [0.0] * 3),
            parts=[{"acc": 1.0}] * 3,
            turn_rewards=[(0.5, 0.5), (), (0.1, 0.2)],
        )
    ]
    found = of_terms(algorithm, records, groups, lambda source: {"acc": 1.0})
    total = standard([1.0, 0.0, 0.3])
    assert list(found.values()) == exact((total / (total.std(ddof=1) + 1e-4)).tolist(), 1e-5)


# -- corrections -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "value"),
    [
        (["correct=[{name: icepop, low: 0.97, high: 1.03}]"], 0.06566720),
        (["correct=[{name: icepop, low: 0.97, high: 1.03}]", "denominator=kept"], 0.16885852),
        (["entropy_top=0.2"], 0.11624419),
        (["entropy_top=0.2", "denominator=kept"], 0.52309886),
        (["correct=[{name: tis.token, low: 0.97, high: 1.03}]"], -0.01514937),
        (["correct=[seq_mask_tis]"], -0.34281679),
        (["correct=[tis.token]", "dual_clip=3"], -0.01421687),
        (["correct=[tis.sequence]", "dual_clip=3"], -0.01688046),
        (["correct=[{name: opsm, threshold: 0.01}]"], -0.22400677),
    ],
)
def test_reference_values_over_forests(algorithm, written, golden, overrides, value):
    row = algorithm(*NO_KL, *overrides, "old=recompute")
    for packing in ({}, {"budget": 8}, {"flip": True}, {"budget": 8, "flip": True}):
        (batches,) = columns.write_corrections(written(row, **packing), row, Metrics())
        assert len(batches) == (4 if "budget" in packing else 1)
        loss, _ = loss_of(row, batches, rows(golden.new))
        assert loss == pytest.approx(value, abs=3e-7)


def test_seven_of_eighteen_tokens_are_kept_and_counted(algorithm, written, records):
    row = algorithm(*NO_KL, "correct=[{name: icepop, low: 0.97, high: 1.03}]", "denominator=kept")
    metrics = Metrics()
    updates = columns.write_corrections(written(row), row, metrics)
    keep = np.concatenate(list(records.column(updates, "keep").values()))
    assert (keep > 0).sum() == 7 and keep[keep > 0].tolist() == exact([18 / 7] * 7)
    assert metrics.means()["mismatch/masked_frac"] == pytest.approx(11 / 18)
    row = algorithm(*NO_KL, "entropy_top=0.2")
    columns.write_corrections(written(row), row, metrics)
    assert metrics.means()["policy/entropy_kept_frac"] == pytest.approx(4 / 18)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean", "seq_sum", "group_mean"])
def test_over_what_was_kept_the_factors_make_up_for_the_rest(
    algorithm, written, records, aggregation
):
    """With a mean the factors of the kept tokens add up to 1; the KL keeps its denominator."""
    row = algorithm(
        *NO_KL[1:3],
        f"aggregation={aggregation}",
        "correct=[{name: reject.token.k1, low: 0.97, high: 1.03}]",
        "denominator=kept",
    )
    before = written(row)
    updates = columns.write_corrections(before, row, Metrics())
    assert records.column(updates, "scales") == records.column(before, "scales")
    scales, keep = (
        np.concatenate(list(records.column(updates, name).values())) for name in ("scales", "keep")
    )
    kept = np.array([sum(np.array(k) > 0) for k in records.column(updates, "keep").values()])
    total = kept.sum() / (kept > 0).sum() if aggregation == "seq_sum" else 1.0
    assert (scales * keep).sum() == exact(total)


def test_the_kl_ignores_what_a_filter_drops(algorithm, written, golden):
    overrides = ("kl.coef=0.1", *NO_KL[1:], "old=recompute")
    plain, kept = algorithm(*overrides), algorithm(*overrides, "entropy_top=0.2")
    logs = []
    for row in (plain, kept):
        (batches,) = columns.write_corrections(written(row), row, Metrics())
        logs.append(loss_of(row, batches, rows(golden.new))[1])
    assert logs[0]["policy/kl_loss"] == logs[1]["policy/kl_loss"] == exact(0.03932377)
    assert logs[1]["policy/pg_loss"] == exact(0.11624419, 3e-6)


def test_weights_average_to_one_in_each_update(algorithm, written, records, golden):
    row = algorithm(*NO_KL, "correct=[tis.token]", "self_normalise=true", updates_per_step=2)
    plain = replace(row, self_normalise=False)
    before, after = (
        columns.write_corrections(written(row, updates=2, budget=8), one, Metrics())
        for one in (plain, row)
    )
    assert [len(batches) for batches in after] == [2, 2]
    for raw, normal in zip(before, after, strict=True):
        one, other = (
            np.concatenate(list(records.column([batches], "weights").values()))
            for batches in (raw, normal)
        )
        assert other.mean() == exact(1.0)
        assert other.tolist() == exact((one / one.mean()).tolist())


def test_the_effective_sample_size_is_that_of_the_weights(algorithm, written, golden):
    row, metrics = algorithm(*NO_KL, "correct=[tis.token]"), Metrics()
    columns.write_corrections(written(row), row, metrics)
    weights = (golden.old - golden.rollout).exp()
    log = metrics.means()
    assert log["mismatch/ess"] == exact(effective_sample_size(weights, golden.live))
    assert log["mismatch/ess"] == exact((weights.sum() ** 2 / (18 * (weights**2).sum())).item())
    assert log["mismatch/is_weight_mean"] == exact(0.99365108)
    assert log["mismatch/is_weight_max"] == exact(weights.max().item())


def test_no_correction_writes_no_column(algorithm, written):
    row = algorithm(*NO_KL)
    updates = written(row)
    assert columns.write_corrections(updates, row, Metrics()) is updates


# -- a hot first token -----------------------------------------------------------------------------

FIRST = [0, 6, 10, 15]


def test_a_hot_first_token_is_weighed_by_its_own_gap(algorithm, written, records, golden):
    row = algorithm(*NO_KL, "preset=grpo+fire", "fire.cap=1.02")
    before = written(row)
    updates = columns.write_corrections(before, row, Metrics())
    weights = np.concatenate(list(records.column(updates, "weights").values()))
    expected = np.ones(18)
    expected[FIRST] = (golden.old - golden.rollout).exp().clamp(max=1.02)[FIRST]
    assert (expected[FIRST] == 1.02).any() and (expected[FIRST] < 1.02).any()
    assert weights.tolist() == exact(expected.tolist())
    # The gap is by design, so it is none of the mismatch.
    rollout = np.concatenate(list(records.column(updates, "rollout_logprobs").values()))
    replaced = golden.rollout.clone()
    replaced[FIRST] = golden.old[FIRST]
    assert rollout.tolist() == exact(replaced.tolist())
    _, log = loss_of(row, updates[0], rows(golden.new))
    gap = (golden.old - replaced).abs()
    assert log["mismatch/logp_gap_mean"] == exact(gap.mean().item(), 1e-5)


def test_corrections_do_not_see_the_gap_of_a_hot_first_token(algorithm, written, records, golden):
    row = algorithm(*NO_KL, "preset=grpo+fire", "fire.cap=1.02", "correct=[tis.sequence]")
    updates = columns.write_corrections(written(row), row, Metrics())
    weights = records.column(updates, "weights")
    gaps = rows(golden.old - golden.rollout)
    for key in KEYS:
        others = float(np.exp(sum(gaps[key][1:])))
        first = min(float(np.exp(gaps[key][0])), 1.02)
        assert weights[key] == exact([others * first] + [others] * (len(gaps[key]) - 1), 1e-5)


def test_a_hot_first_token_without_a_log_prob_weighs_one(algorithm, written, records, golden):
    row = algorithm(*NO_KL, "preset=grpo+fire")
    unknown = rows(torch.full_like(golden.rollout, float("nan")))
    updates = records.filled(written(row), rollout_logprobs=unknown)
    updates = columns.write_corrections(updates, row, Metrics())
    assert set(np.concatenate(list(records.column(updates, "weights").values()))) == {1.0}


@pytest.mark.parametrize(
    ("aggregation", "scale"),
    [
        ("token_mean", [1 / 14] * 4),
        ("seq_mean", [1 / (4 * n) for n in (5, 3, 4, 2)]),
        ("seq_sum", [1 / 4] * 4),
    ],
)
def test_a_masked_first_token_is_in_no_denominator(algorithm, written, records, aggregation, scale):
    metrics = Metrics()
    row = algorithm(
        *NO_KL[:3], f"aggregation={aggregation}", "preset=grpo+fire", "fire.first_token=mask"
    )
    updates = written(row, metrics=metrics)
    for key, value in zip(KEYS, scale, strict=True):
        found = records.column(updates, "scales")[key]
        assert found[0] == 0 and found[1:] == exact([value] * (len(found) - 1))
        assert records.column(updates, "advantages")[key][0] == 0
    log = metrics.means()
    assert (log["policy/live_tokens"], log["policy/live_sequences"]) == (14, 4)
    assert columns.write_corrections(updates, row, Metrics()) is updates


def test_a_response_of_one_masked_token_does_not_train(algorithm, records):
    row, metrics = algorithm("preset=grpo+fire", "fire.first_token=mask"), Metrics()
    groups = [records.group("a", [0.0, 1.0, 5.0], [2, 3, 1])]
    updates = columns.write_advantages(
        records.packed([groups]), groups, row, memory.recall(row, None), metrics
    )
    assert records.column(updates, "scales")["a", 2] == [0]
    assert metrics.means()["policy/live_sequences"] == 2
    values = records.column(updates, "advantages")
    assert [values["a", 0][1], values["a", 1][1]] == exact([-(2**-0.5), 2**-0.5], 1e-5)


def test_lengths_are_without_a_masked_first_token(algorithm, written, records):
    row = algorithm("preset=opo+fire", "fire.first_token=mask")
    values = records.column(written(row), "advantages")
    baseline = (5 * 2.0 + 3 * 0.0) / 8
    assert values["a", 0][1:] == exact([2.0 - baseline] * 5)


def test_the_ratio_of_a_sequence_is_without_a_masked_first_token(algorithm, written, golden):
    row = algorithm(
        *("preset=gspo+fire", "fire.first_token=mask", "advantage=no_std", "clip=50"),
        "old=recompute",
    )
    (batches,) = written(row)
    loss, _ = loss_of(row, batches, rows(golden.new))
    gaps, advantages = rows(golden.new - golden.old).values(), (1, -1, -0.75, 0.75)
    ratios = [np.exp(np.mean(gap[1:])) for gap in gaps]
    expected = -np.mean([a * r for a, r in zip(advantages, ratios, strict=True)])
    assert loss == exact(expected)
    poisoned = {key: [float("nan"), *values[1:]] for key, values in rows(golden.new).items()}
    assert loss_of(row, batches, poisoned)[0] == loss


# -- staleness -------------------------------------------------------------------------------------


def test_tokens_of_older_weights_are_marked_and_in_no_mismatch(algorithm, records):
    row = algorithm("kl.coef=0", "old=recompute")
    (group,) = [records.group("a", [0.0, 1.0], [3, 2])]
    versions = [np.array([-1, -1, -1, 3, 3, 4]), np.array([-1, -1, -1, 4, 4])]
    group = records.changed(group, versions=versions)
    updates = records.filled(
        records.packed([[group]], micro_tokens=5),
        old_logprobs={("a", 0): [-1.0, -9.0, -1.5], ("a", 1): [-1.0, -1.25]},
    )
    known = memory.recall(row, None)
    marked = columns.write_advantages(updates, [group], row, known, Metrics(), version=4)
    assert records.column(marked, "stale") == {("a", 0): [1, 1, 0], ("a", 1): [0, 0]}
    new = {("a", 0): [-1.0] * 3, ("a", 1): [-1.0] * 2}
    _, log = loss_of(row, marked[0], new)
    assert log["mismatch/logp_gap_mean"] == exact(0.75 / 3)
    assert log["mismatch/logp_gap_max"] == 0.5 and log["mismatch/unscored_frac"] == 0
    fresh = columns.write_advantages(updates, [group], row, known, Metrics(), version=3)
    assert fresh[0][0].stale is None
    assert loss_of(row, fresh[0], new)[1]["mismatch/logp_gap_max"] == 8.0


# -- selection -------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["kl_cov", "clip_cov"])
def test_neither_batching_nor_order_changes_the_selection(
    algorithm, written, records, golden, loss
):
    band = ["cov_low=-10", "cov_high=10"] if loss == "clip_cov" else []
    row = algorithm(f"preset={loss}", "cov_fraction=0.2", *band)
    new, found = rows(golden.new), []
    for packing in ({}, {"budget": 8}, {"flip": True}, {"budget": 8, "flip": True}):
        (batches,) = written(row, **packing)
        current = [np.concatenate([new[key] for key in b.keys]) for b in batches]
        selected = columns.write_selection(batches, current, row, seed="1/2")
        found.append(records.column([selected], "selected"))
    assert found[0] == found[1] == found[2] == found[3]
    assert sum(map(sum, found[0].values())) == 3
    other = columns.write_selection(batches, current, row, seed="1/3")
    differs = records.column([other], "selected") != found[0]
    assert differs == (loss == "clip_cov")  # the largest are the largest, whatever the seed


def test_the_selection_of_the_reference(algorithm, written, golden):
    row = algorithm("preset=kl_cov", "advantage=no_std", "cov_fraction=0.2")
    (batches,) = written(row, budget=8)
    new = rows(golden.new)
    current = [np.concatenate([new[key] for key in b.keys]) for b in batches]
    selected = columns.write_selection(batches, current, row, seed="")
    assert loss_of(row, selected, new)[0] == pytest.approx(0.00580263, abs=3e-7)


def test_dead_tokens_are_never_selected(algorithm, written, records, golden):
    row = algorithm(
        "preset=kl_cov", "cov_fraction=0.9", "fire.temperature=2", "fire.first_token=mask"
    )
    (batches,) = written(row)
    new = golden.new.clone()
    new[FIRST] = float("nan")
    selected = columns.write_selection(batches, [new.numpy()], row, seed="")
    values = np.concatenate(list(records.column([selected], "selected").values()))
    assert values[FIRST].sum() == 0 and values.sum() == 12  # of 14


def test_old_log_probs_must_have_been_computed(algorithm, written, golden):
    (batches,) = written(algorithm(*NO_KL), budget=8)
    assert np.concatenate(columns.old_logprobs(batches)).tolist() == exact(golden.old.tolist())
    with pytest.raises(AssertionError, match="were not computed"):
        columns.old_logprobs([replace(batches[0], old_logprobs=None)])


# -- the critic's view, and back -------------------------------------------------------------------


def test_the_critic_has_a_mean_over_live_tokens(algorithm, written, records):
    row = algorithm(
        "aggregation=seq_mean", "advantage=no_std", "fire.temperature=2", "fire.first_token=mask"
    )
    updates = written(row, budget=8)
    seen = [columns.for_critic(batches) for batches in updates]
    scales = records.column(seen, "scales")
    for key, length in zip(KEYS, LENGTHS, strict=True):
        assert scales[key] == exact([0] + [1 / 14] * (length - 1))
    assert records.column(updates, "scales")["a", 0][1] == exact(1 / 20)  # the policy's own stays


def test_advantages_are_shown_on_the_members(algorithm, records):
    row = algorithm()
    groups = stages.choose_members([records.group("a", [1.0, None, 0.0])], row, Metrics())
    updates = columns.write_advantages(
        records.packed([groups]), groups, row, memory.recall(row, None), Metrics()
    )
    (shown,) = columns.show_advantages(groups, updates)
    right, lost, wrong = (t.advantages for t in shown.trajectories)
    assert lost is None and right is not None and wrong is not None
    assert right.tolist() == exact([2**-0.5] * 2, 1e-5)
    assert wrong.tolist() == exact([-(2**-0.5)] * 2, 1e-5)


def test_scores_go_to_the_forest_they_came_from(records):
    groups = [records.group(str(i), [0.0, 1.0]) for i in range(4)]
    updates = records.packed(stages.split_updates(groups, 2, seed=0), micro_tokens=8)
    flat = [batch for batches in updates for batch in batches]
    scored = [
        (np.full(len(b.reads), i, np.float32), np.zeros(len(b.reads))) for i, b in enumerate(flat)
    ]
    written = columns.with_scores(updates, ("old_logprobs",), scored)
    assert [len(batches) for batches in written] == [len(batches) for batches in updates]
    found = columns.old_logprobs([batch for batches in written for batch in batches])
    seen = [set(values.tolist()) for values in found]
    assert seen == [{float(i)} for i in range(len(flat))]
    assert all(b.old_entropies is None for batches in written for b in batches)
