"""Numbers of scored groups that can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from saccade.recipes.accuracy import by_category, by_limit, by_turns, group_accuracy
from saccade.types import Group, Message, Sample, Source, Trajectory


def group(id: str, outcomes: Sequence[float | None], turns: int = 1, **extra: Any) -> Group:
    sample = Sample(id=id, messages=(Message(role="user", parts=("?",)),), extra=extra)
    members = tuple(
        Trajectory(
            sample_id=id,
            repeat=n,
            ids=np.zeros(1, np.int64),
            sources=np.full(1, Source.POLICY, np.int8),
            logprobs=np.zeros(1, np.float32),
            versions=np.zeros(1, np.int32),
            outcome=outcome,
            status="ok" if outcome is not None else "error",
            turns=turns,
            end_reason="max_turns" if turns == 4 else "answered",
        )
        for n, outcome in enumerate(outcomes)
    )
    return Group(sample=sample, trajectories=members, uid=id)


def test_rotations_of_a_question_count_together() -> None:
    """Sample by sample: the first of "a" is right in both orders, the second in one of them."""
    rows = [group("a0", [1, 1]), group("a1", [1, 0]), group("b0", [0, 1]), group("b1", [0, 1])]
    plain = group_accuracy(rows)
    turned = group_accuracy(
        [group(g.uid, [t.outcome for t in g.trajectories], rotation_of=g.uid[0]) for g in rows]
    )
    assert plain["accuracy"] == turned["accuracy"] == 5 / 8 and "all_rotations" not in plain
    assert turned["all_rotations"] == 0.5
    assert turned["items"] == 4 and turned["avg@2"] == 5 / 8 and turned["pass@2"] == 1
    assert (turned["ci_low"], turned["ci_high"]) == (0.5, 0.75)  # two questions, not four
    assert plain["ci_high"] > 0.75


def test_categories_turns_and_limits() -> None:
    groups = [
        group("a", [1, 0], turns=2, category="single"),
        group("b", [1, None], turns=4, category="cross"),
        group("c", [0, 0], turns=2, category=None),
    ]
    found = by_category(groups)
    assert {name: row["accuracy"] for name, row in found.items()} == {"cross": 1, "single": 0.5}
    used = by_turns(groups)
    assert used["2"] == {"episodes": 4, "accuracy": 0.25}
    assert used["4"] == {"episodes": 1, "accuracy": 1}
    rows = by_limit({4: groups, 2: groups[:1]})
    assert list(rows) == ["2", "4"] and rows["2"]["overturn_frac"] == 0
    assert rows["4"]["overturn_frac"] == pytest.approx(1 / 3)
    assert rows["4"]["turns_mean"] == pytest.approx(16 / 6)
