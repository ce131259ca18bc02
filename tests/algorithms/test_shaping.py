"""Rewards of a training step: running normalisation, then limits, and the outcome untouched."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from pytest import approx

from saccade.algorithms import select
from saccade.algorithms.algorithm_state import Moments, merge, restore
from saccade.algorithms.build import resolve
from saccade.config import AlgorithmConfig
from saccade.types import Group, Trajectory
from tests.algorithms.by_member import Records


def member(repeat: int, reward: float | None, status: str = "ok", **parts: float) -> Trajectory:
    return Records.member("g", repeat, reward, 1, status=status, parts=parts, trained=repeat >= 0)


def group(*members: Trajectory, greedy: Trajectory | None = None) -> Group:
    return replace(Records.group("g", []), trajectories=members, greedy=greedy)


def rewards(groups: list[Group]) -> list[float | None]:
    return [t.reward for one in groups for t in one.trajectories]


def shape(groups, *, normalise="off", clip=None, moments=None, components=()):
    config = AlgorithmConfig(preset="gdpo" if components else "grpo", exclude_status=["truncated"])
    row = resolve(config, max_tokens=9).model_copy(update={"reward_clip": clip, "reward_normalise": normalise})
    state = replace(restore(row, None), moments=moments or {})
    groups, state, metrics = select.shape(groups, row, state, lambda source: dict.fromkeys(components, 1.0))
    return groups, state.moments, metrics.means()


FOUR = group(*(member(i, r) for i, r in enumerate([1.0, 0.0, 0.5, 2.0])))


def test_off_changes_nothing():
    groups, moments, metrics = shape([FOUR])
    assert groups == [FOUR] and moments == {} and metrics == {"reward/clip_frac": 0.0}


def test_limits_alone_keep_no_moments():
    groups, moments, metrics = shape([FOUR, FOUR], clip=(0.25, 1.0))
    assert rewards(groups) == [1.0, 0.25, 0.5, 1.0] * 2 and moments == {}
    assert metrics == {"reward/clip_frac": 0.5}  # 1.0 touches the limit and is not clipped
    assert [t.outcome for t in groups[0].trajectories] == [1.0, 0.0, 0.5, 2.0]


@pytest.mark.parametrize(
    ("normalise", "shift", "high", "clipped"),
    [("std", 0.0, 2.1, 1), ("mean_std", 0.875, 1.4, 0)],  # 2.0 becomes 2.34 and 1.32
)
def test_the_step_enters_the_moments_before_they_are_used_and_limits_come_last(normalise, shift, high, clipped):
    std = np.std([1.0, 0.0, 0.5, 2.0], ddof=1)
    scaled = [(r - shift) / std for r in (1.0, 0.0, 0.5, 2.0)]
    groups, moments, metrics = shape([FOUR], normalise=normalise)
    assert rewards(groups) == approx(scaled) and moments[""].count == 4
    assert metrics["reward/clip_frac"] == 0
    groups, limited, metrics = shape([FOUR], normalise=normalise, clip=(-9.0, high))
    assert rewards(groups) == approx([min(r, high) for r in scaled])
    assert limited == moments  # they never see what was cut off
    assert metrics["reward/clip_frac"] == clipped / 4


def test_moments_run_on_over_the_steps():
    steps = [[1.0, 0.0], [3.0, 5.0], [0.5, 0.5]]
    moments: dict[str, Moments] = {}
    for i, values in enumerate(steps):
        one = group(*(member(r, value) for r, value in enumerate(values)))
        before = dict(moments)
        groups, moments, _ = shape([one], normalise="std", moments=moments)
        everything = [r for step in steps[: i + 1] for r in step]
        std = np.std(everything, ddof=1)
        assert rewards(groups) == approx([r / std for r in values])
        assert before.get("", Moments()).count == 2 * i  # what was passed in is left alone
    assert moments[""].mean == approx(merge(Moments(), everything).mean)


def test_members_that_do_not_count_are_scaled_and_move_nothing():
    others = [member(4, 100.0, "truncated"), member(5, None, "error")]
    baseline = member(-1, 3.0)
    extended = group(*FOUR.trajectories, *others, greedy=baseline)
    options = {"normalise": "mean_std", "clip": (-1.0, 1.0)}
    plain, wanted, share = shape([FOUR], **options)
    groups, moments, metrics = shape([extended], **options)
    assert moments == wanted and metrics == share
    assert rewards(groups) == [*rewards(plain), 1.0, None]
    assert groups[0].greedy.reward == 1.0 and groups[0].greedy.outcome == 3.0
    assert not groups[0].greedy.trained
    (free,), _, _ = shape([extended], normalise="std")
    assert free.greedy.reward == approx(3.0 / wanted[""].divisor)


def test_components_have_scales_of_their_own():
    table = [(1.0, 30.0), (0.0, 10.0), (1.0, 20.0), (0.0, 60.0)]
    one = group(*(member(i, a + b, math=a, style=b, other=7.0) for i, (a, b) in enumerate(table)))
    names = ["math", "style"]
    groups, moments, metrics = shape([one], normalise="std", clip=(0.0, 2.0), components=names)
    assert set(moments) == {"", "math", "style"}
    for place, name in enumerate(names):
        column = np.array(table)[:, place]
        wanted = np.clip(column / column.std(ddof=1), 0, 2)
        assert [t.parts[name] for t in groups[0].trajectories] == approx(wanted.tolist())
        assert moments[name].mean == approx(column.mean())
    assert {t.parts["other"] for t in groups[0].trajectories} == {7.0}
    assert metrics["reward/clip_frac"] == 1 / 8  # 60 / 21.6 alone
    total = np.array(table).sum(1)
    assert rewards(groups) == approx(np.clip(total / total.std(ddof=1), 0, 2).tolist())


def test_a_source_without_a_component_adds_nothing_to_it():
    bare = replace(FOUR, uid="bare", trajectories=tuple(member(i, 1.0, a=1.0) for i in range(2)))
    both = group(member(0, 3.0, a=0.0, b=3.0), member(1, 6.0, a=1.0, b=5.0))
    groups, moments, _ = shape([bare, both], normalise="std", components=["a", "b"])
    assert (moments["a"].count, moments["b"].count) == (4, 2)
    assert set(groups[0].trajectories[0].parts) == {"a"}


def test_a_step_without_live_members_is_no_division_by_zero():
    dead = group(member(0, None, "error"))
    groups, moments, metrics = shape([dead], normalise="std", clip=(-1.0, 1.0))
    assert rewards(groups) == [None] and moments[""].count == 0
    assert metrics == {"reward/clip_frac": 0.0} == shape([], normalise="std")[2]
