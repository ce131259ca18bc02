"""What an algorithm remembers from one step to the next."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.algorithms.algorithm_state import AlgorithmState, Moments, after_step, merge, observe, restore, to_json
from saccade.plugins.more_algorithms import more_advantages as domains
from saccade.plugins.more_algorithms.more_advantages import success
from saccade.types import Metrics

FINITE, NONE = st.floats(-100, 100), [0.0] * 9


def measured(**values: float) -> Metrics:
    metrics = Metrics()
    metrics.add("policy/live_sequences", values.pop("sequences", 100))
    for name, value in values.items():
        metrics.add(f"policy/{name}", value)
    return metrics


def test_json_round_trip_is_exact(algorithm):
    third = 1 / 3
    memory = AlgorithmState(
        kl_coef=0.1 + 0.2, entropy_coef=third,
        moments={"": Moments(count=3, mean=third, squares=0.1), "acc": Moments()},
        domains={"ct": {"counts": [third] * 10, "sums": [0.1 + 0.2] * 10}},
    )  # fmt: skip
    text = json.dumps(to_json(memory))
    row = algorithm("kl.controller=adaptive", "entropy_target=0.2")
    assert restore(row, json.loads(text)) == memory
    assert json.dumps(to_json(restore(row, json.loads(text)))) == text
    # What the config fixes is the config's, whatever an earlier run had.
    fixed = restore(algorithm("kl.coef=0.07"), json.loads(text))
    assert (fixed.kl_coef, fixed.entropy_coef) == (0.07, 0)
    assert fixed.moments == memory.moments and fixed.domains == memory.domains


def test_the_kl_coefficient_moves_only_where_it_is_adaptive(algorithm):
    metrics = measured(kl_controlled=0.5)
    for place in ("loss", "reward"):
        row = algorithm("kl.controller=adaptive", f"kl.place={place}")
        memory = after_step(restore(row, None), row, metrics)
        assert memory.kl_coef == pytest.approx(0.04 * (1 + 0.2 * 100 / 10_000), abs=1e-15)
    row = algorithm("kl.controller=adaptive", "kl.target=0.4", "kl.horizon=1000")
    memory = after_step(restore(row, None), row, measured(kl_controlled=0.38, sequences=50))
    assert memory.kl_coef == pytest.approx(0.04 * (1 - 0.05 * 50 / 1000), abs=1e-15)
    row = algorithm()
    assert after_step(restore(row, None), row, metrics) == restore(row, None)


def test_the_entropy_bonus_steps_toward_its_target_within_its_range(algorithm):
    row = algorithm("entropy_target=0.3", "entropy_step=0.01", "entropy_range=[0.005,0.015]")
    memory, found = restore(row, None), []
    for entropy in (0.2, 0.2, 0.3, 0.4, 0.4):
        memory = after_step(memory, row, measured(entropy=entropy))
        found.append(memory.entropy_coef)
    assert found == pytest.approx([0.015, 0.015, 0.015, 0.005, 0.005])  # it starts at 0.005
    fixed = algorithm("entropy_coef=0.01")
    assert after_step(restore(fixed, None), fixed, measured(entropy=9)).entropy_coef == 0.01


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_measurement_that_is_not_finite_moves_nothing(algorithm, value):
    row = algorithm("kl.controller=adaptive", "entropy_target=0.3", "entropy_coef=0.01")
    start = restore(row, None)
    assert after_step(start, row, measured(kl_controlled=value, entropy=value)) == start
    assert after_step(start, row, Metrics()) == start  # a step in which nothing was trained
    # The other one still moves.
    moved = after_step(start, row, measured(kl_controlled=value, entropy=0.2))
    assert moved.kl_coef == start.kl_coef and moved.entropy_coef == pytest.approx(0.011)


def test_every_scored_group_is_observed_in_the_order_of_uids(algorithm, records):
    row = algorithm("preset=drpo", "args.reward_range=[0,2]", "exclude_status=[overturn]")
    rare = records.group("b", [0.1, 0.2], extra={"domain": "ct"})
    cut = records.changed(records.group("c", [2.0, 0.3], extra={"domain": "ct"}), status=["overturn", "ok"])
    groups = [
        cut,
        rare,
        records.group("a", [0.7, 0.7], extra={"domain": "ct"}),  # constant: filtered, yet observed
        records.group("d", [None, None], extra={"domain": "ct"}),
        records.group("e", [2.0, 2.0]),
    ]
    start = restore(row, None)
    memory = observe(start, groups, row)
    assert start.domains == {}
    assert set(memory.domains) == {"ct", "default"}
    ct = memory.domains["ct"]
    assert ct["counts"] == [1, 1, 0, 1, 0, 0, 0, 0, 0, 0]
    # 0.35 of a, 0.075 of b, 0.15 of c
    assert ct["sums"] == pytest.approx([0.075, 0.15, 0, 0.35, 0, 0, 0, 0, 0, 0])
    assert memory.domains["default"]["counts"][9] == 1
    orders = [groups[::-1], groups[2:] + groups[:2]]
    assert all(observe(start, order, row) == memory for order in orders)


# -- moments of rewards ----------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(FINITE, max_size=6), max_size=5))
def test_merged_steps_are_one_step(steps):
    moments = Moments()
    for step in steps:
        moments = merge(moments, step)
    everything = [value for step in steps for value in step]
    whole = merge(Moments(), everything)
    assert moments.count == whole.count == len(everything)
    assert moments.mean == pytest.approx(whole.mean, abs=1e-9)
    assert moments.squares == pytest.approx(whole.squares, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("seen", [[], [3.0], [3.0, 3.0], [0.3, 0.1 + 0.2]])
def test_what_has_not_differed_divides_by_one(seen):
    moments = merge(Moments(), seen)
    assert moments.divisor == 1
    assert moments.scaled(2.0, "std") == 2 and moments.scaled(2.0, "mean_std") == 2 - moments.mean


def test_the_mean_of_a_domain_favours_rare_bins():
    found = domains.noted({}, [("a", 0.15), ("a", 0.15), ("a", 0.85)])
    mean = (0.15 / 2 + 0.85 / 1) / (1 / 2 + 1 / 1)
    assert domains.weight(found, "a", 0.85) == pytest.approx(1 / (3**0.5 * mean * 0.85))
    assert domains.weight(found, "a", 0.15) == pytest.approx(1 / (3**0.5 * mean * 2**0.5 * 0.15))
    always_fails = domains.noted({}, [("a", 0.0)])
    assert domains.weight(always_fails, "a", 0.0) == pytest.approx(1 / (0.05 * 0.05))


def test_old_groups_fade_before_new_ones_are_added():
    old = {"a": {"counts": [8.0, *NONE], "sums": [0.4, *NONE]}, "b": {"counts": [0.0, *NONE], "sums": [0.0, *NONE]}}
    new = domains.noted(old, [("a", 0.5)] * 5000)
    assert new["a"]["counts"][0] == 4 and new["a"]["sums"][0] == 0.2
    assert new["a"]["counts"][5] == 5000
    assert new["b"] is old["b"]
    assert old["a"]["counts"][0] == 8


def test_outcomes_outside_the_declared_range_are_refused():
    assert success([-1, 1], (-1, 1)) == 0.5
    assert success([1.0000000002], (0, 1)) == 1
    with pytest.raises(ValueError, match=r"reward_range=\[0, 1\].*\[0, 2\.0\]"):
        success([2.0, 0.0], (0, 1))
