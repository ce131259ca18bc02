"""Each way to learn little has its line, as soon as enough responses show it: in real runs of a step, in metrics."""

import functools
import itertools
import json

import pytest

from saccade.plugins.families.tiny import build
from saccade.plugins.quickstart.quickstart import WORDS
from saccade.plugins.reports.diagnosis import ENOUGH, WINDOW, diagnose, diagnose_answers
from saccade.recipes import rl

NUMBER, BOXED = ({"verifier": "count", "args": {"order": [order]}} for order in ("last_number", "boxed"))
PAIRS = {"train.prompts_per_step": ENOUGH // 2, "train.samples_per_prompt": 2}
RUNS = {  # what differs from the first, which learns
    "eights": {"train.prompts_per_step": ENOUGH // 8, "train.samples_per_prompt": 8, "reward.terms": [NUMBER]},
    "boxed": {"reward.terms": [BOXED]},
    "pairs": PAIRS,
    "format": PAIRS | {"reward.terms": [NUMBER, "format:boxed"]},
    "length": PAIRS | {"reward.terms": [NUMBER, {"verifier": "length", "args": {"target": 6}}]},
    "short": PAIRS | {"rollout.max_tokens": 1},
}
SIDE = "in {side} of the groups that teach anything all answers are equally right or wrong: format, length or another "
SIDE += "side term decides there; lower its weight in reward.terms"
SAID = {
    **{"format": SIDE, "length": SIDE},
    "boxed": "{unread} of the responses have no answer that can be read (count looks in boxed; one of them ends with '",
    "pairs": "only {live} of the sampled groups teach anything: each costs {cost} rollouts; use data of medium "
    "difficulty, raise train.samples_per_prompt",
    "short": "little is learned: {cut} of the responses are cut off; raise rollout.max_tokens",
}


@pytest.fixture(scope="module")
def ran(rl_config, tmp_path_factory):
    """By name of a run: what it said, and what its stored rollouts show. The model boxes some of its numbers."""
    words = [*WORDS, *(rf"\boxed{{{n}}}" for n in range(1, 6))]
    model = build("qwen2_5_vl", tmp_path_factory.mktemp("boxes"), words=words)
    always = {
        "model.path": model,
        "prompt.format": "boxed",
        "run.max_steps": 1,
        "rollout.max_tokens": 64,
        "track.trajectories_groups": ENOUGH,
    }

    @functools.cache
    def run(name, **more):
        out = tmp_path_factory.mktemp(name)
        rl.run(rl_config(out) | always | RUNS["eights"] | RUNS[name] | more)
        found = [json.loads(line) for line in (out / "run" / "trajectories" / "step-1.jsonl").open()]
        groups = [list(members) for _, members in itertools.groupby(found, lambda one: one["group"])]
        differ = {of: [len({one[of] for one in each}) > 1 for each in groups] for of in ("reward", "outcome")}
        live = sum(differ["reward"])
        counted = {
            "unread": sum(one["extracted"] is None for one in found) / len(found),
            "cut": sum(one["end_reason"] == "turn_length" for one in found) / len(found),
            "live": live / len(groups),
            "side": sum(a and not b for a, b in zip(*differ.values(), strict=True)) / live,
        }
        shown = {of: f"{share:.1%}".replace(".0%", "%") for of, share in counted.items()}
        return (out / "run" / "log.txt").read_text(), shown | {"cost": f"{len(found) / live:,.0f}"}

    return run


@pytest.mark.parametrize("name", SAID)
def test_a_run_says_a_share_and_what_changes_it(ran, name):
    log, shown = ran(name)
    assert log.count(SAID[name].format(**shown)) == 1


def test_runs_without_a_cause_are_silent_about_it(ran):
    assert "cut off" not in ran("eights")[0] and "equally right" not in ran("eights")[0]
    assert "equally right" not in ran("pairs")[0] and "cut off" not in ran("pairs")[0]


def test_a_validation_before_training_says_that_answers_are_unread(ran, scenes):
    log, _ = ran("boxed", **{"data.val": str(scenes / "val.jsonl")})
    line = SAID["boxed"].removeprefix("{unread}")
    assert log.count(line) == 1 and log.index(line) < log.index("step 1/1")
    assert "; check prompt.format, the verifier's `order` and rollout.max_tokens" in log


GOOD = {
    **{"reward/accuracy": 0.4, "reward/format": 0.9, "reward/error_rate": 0.0, "group/dead_frac": 0.5},
    **{"group/all_wrong_frac": 0.3, "group/all_right_frac": 0.2, "group/live_frac": 0.5, "group/side_signal_frac": 0.1},
    **{"length/truncated_frac": 0.1, "length/parse_rate": 0.9, "policy/lr": 1e-6, "policy/grad_norm": 0.7},
    "policy/update_skipped": 0.0,
}
DEAD = {"group/dead_frac": 1.0}


@pytest.mark.parametrize(
    "changes, words",
    [
        (DEAD | {"group/all_wrong_frac": 1.0}, "in all of the groups every response is wrong"),
        (DEAD | {"group/all_right_frac": 1.0}, "in all of the groups every response is right"),
        (DEAD, "in all of the groups all members have the same reward"),
        (DEAD | {"reward/format": 0.0, "group/all_wrong_frac": 1.0}, "miss the format"),
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


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"length/truncated_frac": 0.6}, ["60% of the responses are cut off"]),
        ({"length/truncated_frac": 0.49}, []),
        ({"reward/error_rate": 0.5}, ["50% of the rewards failed"]),
        ({"reward/abstain_rate": 0.6}, ["judges 40% of the responses"]),
        ({"reward/format": 0.2}, ["80% of the responses miss the format"]),
        ({"turns/overturn_frac": 0.8}, ["80% of the episodes run out of turns"]),
        ({"policy/update_skipped": 0.5}, ["nothing is learned: 50% of the updates are skipped"]),
        ({"group/all_wrong_frac": 0.6}, ["in 60% of the groups every response is wrong"]),
        # What most responses suffer from explains that groups are dead; half of them do not.
        (
            {"length/truncated_frac": 0.92, "group/all_wrong_frac": 0.95, "group/dead_frac": 0.95},
            ["little is learned: 92%"],
        ),
        (
            {"length/truncated_frac": 0.6, "group/all_wrong_frac": 0.95, "group/dead_frac": 0.95},
            ["little is learned: 60% of the responses are cut off", "in 95% of the groups every response is wrong"],
        ),
        # Responses that are cut off miss the format, too: said once, unless many others miss it.
        ({"length/truncated_frac": 0.7, "reward/format": 0.1}, ["70% of the responses are cut off"]),
        ({"length/truncated_frac": 0.5, "reward/format": 0.1}, ["90% of the responses miss the format"]),
        (
            {"length/truncated_frac": 0.7, "length/parse_rate": 0.1},
            ["70% of the responses are cut off", "90% of the responses have no"],
        ),
        # A penalty for length lets rewards differ; dynamic sampling drops such groups all the same.
        (
            {"group/all_wrong_frac": 1.0, "group/dead_frac": 0.65, "group/kept_frac": 0.0, "policy/empty_step": 1.0},
            ["nothing is learned: in all of the groups every response is wrong"],
        ),
    ],
)
def test_causes_are_graded_and_the_largest_is_said(changes, words):
    lines = list(diagnose([GOOD | changes] * WINDOW).values())
    assert all(said in line for line, said in zip(lines, words, strict=True))


def test_a_validation_says_that_answers_are_cut_off_or_cannot_be_read():
    row = GOOD | {"length/parse_rate": 0.5, "count/samples": ENOUGH}
    line = diagnose([row], " (here)")["length/parse_rate"]
    assert diagnose_answers({"parse_rate": 0.5, "truncated_frac": 0.1}, " (here)") == {"length/parse_rate": line}
    assert "raise rollout.max_tokens" in diagnose_answers({"truncated_frac": 1.0}, "")["length/truncated_frac"]
    good = {"parse_rate": 0.51, "truncated_frac": 0.49}
    assert diagnose_answers(good, "") == {} == diagnose([row | {"length/parse_rate": 0.51}])


def test_a_step_without_signal_does_not_hide_what_the_others_cost():
    teaching = {"group/live_frac": 0.3, "group/rollouts_per_live": 27.0}
    steps = [GOOD | teaching] * (WINDOW - 2) + [GOOD | {"group/live_frac": 0.0}] * 2
    assert "18% of the sampled groups teach anything: each costs 27" in diagnose(steps)["group/live_frac"]


def test_corrections_that_leave_little_of_what_was_sampled_are_said():
    old = {"mismatch/ess": 0.45, "data/staleness_max": 4.0, "count/samples": ENOUGH}
    (line,) = diagnose([GOOD | old]).values()
    assert line.startswith("corrections leave 45% of") and "up to 4 steps old; lower rollout.ahead" in line
    assert diagnose([GOOD | old | {"mismatch/ess": 0.6}]) == {}


def test_a_healthy_run_is_silent_and_few_responses_wait_for_more_steps():
    assert diagnose([GOOD | {"count/samples": 1000}] * 20) == {} == diagnose([])
    few = GOOD | {"group/all_wrong_frac": 0.8, "count/samples": ENOUGH // 2 - 1}
    assert diagnose([few] * 2) == {}
    assert len(diagnose([few] * 3)) == 1
    many = GOOD | DEAD | {"group/all_right_frac": 1.0, "count/samples": ENOUGH}  # not urgent, and noisy in one step
    assert diagnose([many] * (WINDOW - 1)) == {} and len(diagnose([many] * WINDOW)) == 1
    assert diagnose([GOOD | {"policy/lr": 0.0, "count/samples": ENOUGH}]) == {}  # as warm-up is


def test_without_comparison_in_groups_the_rewards_of_the_step_must_differ():
    alone = {k: v for k, v in GOOD.items() if k != "group/dead_frac"} | {"group/all_right_frac": 1}
    assert diagnose([alone | {"reward/std": 0.2}] * WINDOW) == {}
    assert "every response is right" in str(diagnose([alone | {"reward/std": 0.0}] * WINDOW))
