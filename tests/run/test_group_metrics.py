"""Metrics of hand-made groups, number by number; intervals and pass@k against known numbers."""

from dataclasses import replace

import numpy as np
from pytest import approx

from saccade.plugins.reports.comparison import independent_difference, maj_at_k, paired_difference
from saccade.plugins.suites.suite_metrics import four_dimensional
from saccade.plugins.tools.tool_metrics import tool_metrics
from saccade.run.metrics import group_metrics, signal_metrics
from saccade.run.statistics import bootstrap_mean, mean_interval, pass_at_k, wilson
from saccade.types import Message


def mixed(build):
    t = build.trajectory
    right = build.group(
        t(0, 1.2, outcome=1.0, parts={"count": 1.0, "format:think_answer": 1.0}),
        t(1, 1.2, outcome=1.0, parts={"count": 1.0, "format:think_answer": 1.0}),
        source="a",
    )
    split = build.group(
        t(0, 1.0, parts={"count": 1.0, "format:think_answer": 0.0}),
        t(1, 0.0, parts={"count": 0.0, "format:think_answer": 1.0}, response=(5, 6)),
        t(2, None, status="error", end_reason="turn_length"),
        t(3, 9.0, trained=False),
        source="b",
    )
    return [right, split]


def test_rewards_count_live_members(build):
    metrics = group_metrics(mixed(build))
    expected = {
        **{"reward/mean": 0.85, "reward/std": np.std([1.2, 1.2, 1.0, 0.0], ddof=1)},
        **{"reward/min": 0.0, "reward/max": 1.2, "reward/accuracy": 0.75, "reward/count": 0.75},
        **{"reward/format": 0.75, "reward/format:think_answer": 0.75},
        **{"reward/error_rate": 0.2, "reward/abstain_rate": 0.0, "reward/by_source/a/mean": 1.2},
        **{"reward/by_source/b/accuracy": 0.5, "reward/by_source/b/format": 0.5},
        # Lengths and ends count everyone who is trained.
        **{"length/response_mean": (5 * 4 + 2) / 5, "length/response_min": 2},
        **{"length/response_max": 5, "length/response_p50": 5, "length/prompt_mean": 3},
        "length/truncated_frac": 0.2,  # though its reward failed later
        **{"group/solved_50": 0.5, "group/solved_100": 0.5, "group/solved_0": 0, "data/source_frac/a": 0.5},
        **{"turns/end/turn_length": 0.2, "turns/end/answered": 0.8},
    }
    assert {name: metrics[name] for name in expected} == approx(expected)


def test_groups(build):
    wrong = build.group(build.trajectory(0, 0.0), build.trajectory(1, 0.0))
    lonely = build.group(build.trajectory(0, 1.0), build.trajectory(1, None, status="abstain"))
    metrics = group_metrics([*mixed(build), wrong, lonely])
    assert metrics["group/dead_frac"] == 0.75
    assert (metrics["group/all_right_frac"], metrics["group/all_wrong_frac"]) == (0.5, 0.25)
    assert metrics["group/std_mean"] == approx(np.std([0, 1], ddof=1) / 3)
    close = build.group(build.trajectory(0, 0.1 + 0.2), build.trajectory(1, 0.3))
    assert group_metrics([close])["group/dead_frac"] == 1.0  # a rounding residue is no signal
    alone = group_metrics([build.group(build.trajectory(0, 1.0))], compares=False)
    assert "group/dead_frac" not in alone and alone["group/all_right_frac"] == 1.0
    lost = group_metrics([build.group(build.trajectory(0, None, status="error"))])  # which says why
    assert lost["reward/error_rate"] == lost["group/dead_frac"] == 1.0 and "reward/mean" not in lost
    assert group_metrics([]) == {} == group_metrics([build.group()])


def test_what_the_groups_that_teach_cost(build):
    live = build.group(build.trajectory(0, 1.0), build.trajectory(1, 0.0))
    shaped = build.group(build.trajectory(0, 1.0, outcome=1.0), build.trajectory(1, 0.5, outcome=1.0))
    dead = build.group(build.trajectory(0, 1.0), build.trajectory(1, 1.0))
    found = signal_metrics([live, shaped, dead], [live, shaped, dead, dead])
    assert found == {"group/live_frac": 0.5, "group/rollouts_per_live": 4.0, "group/side_signal_frac": 0.5}


def test_who_is_excluded_may_still_be_compared_with(build):
    over = build.trajectory(1, 0.0, status="overturn")
    groups = [build.group(build.trajectory(0, 1.0), over), build.group(over)]
    apart = group_metrics(groups, ["overturn"])
    beside = group_metrics(groups, ["overturn"], excluded_in_baseline=True)
    assert apart["group/dead_frac"] == 1.0 and beside["group/dead_frac"] == 0.5


def test_pictures_turns_and_advantages(build):
    advantages = np.array([2.0, -1, -1, -1, -1], np.float32)
    two = build.trajectory(0, 1.0, pictures=[build.media("a"), build.media("b")], turns=3, advantages=advantages)
    none = build.trajectory(1, 0.0, status="overturn", end_reason="max_turns", turns=6)
    metrics = group_metrics([build.group(two, none)])
    assert metrics["length/vision_tokens_mean"] == 4
    assert metrics["turns/images_per_sample"] == 1
    assert (metrics["turns/mean"], metrics["turns/max"]) == (4.5, 6)
    assert metrics["turns/overturn_frac"] == 0.5
    assert (metrics["adv/mean"], metrics["adv/min"], metrics["adv/max"]) == (approx(-0.4), -1.0, 2.0)


def test_scores_are_no_accuracy_and_neither_right_nor_wrong(build):
    t = build.trajectory
    rated = build.group(t(0, -3.0, outcome=-3.0), t(1, 2.0, outcome=2.0), source="c")
    metrics = group_metrics([*mixed(build), rated], scores={"c"})
    assert metrics["reward/accuracy"] == 0.75 and metrics["reward/min"] == -3.0
    assert "reward/by_source/c/accuracy" not in metrics
    assert metrics["reward/by_source/c/mean"] == -0.5
    alone = group_metrics([rated], scores={"c"})
    assert {"reward/accuracy", "group/all_right_frac", "group/all_wrong_frac"}.isdisjoint(alone)


def crop(area):
    return {"ok": True, "reason": "", "area": area, "noop": area > 0.95}


def failed(reason):
    return {"ok": False, "reason": reason}


def test_calls_crops_and_cells(build):
    def episode(outcome, *calls):
        return build.trajectory(outcome=outcome, info={"tool_calls": list(calls)})

    without = build.trajectory(outcome=1.0)  # has no tools
    called = [
        episode(1.0, crop(0.2), crop(1.0), failed("box")),
        *(episode(0.0, failed("json")), episode(1.0), episode(0.0), episode(None, crop(0.6))),
    ]
    assert tool_metrics([*called, without]) == {
        **{"tool/calls_per_sample": 1.0, "tool/success_frac": 0.6},
        **{"tool/invalid/box": 0.2, "tool/invalid/json": 0.2},
        **{"tool/noop_rate": approx(1 / 3), "tool/crop_area_mean": approx(0.6)},
        **{"tool/acc_with_call": 0.5, "tool/acc_without_call": 0.5},
        **{"tool/right_call": 0.25, "tool/wrong_call": 0.25},
        **{"tool/right_no_call": 0.25, "tool/wrong_no_call": 0.25},
    }
    assert tool_metrics([without]) == {}
    assert tool_metrics([episode(None)]) == {"tool/calls_per_sample": 0.0}


def test_what_goes_round_in_circles_or_looks_again(build):
    said = [
        Message(role=role, parts=(text,)) for role, text in [("user", "Wait."), ("assistant", "No, Let me recheck")]
    ]
    round_ = build.trajectory(response=(5, 6, 7, 8) * 2 + (5,), messages=(*said,), context=1)
    straight = (said[0], Message(role="assistant", parts=("Let me reason, and read it.",)))
    found = group_metrics([build.group(build.trajectory(messages=straight, context=1), round_)])
    assert (found["length/repeat_score"], found["length/reflection_rate"]) == (approx(2 / 6 / 2), 0.5)


def test_wilson_matches_the_textbook():
    assert wilson(8, 10) == approx((0.490162, 0.943318), abs=1e-6)
    assert wilson(81, 263) == approx((0.2553, 0.3662), abs=5e-5)  # Newcombe 1998, table I
    assert wilson(20, 20).high == 1.0 and wilson(0, 0) == (0.0, 1.0)


def test_bootstrap_agrees_with_the_normal_interval_and_repeats():
    values = np.random.default_rng(3).normal(size=2000)
    half = 1.96 * values.std(ddof=1) / 2000**0.5
    low, high = bootstrap_mean(values)
    assert low == approx(values.mean() - half, abs=0.004)
    assert high == approx(values.mean() + half, abs=0.004)
    assert bootstrap_mean(values, seed=0) == (low, high)
    assert bootstrap_mean(values, seed=1) != (low, high)


def test_mean_interval_chooses_by_what_it_is_given():
    assert mean_interval([1.0, 0.0, 1.0, 1.0]) == wilson(3, 4)
    assert mean_interval([[1.0, 0.0], [1.0, 1.0]]) == bootstrap_mean([0.5, 1.0])


def test_items_that_are_all_alike_are_not_certain():
    """However many answers each of them got: it is the items that are few."""
    assert mean_interval([[0.0] * 8] * 4) == wilson(0, 4)
    low, high = mean_interval([[1.0, 0.0]] * 4)
    assert 0.0 < low < 0.5 < high < 1.0
    assert mean_interval([[1.0, 0.0]] * 400).low == approx(0.5, abs=0.01)
    assert mean_interval([3.0] * 4) == (3.0, 3.0)  # no share, so nothing bounds the others


def test_pass_at_k_golden_values():
    assert pass_at_k(16, 3, 4) == approx(0.60714286, abs=1e-8)
    assert pass_at_k(16, 3, 1) == 3 / 16
    assert (pass_at_k(4, 1, 4), pass_at_k(8, 1, 4), pass_at_k(16, 0, 4)) == (1.0, 0.5, 0.0)


def test_the_difference_of_two_proportions():
    # Newcombe 1998, table II: 56/70 against 48/80.
    change = independent_difference(48 / 80, wilson(48, 80), 56 / 70, wilson(56, 70))
    assert change == approx((0.2, 0.0524, 0.3339), abs=5e-5)


def test_a_change_that_is_the_same_everywhere_is_not_certain():
    few = wilson(0, 4).high
    assert paired_difference([0.0] * 4, [0.0] * 4) == approx((0.0, -few, few))
    assert paired_difference([0.0] * 4, [1.0] * 4) == approx((1.0, 1.0 - 2 * few, 1.0))


def test_majority_ignores_silence_and_shares_ties():
    assert maj_at_k([["4", "5", "4", None]], [[1.0, 0.0, 1.0, 0.0]]) == 1.0
    assert maj_at_k([["4", "5"]], [[1.0, 0.0]]) == 0.5
    assert maj_at_k([[None, None]], [[0.0, 0.0]]) == 0.0
    assert maj_at_k([["a", "a", "b"], ["b", "b", "a"]], [[1, 1, 0], [0, 0, 1]]) == 0.5


def test_we_maths_scores_are_the_official_ones(build):
    """Steps and the whole of twelve problems, and what the set's own code makes of them."""
    right = ["100", "111", "001", "101", "011", "010", "011", "1011", "1111", "1111", "1110", "1010"]
    groups = []
    for problem, parts in enumerate(right):
        steps = len(parts) - 1
        for number, said in enumerate(parts, 1):
            key = f"{steps}steps_{number if number <= steps else 'multi'}"
            group = build.group(build.trajectory(0, float(said)), uid=f"{problem}-{key}")
            sample = replace(group.sample, extra={"problem_id": problem, "key": key})
            groups.append(replace(group, sample=sample))
    assert four_dimensional(groups) == approx({"strict": 0.2916666666666667, "loose": 0.625})
    assert four_dimensional(groups[:2]) == {}
