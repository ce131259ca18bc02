"""One line that says why nothing is learned, and what to change.

Reads the metrics of the last steps only. It stays silent while anything moves: a cause must hold in
every one of them.

    >>> diagnose([{"policy/lr": 0.0}] * WINDOW)
    'nothing is learned: the learning rate is 0; set train.lr and look at train.schedule'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

WINDOW = 5  # steps in a row before a cause counts


class Cause(NamedTuple):
    """A metric that has one value in every step, and the line it calls for."""

    metric: str
    value: float
    line: str
    while_dead: bool = True  # rewards that differ inside some group would still teach something


# In order: what explains the rest comes first.
CAUSES: tuple[Cause, ...] = (
    Cause(
        "policy/update_skipped",
        1.0,
        "every update is skipped as non-finite; lower train.lr and look at the saved batches",
        while_dead=False,
    ),
    Cause(
        "policy/lr",
        0.0,
        "the learning rate is 0; set train.lr and look at train.schedule",
        while_dead=False,
    ),
    Cause(
        "reward/error_rate",
        1.0,
        "every reward failed; look at `reason` in trajectories/ and try `saccade check-data`",
    ),
    Cause(
        "reward/abstain_rate",
        1.0,
        "the reward judges no response; check that rows have an answer the verifier can read",
    ),
    Cause(
        "length/truncated_frac",
        1.0,
        "every response is cut off; raise rollout.max_tokens or ask for shorter answers",
    ),
    Cause(
        "turns/overturn_frac",
        1.0,
        "every episode runs out of turns, images or tokens; raise env.max_turns, env.max_images or "
        "env.max_total_tokens",
    ),
    Cause(
        "turns/void_frac",
        1.0,
        "every episode ends without an answer; check prompt.format, or teach it with `saccade sft`",
    ),
    Cause(
        "reward/format",
        0.0,
        "no response has the format; check prompt.format, or teach it first with `saccade sft`",
    ),
    Cause(
        "group/all_wrong_frac",
        1.0,
        "all groups are dead, every response is wrong; use easier data, raise "
        "train.samples_per_prompt, or warm up with `saccade sft`",
    ),
    Cause(
        "group/all_right_frac",
        1.0,
        "all groups are dead, every response is right; use harder data, or stop here",
    ),
    Cause(
        "group/dead_frac",
        1.0,
        "all groups are dead, the members of each have the same reward; raise "
        "train.samples_per_prompt or rollout.temperature, or use data of other difficulty",
    ),
    Cause(
        "policy/empty_step",
        1.0,
        "no group is left to train on; look at group/dropped/… and group/constant_…, and ease "
        "algorithm.filter or the data",
        while_dead=False,
    ),
    Cause(
        "policy/grad_norm",
        0.0,
        "rewards differ but the gradient is 0; check model.train (is anything trainable?) and "
        "algorithm.exclude_status",
        while_dead=False,
    ),
)


def diagnose(history: Sequence[Mapping[str, Any]]) -> str | None:
    """The first cause that explains the last steps of `history` (rows of metrics, oldest first), or
    None.

    Rows without any training metric (a validation alone) are passed over.
    """
    known = {cause.metric for cause in CAUSES}
    steps = (row for row in reversed(history) if not known.isdisjoint(row))
    last = list(islice(steps, WINDOW))
    if len(last) < WINDOW:
        return None
    dead = all(_is_dead(row) for row in last)
    for cause in CAUSES:
        if cause.while_dead and not dead:
            continue
        if all(row.get(cause.metric) == cause.value for row in last):
            return f"nothing is learned: {cause.line}"
    return None


def _is_dead(row: Mapping[str, Any]) -> bool:
    """Whether no rewards differ that are compared: inside groups, or all of the step."""
    if "group/dead_frac" in row:
        return row["group/dead_frac"] == 1.0
    return row.get("reward/std") in (None, 0.0)
