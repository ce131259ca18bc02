from __future__ import annotations

import pytest

from saccade.algorithms.filters import (
    discard_reason,
    in_baseline,
    is_constant,
    is_excluded,
    keep_group,
    overlong_penalty,
)


@pytest.mark.parametrize(
    ("length", "penalty"),
    [
        (16000, 0),
        (16384, 0),
        (16385, -0.00024414),
        (18432, -0.5),
        (20480, -1),
        (30000, -1),
    ],
)
def test_overlong_penalty(length, penalty):
    found = overlong_penalty(length, max_tokens=20480, buffer=4096, factor=1.0)
    assert found == pytest.approx(penalty, abs=1e-7)
    halved = overlong_penalty(length, max_tokens=20480, buffer=4096, factor=0.5)
    assert halved == pytest.approx(penalty / 2, abs=1e-7)


def test_no_buffer_means_no_penalty():
    assert overlong_penalty(30000, max_tokens=20480, buffer=0) == 0


def test_constant_is_a_matter_of_range():
    assert is_constant([0.3, 0.1 + 0.2])
    assert is_constant([1e9, 1e9 + 1])
    assert not is_constant([0.0, 1e-6])


@pytest.mark.parametrize(
    ("outcomes", "reason"),
    [
        ([], "empty"),
        ([1.0], "constant"),
        ([0.5, 0.5, 0.5], "constant"),
        ([0.0] * 199 + [1.0], "low"),
        ([1.0] * 199 + [0.0], "high"),
        ([1.0, 0.0, 0.0], None),
    ],
)
def test_dynamic_sampling_keeps_groups_that_differ(outcomes, reason):
    assert discard_reason(outcomes) == reason
    assert keep_group(outcomes) == (reason is None)


def test_limits_are_open():
    assert not keep_group([0.0, 0.5], low=0.25, high=0.99)
    assert keep_group([0.0, 0.5], low=0.24, high=0.26)


def test_who_is_excluded():
    for status in ("error", "abstain", "aborted", "stale"):
        assert is_excluded(status) and not in_baseline(status, ("void",), True)
    assert not is_excluded("truncated") and is_excluded("truncated", ("truncated",))
    assert in_baseline("overturn", ("overturn",), True)
    assert not in_baseline("overturn", ("overturn",), False)
    assert in_baseline("ok", ("overturn",), False)
