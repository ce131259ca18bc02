"""What training does to rewards before advantages: running normalisation, then limits.

Acts once per training step and never in evaluation. The raw outcome stays as it is: filters and
accuracy read it. Knows nothing of terms and weights: a component is a name in a member's parts.

    groups, moments, metrics = shape_rewards(
        groups, normalise="std", clip=(-10.0, 10.0), moments={}, live=lambda t: t.trained
    )
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from saccade.algorithms.moments import Moments, merge
from saccade.algorithms.moments import normalise as normalised
from saccade.types import Group, Trajectory

REWARD = ""  # key of the moments of the combined reward; those of a component have its name


def shape_rewards(
    groups: Sequence[Group],
    *,
    normalise: Literal["off", "std", "mean_std"],
    clip: tuple[float, float] | None,
    moments: Mapping[str, Moments],
    live: Callable[[Trajectory], bool],
    components: Sequence[str],
) -> tuple[list[Group], dict[str, Moments], dict[str, float]]:
    """Live members alone move the moments and count in the metrics; every reward is put on the new
    scale, that of a greedy baseline too. With `components` each of these parts has a scale of its
    own, and `clip_frac` is theirs.
    """
    moments = dict(moments)
    if normalise == "off" and clip is None:
        return list(groups), moments, {"reward/clip_frac": 0.0}
    parts = tuple(components)
    members = [t for group in groups for t in group.trajectories if live(t)]
    assert all(t.reward is not None for t in members), "a live member has a reward"
    seen = {name: _values(members, name) for name in (REWARD, *parts)}
    if normalise != "off":
        moments |= {name: merge(moments.get(name, Moments()), seen[name]) for name in seen}

    def scaled(name: str, value: float) -> float:
        if normalise == "off":
            return value
        return float(normalised([value], moments[name], normalise)[0])

    def limited(value: float) -> float:
        return value if clip is None else min(max(value, clip[0]), clip[1])

    def shaped(t: Trajectory) -> Trajectory:
        reward = None if t.reward is None else limited(scaled(REWARD, t.reward))
        own = {name: limited(scaled(name, t.parts[name])) for name in parts if name in t.parts}
        return replace(t, reward=reward, parts={**t.parts, **own})

    counted = [scaled(name, value) for name in parts or (REWARD,) for value in seen[name]]
    beyond = sum(limited(value) != value for value in counted)
    return (
        [
            replace(
                group,
                trajectories=tuple(map(shaped, group.trajectories)),
                greedy=None if group.greedy is None else shaped(group.greedy),
            )
            for group in groups
        ],
        moments,
        {"reward/clip_frac": beyond / max(1, len(counted))},
    )


def _values(members: Sequence[Trajectory], name: str) -> list[float]:
    """A source of data whose reward lacks a component adds nothing to it."""
    values = (t.reward if name == REWARD else t.parts.get(name) for t in members)
    return [value for value in values if value is not None]
