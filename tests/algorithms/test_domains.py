from __future__ import annotations

import pytest

from saccade.algorithms.algorithm_state import success
from saccade.plugins.more_algorithms.domains import observe, weight

NONE = [0.0] * 9


def test_a_fresh_state():
    """Two groups with mean rewards 0.5 and 1.25 of a range from 0 to 2."""
    first, second = success([1, 0], (0, 2)), success([0.5, 2], (0, 2))
    assert (first, second) == (0.25, 0.625)
    domains = observe({}, [("xray", first), ("ct", second)])
    weights = weight(domains, "xray", first), weight(domains, "ct", second)
    assert weights == (16.0, 2.56)
    mean = sum(weights) / 2
    assert [w / mean for w in weights] == pytest.approx([1.7241379, 0.2758621], abs=1e-7)


def test_equal_groups_of_one_domain_weigh_the_same():
    domains = observe({}, [("default", 0.5)] * 3)
    # sqrt(3) groups in the domain and in the bin, each with success 0.5
    assert weight(domains, "default", 0.5) == pytest.approx(1 / (3 * 0.25))


def test_bins_are_equal_and_the_last_is_closed():
    domains = observe({}, [("a", y) for y in (0.0, 0.0999, 0.1, 0.95, 1.0)])
    assert domains["a"]["counts"] == [2, 1, 0, 0, 0, 0, 0, 0, 0, 2]
    assert domains["a"]["sums"][9] == pytest.approx(1.95)


def test_the_mean_of_a_domain_favours_rare_bins():
    domains = observe({}, [("a", 0.15), ("a", 0.15), ("a", 0.85)])
    mean = (0.15 / 2 + 0.85 / 1) / (1 / 2 + 1 / 1)
    assert weight(domains, "a", 0.85) == pytest.approx(1 / (3**0.5 * mean * 0.85))
    assert weight(domains, "a", 0.15) == pytest.approx(1 / (3**0.5 * mean * 2**0.5 * 0.15))


def test_a_domain_that_always_fails_weighs_finitely():
    domains = observe({}, [("a", 0.0)])
    assert weight(domains, "a", 0.0) == pytest.approx(1 / (0.05 * 0.05))


def test_old_groups_fade_before_new_ones_are_added():
    old = {"a": {"counts": [8.0, *NONE], "sums": [0.4, *NONE]}, "b": {"counts": [0.0, *NONE], "sums": [0.0, *NONE]}}
    new = observe(old, [("a", 0.5)] * 5000)
    assert new["a"]["counts"][0] == 4 and new["a"]["sums"][0] == 0.2
    assert new["a"]["counts"][5] == 5000
    assert new["b"] is old["b"]
    assert old["a"]["counts"][0] == 8


def test_only_the_domains_of_a_step_fade():
    once = observe({}, [("a", 0.5), ("b", 0.5)])
    twice = observe(once, [("a", 0.5)])
    assert twice["a"]["counts"][5] == pytest.approx(1 + 2 ** (-1 / 5000))
    assert twice["b"] == once["b"]
    assert observe(twice, []) == twice


def test_a_bin_fades_to_empty_not_to_overflow():
    faint = {"a": {"counts": [1e-12, *NONE], "sums": [1e-13, *NONE]}}
    domains = observe(faint, [("a", 0.75)])
    assert domains["a"]["counts"][0] == domains["a"]["sums"][0] == 0
    assert weight(domains, "a", 0.75) == pytest.approx(1 / 0.75**2)


def test_outcomes_outside_the_declared_range_are_refused():
    assert success([-1, 1], (-1, 1)) == 0.5
    assert success([1.0000000002], (0, 1)) == 1
    with pytest.raises(ValueError, match=r"reward_range=\[0, 1\].*\[0, 2\.0\]"):
        success([2.0, 0.0], (0, 1))
