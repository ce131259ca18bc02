"""Answers that people would call right or wrong, and what the verifiers call them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.verifiers import VERIFIERS

ROWS = [json.loads(line) for line in Path(__file__).with_name("golden_answers.jsonl").read_text("utf-8").splitlines()]


def right(row: dict[str, Any]) -> bool:
    sample = RewardSample(id="a", response=row["response"], answer=row["gold"], choices=row.get("choices", ()))
    score = VERIFIERS[row["verifier"]].function(sample, **row.get("args", {}))
    outcome = score.parts.get("accuracy", score.value)  # without what the shape earns
    assert score.kind != "error", row
    return score.kind == "value" and outcome == 1


def test_right_answers_pass_and_no_other() -> None:
    assert [row for row in ROWS if right(row) != row["right"]] == []


def test_the_file_asks_both_questions() -> None:
    shares = [row["right"] for row in ROWS]
    assert len(shares) >= 300 and 0.4 < sum(shares) / len(shares) < 0.6
    for verifier in {row["verifier"] for row in ROWS}:
        assert {row["right"] for row in ROWS if row["verifier"] == verifier} == {True, False}
    assert {"math", "choice", "number", "count", "verdict"} <= {row["verifier"] for row in ROWS}
