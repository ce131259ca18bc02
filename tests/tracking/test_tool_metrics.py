"""What tools were used for, counted."""

import numpy as np
import pytest

from saccade.tracking.metrics import tool_metrics
from saccade.types import Trajectory


def episode(outcome, *calls, listed=True) -> Trajectory:
    return Trajectory(
        sample_id="a",
        repeat=0,
        ids=np.arange(3),
        sources=np.array([0, 1, 1], np.int8),
        logprobs=np.zeros(3, np.float32),
        versions=np.zeros(3, np.int32),
        outcome=outcome,
        info={"tool_calls": list(calls)} if listed else {},
    )


def crop(area: float) -> dict:
    return {"ok": True, "reason": "", "area": area, "noop": area > 0.95}


def failed(reason: str) -> dict:
    return {"ok": False, "reason": reason}


def test_calls_crops_and_cells():
    metrics = tool_metrics(
        [
            episode(1.0, crop(0.2), crop(1.0), failed("box")),
            episode(0.0, failed("json")),
            episode(1.0),
            episode(0.0),
            episode(None, crop(0.6)),
            episode(1.0, listed=False),  # has no tools
        ]
    )
    assert metrics == {
        "tool/calls_per_sample": 1.0,
        "tool/success_frac": 0.6,
        "tool/invalid/box": 0.2,
        "tool/invalid/json": 0.2,
        "tool/noop_rate": pytest.approx(1 / 3),
        "tool/crop_area_mean": pytest.approx(0.6),
        "tool/acc_with_call": 0.5,
        "tool/acc_without_call": 0.5,
        "tool/right_call": 0.25,
        "tool/wrong_call": 0.25,
        "tool/right_no_call": 0.25,
        "tool/wrong_no_call": 0.25,
    }


def test_without_tools_there_are_none():
    assert tool_metrics([episode(1.0, listed=False)]) == {}
    assert tool_metrics([episode(None)]) == {"tool/calls_per_sample": 0.0}
