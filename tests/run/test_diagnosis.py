"""Each way to learn little has its line, as soon as enough responses show it."""

import pytest

from saccade.plugins.reports.diagnosis import ENOUGH, WINDOW, diagnose, unread_answers

GOOD = {
    "reward/accuracy": 0.4,
    "reward/format": 0.9,
    "reward/error_rate": 0.0,
    "group/dead_frac": 0.5,
    "group/all_wrong_frac": 0.3,
    "group/all_right_frac": 0.2,
    "group/live_frac": 0.5,
    "group/side_signal_frac": 0.1,
    "length/truncated_frac": 0.1,
    "length/parse_rate": 0.9,
    "policy/lr": 1e-6,
    "policy/grad_norm": 0.7,
    "policy/update_skipped": 0.0,
}
DEAD = {"group/dead_frac": 1.0}


@pytest.mark.parametrize(
    "changes, words",
    [
        (DEAD | {"group/all_wrong_frac": 1.0}, "in all of the groups every response is wrong"),
        (DEAD | {"group/all_right_frac": 1.0}, "in all of the groups every response is right"),
        (DEAD, "in all of the groups all members have the same reward"),
        (DEAD | {"length/truncated_frac": 1.0, "reward/format": 0.0}, "rollout.max_tokens"),
        (DEAD | {"reward/format": 0.0, "group/all_wrong_frac": 1.0}, "miss the format"),
        (DEAD | {"length/parse_rate": 0.0, "group/all_wrong_frac": 1.0}, "no answer that can be read"),
        (DEAD | {"reward/error_rate": 1.0}, "all of the rewards failed"),
        (DEAD | {"reward/abstain_rate": 1.0}, "judges none of the responses"),
        (DEAD | {"turns/overturn_frac": 1.0}, "env.max_turns"),
        (DEAD | {"turns/void_frac": 1.0}, "without an answer"),
        (DEAD | {"policy/empty_step": 1.0, "group/all_wrong_frac": 1.0}, "every response is wrong"),
        ({"policy/empty_step": 1.0}, "no group is left to train on"),
        ({"policy/lr": 0.0}, "the learning rate is 0"),
        ({"policy/update_skipped": 1.0}, "all of the updates are skipped"),
        ({"policy/grad_norm": 0.0}, "the gradient is 0"),
    ],
)
def test_every_cause_is_named_with_what_to_do(changes, words):
    [line] = diagnose([GOOD] * 10 + [GOOD | changes] * WINDOW).values()
    assert line.startswith("nothing is learned: ")
    assert words in line and "\n" not in line and ";" in line


def test_nearly_all_is_enough():
    wrong = {"group/dead_frac": 0.996, "group/all_wrong_frac": 0.996, "count/samples": ENOUGH}
    [line] = diagnose([GOOD | wrong]).values()
    assert line.startswith("little is learned: ") and "in 99.6% of the groups every response is wrong" in line


def test_what_is_read_in_half_of_the_responses_is_said_while_others_teach():
    row = GOOD | {"length/parse_rate": 0.5, "count/samples": ENOUGH}
    [line] = diagnose([row], " (math looks in boxed)").values()
    assert line.startswith("50% of the responses have no answer that can be read (math looks in")
    assert unread_answers(0.5, " (here)") in line.replace(" (math looks in boxed)", " (here)")
    assert unread_answers(0.51, "") is None and diagnose([row | {"length/parse_rate": 0.51}]) == {}


def test_what_a_group_costs_and_what_it_learns_from_are_said_beside_a_cause():
    costly = {"group/live_frac": 0.004, "group/rollouts_per_live": 2048.0}
    lines = diagnose([GOOD | costly | {"group/side_signal_frac": 0.75, "count/samples": ENOUGH}])
    assert "0.4% of the sampled groups" in lines["group/live_frac"]
    assert "costs 2,048 rollouts; use data of medium difficulty" in lines["group/live_frac"]
    assert "in 75% of the groups that teach anything" in lines["group/side_signal_frac"]


def test_corrections_that_leave_little_of_what_was_sampled_are_said():
    old = {"mismatch/ess": 0.45, "data/staleness_max": 4.0, "count/samples": ENOUGH}
    (line,) = diagnose([GOOD | old]).values()
    assert line.startswith("corrections leave 45% of") and "up to 4 steps old; lower rollout.ahead" in line
    assert diagnose([GOOD | old | {"mismatch/ess": 0.6}]) == {}


def test_a_healthy_run_is_silent_and_few_responses_wait_for_more_steps():
    assert diagnose([GOOD | {"count/samples": 1000}] * 20) == {} == diagnose([])
    few = GOOD | DEAD | {"count/samples": ENOUGH // 2 - 1}
    assert diagnose([few] * 2) == {}
    assert len(diagnose([few] * 3)) == 1
    assert diagnose([GOOD | {"policy/lr": 0.0, "count/samples": ENOUGH}]) == {}  # as warm-up is


def test_without_comparison_in_groups_the_rewards_of_the_step_must_differ():
    alone = {k: v for k, v in GOOD.items() if k != "group/dead_frac"} | {"group/all_right_frac": 1}
    assert diagnose([alone | {"reward/std": 0.2}] * WINDOW) == {}
    assert "every response is right" in str(diagnose([alone | {"reward/std": 0.0}] * WINDOW))
