from __future__ import annotations

from dataclasses import replace

import pytest

from saccade.algorithms.algorithm_state import after_step, next_kl_coef, restore
from saccade.types import Metrics


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
def test_the_entropy_coefficient_steps_toward_the_target(algorithm, coef, measured, expected):
    row, metrics = algorithm("entropy_target=0.3", "entropy_range=[0,0.02]"), Metrics()
    metrics.add("policy/entropy", measured)
    found = after_step(replace(restore(row, None), entropy_coef=coef), row, metrics).entropy_coef
    assert found == pytest.approx(expected, abs=1e-12)
