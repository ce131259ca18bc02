"""Seconds are counted once, whatever is nested in what."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pytest import approx

from saccade.run.clock import PhaseClock


@pytest.fixture
def seconds() -> list[float]:
    """The time, to be changed."""
    return [0.0]


@pytest.fixture
def clock(seconds: list[float]) -> Iterator[PhaseClock]:
    made = PhaseClock(lambda: seconds[0])
    yield made
    assert made.current is None


def test_a_nested_phase_pauses_the_outer_one(clock: PhaseClock, seconds: list[float]) -> None:
    with clock.phase("rollout"):
        seconds[0] += 3
        with clock.phase("reward_wait"):
            assert clock.current == "reward_wait"
            seconds[0] += 1
    with clock.phase("rollout"):  # the same phase twice adds up
        seconds[0] += 2
    seconds[0] += 4
    assert clock.lap() == {
        **{"time/step": 10.0, "time/rollout": 5.0, "time/reward_wait": 1.0, "time/other": 4.0},
        **{"time/share/rollout": 0.5, "time/share/reward_wait": 0.1, "time/share/other": 0.4},
        "time/bottleneck": "rollout",
    }
    with clock.phase("rollout"):
        seconds[0] += 1
    seconds[0] += 3
    assert clock.lap()["time/bottleneck"] == "other"


def test_each_lap_starts_from_zero_and_splits_an_open_phase(clock: PhaseClock, seconds: list[float]) -> None:
    with clock.phase("save"):
        seconds[0] += 2
        assert clock.lap()["time/save"] == 2
        seconds[0] += 3
    lap = clock.lap()
    assert lap.pop("time/bottleneck") == "save"
    times = {"time/step": 3, "time/save": 3, "time/other": 0}
    assert lap == approx(times | {"time/share/save": 1, "time/share/other": 0})
    assert clock.lap() == {"time/step": 0.0, "time/other": 0.0}


def test_an_error_inside_a_phase_closes_it(clock: PhaseClock) -> None:
    with pytest.raises(KeyError), clock.phase("rollout"):
        raise KeyError
