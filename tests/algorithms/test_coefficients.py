from __future__ import annotations

import pytest

from saccade.algorithms.algorithm_state import next_entropy_coef, next_kl_coef


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (0.1, 0.04),  # at the target
        (0.11, 0.04 * (1 + 0.1 * 512 / 10000)),
        (0.5, 0.04 * (1 + 0.2 * 512 / 10000)),  # the error is clipped
        (0.0, 0.04 * (1 - 0.2 * 512 / 10000)),
        (-0.3, 0.04 * (1 - 0.2 * 512 / 10000)),
    ],
)
def test_the_kl_coefficient_follows_the_kl(measured, expected):
    found = next_kl_coef(0.04, measured=measured, sequences=512, target=0.1, horizon=10_000)
    assert found == pytest.approx(expected, abs=1e-12)


def test_a_step_without_sequences_measures_nothing():
    nan = float("nan")
    assert next_kl_coef(0.04, measured=nan, sequences=0, target=0.1, horizon=10_000) == 0.04


def test_a_horizon_that_could_turn_the_sign_is_refused():
    with pytest.raises(ValueError, match=r"kl.horizon=100 .* write 5120 or more"):
        next_kl_coef(0.04, measured=0.1, sequences=512, target=0.1, horizon=100)


@pytest.mark.parametrize(
    ("coef", "measured", "expected"),
    [
        (0.01, 0.2, 0.011),  # below the target: more bonus
        (0.01, 0.4, 0.009),
        (0.01, 0.3, 0.01),
        (0.0, 0.4, 0.0),
        (0.02, 0.2, 0.02),
        (0.0195, 0.2, 0.02),
    ],
)
def test_the_entropy_coefficient_steps_toward_the_target(coef, measured, expected):
    found = next_entropy_coef(coef, measured=measured, target=0.3, step=0.001, low=0.0, high=0.02)
    assert found == pytest.approx(expected, abs=1e-12)
