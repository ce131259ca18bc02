"""Algorithms applied to records: who trains, with which reward, in which update."""

import pytest
import torch

from saccade.algorithms import select
from saccade.algorithms.filters import entropy_threshold, high_entropy
from saccade.errors import ConfigError


def test_constant_groups_are_dropped_only_when_asked_and_when_rewards_decide(algorithm, records):
    group = records.group
    groups = [group("a", [0.0, 0.0]), group("b", [1.0, 1.0]), group("c", [0.0, 1.0])]
    early = algorithm("drop_constant=true")
    chosen, metrics = select.mark_members(groups, early)
    assert [g.trajectories[0].trained for g in chosen] == [False, False, True]
    assert metrics.means()["group/constant_low"] == metrics.means()["group/constant_high"] == 1
    kept_in_baseline = ["drop_constant=true", "exclude_status=[void]", "excluded_in_baseline=true"]
    for later in (["drop_constant=false"], ["drop_constant=true", "kl.place=reward"], kept_in_baseline):
        chosen, metrics = select.mark_members(groups, algorithm(*later))  # the estimator decides, and counts
        assert all(g.trajectories[0].trained for g in chosen) and metrics.means() == {}


def test_where_terms_are_compared_all_of_them_must_be_constant(algorithm, records):
    same, parts = [1.0, 1.0], [{"acc": 1.0, "fmt": 0.0}, {"acc": 0.0, "fmt": 1.0}]
    groups = [
        records.changed(records.group("parts", same), parts=parts),
        records.changed(records.group("turns", same), parts=[parts[0]] * 2, turn_rewards=[(0.5,), (0.2, 0.1)]),
        records.changed(records.group("same", same), parts=[parts[0]] * 2, turn_rewards=[(0.5,), (0.5,)]),
    ]
    row = algorithm("preset=gdpo", "drop_constant=true")
    chosen = select.mark_members(groups, row)[0]
    assert [g.uid for g in chosen if g.trajectories[0].trained] == ["parts", "turns"]


def test_who_does_not_train(algorithm, records):
    never = records.changed(records.group("a", [0.0] * 4), status=["error", "abstain", "aborted", "stale"])
    assert not any(t.trained for t in select.mark_members([never], algorithm())[0][0].trajectories)
    (chosen,) = select.mark_members([records.group("a", [1.0, None, 0.0])], algorithm())[0]
    assert [t.trained for t in chosen.trajectories] == [True, False, True]
    cut = records.changed(records.group("a", [1.0, 0.0, 0.0]), status=["ok", "overturn", "truncated"])
    row = algorithm("exclude_status=[overturn]")
    (chosen,) = select.mark_members([cut], row)[0]
    assert [t.trained for t in chosen.trajectories] == [True, False, True]


def test_informative_groups_by_their_raw_outcome(algorithm, records):
    outcomes = {"mixed": [0.0, 1.0], "wrong": [0.0, 0.0], "right": [1.0, 1.0], "lost": [None, None]}
    outcomes |= {"half lost": [None, 1.0], "rare": [0.0] * 199 + [1.0]}
    groups = [records.group(uid, rewards) for uid, rewards in outcomes.items()]
    groups.append(records.changed(records.group("shaped", [0.0, 0.0]), reward=[0.1, -0.3]))
    kept, reasons = select.keep_informative(groups, algorithm("preset=dapo"))
    assert [g.uid for g in kept] == ["mixed"]
    assert reasons == {"constant": 4, "empty": 1, "low": 1}
    kept, reasons = select.keep_informative(groups, algorithm("preset=mini_o3"))
    assert [g.uid for g in kept] == ["mixed", "rare"]  # constant ones alone are dropped


def test_a_filter_of_your_own(algorithm, records, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from dataclasses import replace\n"
        "def last(groups):\n    return groups[:0:-1]\n"
        "def other(groups):\n    return [replace(groups[0], uid='z')]\n"
        "def changed(groups):\n    return [replace(g, trajectories=g.trajectories[:1]) for g in groups]\n"
    )
    groups = [records.group(uid, [0.0, 1.0]) for uid in "abc"]
    row = algorithm(f"filter.function={path}:last")
    kept, reasons = select.apply_user_filter(groups, row)
    assert [g.uid for g in kept] == ["b", "c"] and reasons == {"own": 1}
    for wrong in ("other", "changed"):
        with pytest.raises(ConfigError, match=r"filter\.function=.*return some of its argument, unchanged"):
            select.apply_user_filter(groups, algorithm(f"filter.function={path}:{wrong}"))


@pytest.mark.parametrize(("groups", "updates"), [(8, 1), (8, 3), (2, 4), (0, 2)])
def test_updates_hold_whole_groups_once(groups, updates, records):
    step = [records.group(str(i), [0.0, 1.0]) for i in range(groups)]
    parts = select.split_updates(step, updates, seed=5)
    assert sorted(g.uid for part in parts for g in part) == [str(i) for i in range(groups)]
    assert len(parts) == min(updates, groups)
    sizes = [len(part) for part in parts]
    assert not sizes or max(sizes) - min(sizes) <= 1
    again = select.split_updates(step, updates, seed=5)
    assert [[g.uid for g in part] for part in parts] == [[g.uid for g in part] for part in again]


def test_supervision_weighs_every_token_alike(records):
    groups = [records.group("a", [0.0], [3]), records.group("b", [0.0], [5])]
    (batches,) = records.packed([groups], micro_tokens=7)
    written = select.write_supervision(batches)
    assert len(written) == 2
    for batch in written:
        assert batch.advantages is not None and set(batch.advantages.tolist()) == {1.0}
        assert batch.scales is not None and batch.scales.tolist() == pytest.approx([1 / 8] * batch.target_count)


def test_tokens_of_high_entropy_in_a_step_and_in_a_sequence(golden):
    entropies = 1 + (2 * golden.sequence + 3 * golden.position).double().sin()
    assert entropy_threshold(entropies, 0.2).item() == pytest.approx(1.5582395, abs=1e-7)
    keep = high_entropy(entropies, golden.live, golden.sequence, fraction=0.2)
    kept = zip(golden.sequence[keep].tolist(), golden.position[keep].tolist(), strict=True)
    assert list(kept) == [(0, 5), (1, 0), (1, 2), (2, 1)]
    entropies = torch.tensor([3.0, 1, 2, 5, 4, 9, 0.1, 0.2, 0.2, 7])
    sequence = torch.tensor([0, 0, 0, 0, 0, 2, 2, 1, 1, 1])
    live = torch.tensor([True] * 9 + [False])
    keep = high_entropy(entropies, live, sequence, fraction=0.4, scope="sequence")
    # two of five; one of two at least; the first of equals
    assert keep.nonzero().flatten().tolist() == [3, 4, 5, 7]
