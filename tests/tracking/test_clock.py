"""Seconds are counted once, whatever is nested in what."""

from __future__ import annotations

from pytest import approx, raises

from saccade.tracking.clock import PhaseClock


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_nested_phase_pauses_the_outer_one() -> None:
    time = Time()
    clock = PhaseClock(time)
    with clock.phase("rollout"):
        time.now += 3
        with clock.phase("reward_wait"):
            assert clock.current == "reward_wait"
            time.now += 1
        time.now += 2
    time.now += 4
    assert clock.lap() == {
        "time/step": 10.0,
        "time/rollout": 5.0,
        "time/reward_wait": 1.0,
        "time/other": 4.0,
        "time/share/rollout": 0.5,
        "time/share/reward_wait": 0.1,
        "time/share/other": 0.4,
        "time/bottleneck": "rollout",
    }


def test_each_lap_starts_from_zero_and_splits_an_open_phase() -> None:
    time = Time()
    clock = PhaseClock(time)
    with clock.phase("save"):
        time.now += 2
        assert clock.lap()["time/save"] == 2
        time.now += 3
    lap = clock.lap()
    assert lap.pop("time/bottleneck") == "save"
    assert lap == approx(
        {
            "time/step": 3,
            "time/save": 3,
            "time/share/save": 1,
            "time/other": 0,
            "time/share/other": 0,
        }
    )
    assert clock.lap() == {"time/step": 0.0, "time/other": 0.0}


def test_what_is_in_no_phase_may_be_what_takes_longest() -> None:
    time = Time()
    clock = PhaseClock(time)
    with clock.phase("rollout"):
        time.now += 1
    time.now += 3
    lap = clock.lap()
    assert lap["time/bottleneck"] == "other" and lap["time/share/other"] == 0.75


def test_the_same_phase_twice_adds_up() -> None:
    time = Time()
    clock = PhaseClock(time)
    for _ in range(3):
        with clock.phase("update"):
            time.now += 1
    assert clock.lap()["time/update"] == 3


def test_an_error_inside_a_phase_closes_it() -> None:
    clock = PhaseClock(Time())
    with raises(KeyError), clock.phase("rollout"):
        raise KeyError
    assert clock.current is None
