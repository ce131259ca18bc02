from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.algorithms.algorithm_state import Moments, merge, normalise

FINITE = st.floats(-100, 100)


def test_one_step():
    moments = merge(Moments(), [1.0, 0.0, 0.5, 2.0])
    assert (moments.count, moments.mean) == (4, 0.875)
    assert moments.divisor == pytest.approx(np.std([1, 0, 0.5, 2], ddof=1), abs=1e-12)
    scaled = normalise([1.0, 0.0], moments, "std")
    assert scaled.tolist() == pytest.approx([1.1710801, 0], abs=1e-7)
    shifted = normalise([1.0, 0.0], moments, "mean_std")
    assert shifted.tolist() == pytest.approx([0.1463850, -1.0246951], abs=1e-7)


@settings(max_examples=50, deadline=None)
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
    assert normalise([2.0], moments, "std").tolist() == [2.0]
    assert normalise([2.0], moments, "mean_std").tolist() == [2.0 - moments.mean]


def test_json_round_trip_is_exact():
    moments = merge(merge(Moments(), [0.1, 0.7, 1 / 3]), [2.0, -1.0])
    assert Moments(**json.loads(json.dumps(asdict(moments)))) == moments


def test_a_reward_that_is_not_finite_is_our_mistake():
    with pytest.raises(AssertionError, match="finite"):
        merge(Moments(), [1.0, float("nan")])
