"""Each way to learn nothing has its line; anything that moves keeps it silent."""

from __future__ import annotations

import pytest

from saccade.tracking.diagnosis import WINDOW, diagnose

GOOD = {
    "reward/accuracy": 0.4,
    "reward/format": 0.9,
    "reward/error_rate": 0.0,
    "group/dead_frac": 0.5,
    "group/all_wrong_frac": 0.3,
    "group/all_right_frac": 0.2,
    "length/truncated_frac": 0.1,
    "policy/lr": 1e-6,
    "policy/grad_norm": 0.7,
    "policy/update_skipped": 0.0,
}
DEAD = {"group/dead_frac": 1.0}


@pytest.mark.parametrize(
    "changes, words",
    [
        (DEAD | {"group/all_wrong_frac": 1.0}, "every response is wrong"),
        (DEAD | {"group/all_right_frac": 1.0}, "every response is right"),
        (DEAD, "all groups are dead"),
        (DEAD | {"length/truncated_frac": 1.0, "reward/format": 0.0}, "rollout.max_tokens"),
        (DEAD | {"reward/format": 0.0, "group/all_wrong_frac": 1.0}, "no response has the format"),
        (DEAD | {"reward/error_rate": 1.0}, "every reward failed"),
        (DEAD | {"turns/overturn_frac": 1.0}, "env.max_turns"),
        (DEAD | {"turns/void_frac": 1.0}, "without an answer"),
        (DEAD | {"reward/abstain_rate": 1.0}, "judges no response"),
        (DEAD | {"policy/empty_step": 1.0, "group/all_wrong_frac": 1.0}, "every response is wrong"),
        ({"policy/empty_step": 1.0}, "no group is left to train on"),
        ({"policy/lr": 0.0}, "the learning rate is 0"),
        ({"policy/update_skipped": 1.0}, "every update is skipped"),
        ({"policy/grad_norm": 0.0}, "the gradient is 0"),
    ],
)
def test_every_cause_is_named_with_what_to_do(changes: dict[str, float], words: str) -> None:
    line = diagnose([GOOD] * 10 + [GOOD | changes] * WINDOW)
    assert line is not None and line.startswith("nothing is learned: ")
    assert words in line and "\n" not in line and ";" in line


def test_a_healthy_run_is_silent() -> None:
    assert diagnose([GOOD] * 20) is None
    assert diagnose([]) is None


def test_one_live_step_in_the_window_is_enough() -> None:
    dead = GOOD | DEAD
    assert diagnose([dead] * (WINDOW - 1)) is None
    assert diagnose([dead] * 9 + [GOOD] + [dead] * (WINDOW - 1)) is None
    assert diagnose([dead] * 9 + [GOOD] + [dead] * WINDOW) is not None


def test_cut_answers_that_still_differ_in_reward_teach() -> None:
    assert diagnose([GOOD | {"length/truncated_frac": 1.0}] * WINDOW) is None


def test_validation_rows_and_nulls_do_not_confuse() -> None:
    rows = [GOOD | DEAD, {"val/six/accuracy": 0.5}] * WINDOW
    assert diagnose(rows) is not None
    assert diagnose([GOOD | {"policy/grad_norm": None}] * WINDOW) is None


def test_without_comparison_in_groups_the_rewards_of_the_step_must_differ() -> None:
    alone = {k: v for k, v in GOOD.items() if k != "group/dead_frac"} | {"group/all_right_frac": 1}
    assert diagnose([alone | {"reward/std": 0.2}] * WINDOW) is None
    assert "every response is right" in str(diagnose([alone | {"reward/std": 0.0}] * WINDOW))
