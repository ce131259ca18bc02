"""How sure an evaluation of a reward model is of its accuracy."""

from __future__ import annotations

from math import nan
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from saccade.plugins.reward_models.reward_evaluation import intervals
from saccade.plugins.reward_models.reward_forward import RatingLoss, StepsLoss
from saccade.plugins.reward_models.reward_losses import Rating, Steps
from saccade.run.statistics import mean_interval, wilson


def batch(*ids: str, sides: int = 1) -> Any:
    return SimpleNamespace(keys=[(uid, side) for uid in ids for side in range(sides)])


def test_each_head_has_the_interval_of_its_decided_pairs() -> None:
    labels = {"a": (1.0, nan), "b": (-1.0, 1.0), "c": (0.0, 1.0), "d": (1.0, 1.0)}
    batches = [batch("a", "b", sides=2), batch("c", "d", sides=2)]
    first = np.array([[2, 0], [1, 0], [2, 0], [1, 3]], np.float32)  # a: 2 > 1, b: 2 > 1, 0 < 3
    second = np.array([[1, 1], [1, 0], [1, 2], [0, 3]], np.float32)  # c: tied label, d: 1 > 0
    outputs = [first, second]
    loss = RatingLoss(Rating(loss="bt", heads={"x": 1.0, "y": 1.0}, labels=labels))
    found = intervals(loss, batches, outputs)
    assert (found["x/ci_low"], found["x/ci_high"]) == wilson(2, 3)  # b is judged the other way
    assert (found["y/ci_low"], found["y/ci_high"]) == wilson(1, 3)
    assert len(found) == 4
    alone = Rating(loss="bt", heads={"x": 1.0}, labels={k: v[:1] for k, v in labels.items()})
    found = intervals(RatingLoss(alone), batches, [scores[:, :1] for scores in outputs])
    assert (found["ci_low"], found["ci_high"]) == wilson(2, 3)


def test_rows_of_steps_are_drawn_as_a_whole() -> None:
    good, bad = [1.0, 0.0], [0.0, 1.0]
    labels = {"a": np.array([good, good]), "b": np.array([good, bad]), "c": np.array([bad, bad])}
    outputs = [np.array([good, good, good, good]), np.array([bad, good])]
    loss = StepsLoss(Steps(labels=labels, count=6), tokens=())
    found = intervals(loss, [batch("a", "b"), batch("c")], outputs)
    assert tuple(found.values()) == pytest.approx(mean_interval([1.0, 0.5, 0.5]))
    labels["c"] = np.array([bad, bad, bad, bad])  # all right: a longer row weighs more
    outputs[1] = np.array([bad] * 4)
    found = intervals(loss, [batch("a", "b"), batch("c")], outputs)
    assert found["ci_low"] < 7 / 8 < found["ci_high"] <= 1
