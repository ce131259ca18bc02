"""Intervals and pass@k against known numbers."""

import numpy as np
from pytest import approx

from saccade.plugins.reports.comparison import independent_difference, maj_at_k, paired_difference
from saccade.run.statistics import bootstrap_mean, mean_interval, pass_at_k, wilson


def test_wilson_matches_the_textbook():
    assert wilson(8, 10) == approx((0.490162, 0.943318), abs=1e-6)
    assert wilson(81, 263) == approx((0.2553, 0.3662), abs=5e-5)  # Newcombe 1998, table I
    assert wilson(20, 20).high == 1.0 and wilson(0, 0) == (0.0, 1.0)


def test_bootstrap_agrees_with_the_normal_interval_and_repeats():
    values = np.random.default_rng(3).normal(size=2000)
    half = 1.96 * values.std(ddof=1) / 2000**0.5
    low, high = bootstrap_mean(values)
    assert low == approx(values.mean() - half, abs=0.004)
    assert high == approx(values.mean() + half, abs=0.004)
    assert bootstrap_mean(values, seed=0) == (low, high)
    assert bootstrap_mean(values, seed=1) != (low, high)


def test_mean_interval_chooses_by_what_it_is_given():
    assert mean_interval([1.0, 0.0, 1.0, 1.0]) == wilson(3, 4)
    assert mean_interval([[1.0, 0.0], [1.0, 1.0]]) == bootstrap_mean([0.5, 1.0])


def test_items_that_are_all_alike_are_not_certain():
    """However many answers each of them got: it is the items that are few."""
    assert mean_interval([[0.0] * 8] * 4) == wilson(0, 4)
    low, high = mean_interval([[1.0, 0.0]] * 4)
    assert 0.0 < low < 0.5 < high < 1.0
    assert mean_interval([[1.0, 0.0]] * 400).low == approx(0.5, abs=0.01)
    assert mean_interval([3.0] * 4) == (3.0, 3.0)  # no share, so nothing bounds the others


def test_pass_at_k_golden_values():
    assert pass_at_k(16, 3, 4) == approx(0.60714286, abs=1e-8)
    assert pass_at_k(16, 3, 1) == 3 / 16
    assert (pass_at_k(4, 1, 4), pass_at_k(8, 1, 4), pass_at_k(16, 0, 4)) == (1.0, 0.5, 0.0)


def test_the_difference_of_two_proportions():
    # Newcombe 1998, table II: 56/70 against 48/80.
    change = independent_difference(48 / 80, wilson(48, 80), 56 / 70, wilson(56, 70))
    assert change == approx((0.2, 0.0524, 0.3339), abs=5e-5)


def test_a_change_that_is_the_same_everywhere_is_not_certain():
    few = wilson(0, 4).high
    assert paired_difference([0.0] * 4, [0.0] * 4) == approx((0.0, -few, few))
    assert paired_difference([0.0] * 4, [1.0] * 4) == approx((1.0, 1.0 - 2 * few, 1.0))


def test_majority_ignores_silence_and_shares_ties():
    assert maj_at_k([["4", "5", "4", None]], [[1.0, 0.0, 1.0, 0.0]]) == 1.0
    assert maj_at_k([["4", "5"]], [[1.0, 0.0]]) == 0.5
    assert maj_at_k([[None, None]], [[0.0, 0.0]]) == 0.0
    assert maj_at_k([["a", "a", "b"], ["b", "b", "a"]], [[1, 1, 0], [0, 0, 1]]) == 0.5
