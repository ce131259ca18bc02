"""Says early why little is learned, what it costs, and which option changes it.

Reads the metrics of the last steps. A cause counts once the steps that show it hold `ENOUGH`
responses, or after `WINDOW` steps.

    >>> diagnose([{"policy/lr": 0.0}] * WINDOW)["policy/lr"]
    'nothing is learned: the learning rate is 0; set train.lr and look at train.schedule'
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Literal, NamedTuple

WINDOW = 5  # steps that are always enough
ENOUGH = 128  # responses that are enough, in however few steps
MOST, HALF, QUARTER = 0.9, 0.5, 0.25

Row = Mapping[str, Any]  # the metrics of a step


class Cause(NamedTuple):
    """The line for a metric that lies in a range (low, high) in every step.

    kind: explains why groups are `dead`, and counts while most are; `stops` all learning; `always`
    worth saying.
    """

    line: str  # {share}: the mean in percent, {rest}: what is left to 100, {row}: the last step
    kind: Literal["dead", "stops", "always"] = "dead"
    range: tuple[float, float] = (MOST, 1.0)
    steps: int = 1  # at least, however many responses they hold


UNREAD = (
    "{rest} of the responses have no answer that can be read{unread}; check prompt.format, the verifier's `order` "
    "and rollout.max_tokens, or teach the format first with `saccade sft`"
)
# In order: what explains the rest comes first, and only the first is said.
CAUSES = {
    "policy/update_skipped": Cause(
        "{share} of the updates are skipped as non-finite; lower train.lr, look at the saved batches",
        "stops",
        steps=WINDOW,
    ),
    "policy/lr": Cause("the learning rate is 0; set train.lr and look at train.schedule", "stops", (0.0, 0.0), WINDOW),
    "reward/error_rate": Cause(
        "{share} of the rewards failed; look at `reason` in trajectories/, try `saccade check-data`"
    ),
    "reward/abstain_rate": Cause(
        "the reward judges {rest} of the responses; check that rows have an answer the verifier can read"
    ),
    "length/truncated_frac": Cause("{share} of the responses are cut off; raise rollout.max_tokens"),
    "turns/overturn_frac": Cause(
        "{share} of the episodes run out of turns, images or tokens; raise env.max_turns, max_images, max_total_tokens"
    ),
    "length/parse_rate": Cause(UNREAD, "always", (0.0, HALF)),
    "turns/void_frac": Cause("{share} of the episodes end without an answer; check prompt.format, try `saccade sft`"),
    "reward/format": Cause(
        "{rest} of the responses miss the format; check prompt.format, try `saccade sft`", range=(0.0, 1 - MOST)
    ),
    "group/all_wrong_frac": Cause(
        "in {share} of the groups every response is wrong; use easier data, raise train.samples_per_prompt, "
        "or warm up with `saccade sft`"
    ),
    "group/all_right_frac": Cause("in {share} of the groups every response is right; use harder data, or stop here"),
    "group/dead_frac": Cause(
        "in {share} of the groups all members have the same reward; raise train.samples_per_prompt "
        "or rollout.temperature, or use data of other difficulty"
    ),
    "policy/empty_step": Cause(
        "no group is left to train on; see group/dropped/… and group/constant_…, ease algorithm.filter", "stops"
    ),
    "policy/grad_norm": Cause(
        "rewards differ but the gradient is 0; check model.train and algorithm.exclude_status",
        "stops",
        (0.0, 0.0),
        WINDOW,
    ),
}
# Said beside a cause.
NOTES = {
    "group/live_frac": Cause(
        "{share} of the sampled groups teach anything: each costs {row[group/rollouts_per_live]:,.0f} rollouts; "
        "use data of medium difficulty, raise train.samples_per_prompt, or warm up with `saccade sft`",
        "always",
        (1e-9, QUARTER),
    ),
    "group/side_signal_frac": Cause(
        "in {share} of the groups that teach anything all answers are equally right or wrong: format, length or "
        "another side term decides there; lower its weight in reward.terms, or see reward.combine",
        "always",
        (HALF, 1.0),
    ),
    "mismatch/ess": Cause(
        "corrections leave {share} of what is sampled (effective sample size), with tokens up to "
        "{row[data/staleness_max]:.0f} steps old; lower rollout.ahead or train.lr",
        "always",
        (0.0, HALF),
    ),
}


def diagnose(history: Sequence[Row], unread: str = "") -> dict[str, str]:
    """Lines for the last steps of `history` (metrics, oldest first) by the metric that shows them;
    none while all is well. `unread`: where the verifier looked in vain for an answer.

    Rows without any training metric (a validation alone) are passed over.
    """
    steps = [row for row in history if not CAUSES.keys().isdisjoint(row)][-WINDOW:]
    lines = {name: line for name, note in NOTES.items() if (line := _line(name, note, steps, unread))}
    for name, cause in CAUSES.items():
        if line := _line(name, cause, steps, unread):
            dead = min(map(_dead_share, steps))
            prefix = "little is learned: " if dead >= MOST else ""
            prefix = "nothing is learned: " if dead == 1.0 or cause.kind == "stops" else prefix
            return {name: prefix + line} | lines
    return lines


def unread_answers(parse_rate: float, unread: str) -> str | None:
    """The line for a validation where at most half of the responses have a readable answer."""
    return None if parse_rate > HALF else UNREAD.format(rest=_percent(1 - parse_rate), unread=unread)


def _line(metric: str, cause: Cause, steps: Sequence[Row], unread: str) -> str:
    """Its line, if it holds in enough of the last steps; else nothing."""
    values: list[float] = []
    responses = 0.0
    for row in reversed(steps):
        value = row.get(metric)
        if value is None or not cause.range[0] <= value <= cause.range[1]:
            return ""
        if cause.kind == "dead" and _dead_share(row) < MOST:
            return ""
        values.append(value)
        responses += row.get("count/samples") or 0
        if len(values) >= cause.steps and (len(values) == WINDOW or responses >= ENOUGH):
            mean = fmean(values)
            shares = {"share": _percent(mean), "rest": _percent(1 - mean)}
            return cause.line.format(**shares, row=steps[-1], unread=unread)
    return ""


def _percent(share: float) -> str:
    """Neither all nor none of what is only nearly so."""
    if share in (0.0, 1.0):
        return "all" if share else "none"
    return f"{min(max(share, 0.001), 0.999):.1%}".replace(".0%", "%")


def _dead_share(row: Row) -> float:
    """The share of groups whose rewards are all the same; where an algorithm compares no groups,
    whether all rewards of the step are.
    """
    if "group/dead_frac" in row:
        return row["group/dead_frac"]
    return 1.0 if row.get("reward/std") in (None, 0.0) else 0.0
