"""Algorithms applied to records: who trains, how a step splits, what the forests are given."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from saccade.algorithms import stages
from saccade.algorithms.algorithm import Algorithm
from saccade.algorithms.build import resolve
from saccade.config import AlgorithmConfig
from saccade.forest import pack
from saccade.types import Group, Message, Metrics, Sample, Source, Trajectory


def algorithm(preset: str = "grpo", **options: object) -> Algorithm:
    updates = options.pop("updates_per_step", 1)
    config = AlgorithmConfig.model_validate({"preset": preset, "kl": {"coef": 0.0}} | options)
    return resolve(config, max_tokens=16, samples_per_prompt=4, updates_per_step=updates)  # type: ignore[arg-type]


def member(
    uid: str, repeat: int, reward: float | None, tokens: int, status: str = "ok"
) -> Trajectory:
    prompt = 3
    sources = [Source.PROMPT] * prompt + [Source.POLICY] * tokens
    sampled = np.array(sources) == Source.POLICY
    return Trajectory(
        sample_id=uid,
        repeat=repeat,
        ids=np.array([1, 2, 3, *range(10 + repeat, 10 + repeat + tokens)]),
        sources=np.array(sources, np.int8),
        logprobs=np.where(sampled, -1.0, np.nan).astype(np.float32),
        versions=np.where(sampled, 0, -1).astype(np.int32),
        reward=reward,
        outcome=reward,
        status=status,  # type: ignore[arg-type]
    )


def group(uid: str, rewards: Sequence[float | None], tokens: list[int] | None = None) -> Group:
    lengths = tokens or [2] * len(rewards)
    members = [
        member(uid, i, r, n, "ok" if r is not None else "error")
        for i, (r, n) in enumerate(zip(rewards, lengths, strict=True))
    ]
    sample = Sample(id=uid, messages=(Message(role="user", parts=("x",)),))
    return Group(sample=sample, uid=uid, trajectories=tuple(members))


def packed(parts: list[list[Group]], micro_tokens: int = 1000) -> stages.Updates:
    def positions(length: int, media: object) -> np.ndarray:
        return np.arange(length)[None]

    return [pack(part, positions=positions, micro_tokens=micro_tokens) for part in parts]


def columns(updates: stages.Updates, name: str) -> dict[tuple[str, int], list[float]]:
    """Values of a column by sequence."""
    found: dict[tuple[str, int], list[float]] = {}
    for batches in updates:
        for batch in batches:
            for key, value in zip(batch.sequence, getattr(batch, name), strict=True):
                found.setdefault(batch.keys[key], []).append(float(value))
    return found


# -- members ---------------------------------------------------------------------------------------


def test_constant_groups_are_counted_and_dropped_only_when_asked() -> None:
    groups = [group("a", [0.0, 0.0]), group("b", [1.0, 1.0]), group("c", [0.0, 1.0])]
    for drop, trained in ((False, [True, True, True]), (True, [False, False, True])):
        metrics = Metrics()
        chosen = stages.choose_members(groups, algorithm(drop_constant=drop), metrics)
        assert [g.trajectories[0].trained for g in chosen] == trained
        assert metrics.means()["group/constant_low"] == metrics.means()["group/constant_high"] == 1


def test_a_member_that_was_not_scored_does_not_train() -> None:
    (chosen,) = stages.choose_members([group("a", [1.0, None, 0.0])], algorithm(), Metrics())
    assert [t.trained for t in chosen.trajectories] == [True, False, True]


def test_informative_groups_by_their_raw_outcome() -> None:
    groups = [
        group("mixed", [0.0, 1.0]),
        group("wrong", [0.0, 0.0]),
        group("right", [1.0, 1.0]),
        group("lost", [None, None]),
        group("half lost", [None, 1.0]),
        group("rare", [0.0] * 199 + [1.0]),
    ]
    kept, reasons = stages.keep_informative(groups, algorithm("dapo", overlong={"buffer": 0}))
    assert [g.uid for g in kept] == ["mixed"]
    assert reasons == {"constant": 3, "empty": 1, "low": 1}


# -- updates ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("groups", "updates"), [(8, 1), (8, 3), (2, 4), (0, 2)])
def test_updates_hold_whole_groups_once(groups: int, updates: int) -> None:
    step = [group(str(i), [0.0, 1.0]) for i in range(groups)]
    parts = stages.split_updates(step, updates, seed=5)
    assert sorted(g.uid for part in parts for g in part) == [str(i) for i in range(groups)]
    assert len(parts) == min(updates, groups)
    sizes = [len(part) for part in parts]
    assert not sizes or max(sizes) - min(sizes) <= 1
    again = stages.split_updates(step, updates, seed=5)
    assert [[g.uid for g in part] for part in parts] == [[g.uid for g in part] for part in again]


def test_groups_that_train_nothing_take_no_place_in_an_update() -> None:
    step = [group("a", [None, None]), group("b", [0.0, 1.0]), group("c", [0.0, 1.0])]
    step = stages.choose_members(step, algorithm(), Metrics())
    parts = stages.split_updates(step, 2, seed=0)
    assert sorted(len(part) for part in parts) == [1, 1]


# -- advantages ------------------------------------------------------------------------------------


def test_advantages_leave_out_who_was_not_scored() -> None:
    groups = stages.choose_members([group("a", [1.0, None, 0.0, 0.0])], algorithm(), Metrics())
    updates = stages.write_advantages(packed([groups]), groups, algorithm(), Metrics())
    values = columns(updates, "advantages")
    assert set(values) == {("a", 0), ("a", 2), ("a", 3)}
    std = np.std([1.0, 0.0, 0.0], ddof=1)
    assert values["a", 0] == pytest.approx([(1 - 1 / 3) / (std + 1e-6)] * 2, rel=1e-6)
    assert values["a", 2] == pytest.approx([-(1 / 3) / (std + 1e-6)] * 2, rel=1e-6)


def test_scales_of_an_update_add_up_to_one_however_it_is_packed() -> None:
    groups = [group(str(i), [0.0, 1.0, 0.0, 1.0], [1, 2, 3, 4]) for i in range(4)]
    row = algorithm("dapo", overlong={"buffer": 0}, updates_per_step=2)
    parts = stages.split_updates(groups, 2, seed=0)
    wide, narrow = (
        stages.write_advantages(packed(parts, budget), groups, row, Metrics())
        for budget in (1000, 8)
    )
    assert len(narrow[0]) > len(wide[0]) == 1
    for updates in (wide, narrow):
        for batches in updates:
            total = sum(float(b.scales.sum()) for b in batches if b.scales is not None)
            assert total == pytest.approx(1.0, rel=1e-6)
    assert columns(wide, "advantages") == columns(narrow, "advantages")
    assert columns(wide, "scales") == columns(narrow, "scales")


def test_a_mean_over_sequences_weighs_them_alike() -> None:
    groups = [group("a", [0.0, 1.0, 0.0, 1.0], [1, 2, 4, 8])]
    scales = columns(
        stages.write_advantages(packed([groups]), groups, algorithm(), Metrics()), "scales"
    )
    assert [sum(scales["a", i]) for i in range(4)] == pytest.approx([0.25] * 4)


def test_a_step_in_which_nothing_trains() -> None:
    groups = [group("a", [0.0, 0.0]), group("b", [1.0, 1.0])]
    row = algorithm(drop_constant=True)
    groups = stages.choose_members(groups, row, Metrics())
    updates = packed(stages.split_updates(groups, 1, seed=0))
    assert updates == [] and stages.write_advantages(updates, groups, row, Metrics()) == []
    assert stages.write_advantages([], [], row, Metrics()) == []


def test_advantages_are_shown_on_the_members() -> None:
    groups = stages.choose_members([group("a", [1.0, None, 0.0])], algorithm(), Metrics())
    updates = stages.write_advantages(packed([groups]), groups, algorithm(), Metrics())
    (shown,) = stages.show_advantages(groups, updates)
    right, lost, wrong = (t.advantages for t in shown.trajectories)
    assert lost is None and right is not None and wrong is not None
    assert right.tolist() == pytest.approx([2**-0.5] * 2, rel=1e-5)
    assert wrong.tolist() == pytest.approx([-(2**-0.5)] * 2, rel=1e-5)


def test_logprobs_go_to_the_forest_they_came_from() -> None:
    groups = [group(str(i), [0.0, 1.0]) for i in range(4)]
    updates = packed(stages.split_updates(groups, 2, seed=0), micro_tokens=8)
    flat = [batch for batches in updates for batch in batches]
    scored = [
        (np.full(len(b.reads), i, np.float32), np.zeros(len(b.reads))) for i, b in enumerate(flat)
    ]
    written = stages.with_logprobs(updates, "old_logprobs", scored)
    assert [len(batches) for batches in written] == [len(batches) for batches in updates]
    seen = [set(b.old_logprobs.tolist()) for batches in written for b in batches]  # type: ignore[union-attr]
    assert seen == [{float(i)} for i in range(len(flat))]


def test_supervision_weighs_every_token_alike() -> None:
    (batches,) = packed([[group("a", [0.0], [3]), group("b", [0.0], [5])]], micro_tokens=7)
    written = stages.write_supervision(batches)
    assert len(written) == 2
    for batch in written:
        assert batch.advantages is not None and set(batch.advantages.tolist()) == {1.0}
        assert batch.scales is not None and batch.scales.tolist() == pytest.approx(
            [1 / 8] * len(batch.reads)
        )
