"""Diagnoses early why little is learned, what it costs, and which option changes it; and what rollouts ahead save.

Averages the metrics of the last steps: as many as hold `ENOUGH` responses, `WINDOW` at most.

    >>> diagnose([{"policy/lr": 0.0}] * WINDOW)["policy/lr"]
    'nothing is learned: the learning rate is 0; set train.lr and look at train.schedule'
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from saccade.config.schema.presets import PRESETS

WINDOW = 5  # most steps that are averaged
ENOUGH = 128  # responses that suffice, in however few steps
MOST, HALF, QUARTER = 0.9, 0.5, 0.25

Row = Mapping[str, Any]  # the metrics of a step


class Cause(NamedTuple):
    """The line for a metric whose mean over the last steps lies in a range (low, high)."""

    line: str  # {share}: the mean in percent, {rest}: 100 % minus it, {row}: the newest value of each metric
    range: tuple[float, float] = (HALF, 1.0)
    steps: int = 1  # fewest steps, however many responses they hold

    def share(self, mean: float) -> float:
        """Share of the responses or groups affected: a range that begins at 0 is of a metric for which high is good."""
        return mean if self.range[0] else 1 - mean


# Nothing is learned, whatever the answers are like.
STOPS = {
    "policy/update_skipped": Cause(
        "{share} of the updates are skipped as non-finite; lower train.lr, look at the saved batches", steps=WINDOW
    ),
    "policy/lr": Cause("the learning rate is 0; set train.lr and look at train.schedule", (0.0, 0.0), WINDOW),
}
# Why answers earn no reward. In order: an earlier cause also produces the later ones.
ANSWERS = {
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
    "length/parse_rate": Cause(
        "{rest} of the responses have no answer that can be read{unread}; check prompt.format, the verifier's `order` "
        "and rollout.max_tokens, or teach the format first with `saccade sft`",
        (0.0, HALF),
    ),
    "turns/void_frac": Cause("{share} of the episodes end without an answer; check prompt.format, try `saccade sft`"),
    "reward/format": Cause(
        "{rest} of the responses miss the format; check prompt.format, try `saccade sft`", (0.0, QUARTER)
    ),
}
# Why groups give no training signal although their answers can be judged.
GROUPS = {
    "group/all_wrong_frac": Cause(
        "in {share} of the groups every response is wrong; use easier data, raise train.samples_per_prompt, "
        "or warm up with `saccade sft`"
    ),
    "group/all_right_frac": Cause(
        "in {share} of the groups every response is right; use harder data, or stop here", (1 - QUARTER, 1.0), WINDOW
    ),
    "group/dead_frac": Cause(
        "in {share} of the groups all members have the same reward; raise train.samples_per_prompt "
        "or rollout.temperature, or use data of other difficulty",
        (1 - QUARTER, 1.0),
        WINDOW,
    ),
}
# Used if none of the others holds.
UNEXPLAINED = {
    "policy/empty_step": Cause(
        "no group is left to train on; see group/dropped/… and group/constant_…, ease algorithm.filter"
    ),
    "policy/grad_norm": Cause(
        "rewards differ but the gradient is 0; check model.train and algorithm.exclude_status", (0.0, 0.0), WINDOW
    ),
}
# Added to a cause.
NOTES = {
    "group/live_frac": Cause(
        "only {share} of the sampled groups teach anything: each costs {row[group/rollouts_per_live]:,.0f} rollouts; "
        "use data of medium difficulty, raise train.samples_per_prompt, or warm up with `saccade sft`",
        (1e-9, QUARTER),
    ),
    "group/side_signal_frac": Cause(
        "in {share} of the groups that teach anything all answers are equally right or wrong: format, length or "
        "another side term decides there; lower its weight in reward.terms, or see reward.combine"
    ),
    "mismatch/ess": Cause(
        "corrections leave {share} of what is sampled (effective sample size), with tokens up to "
        "{row[data/staleness_max]:.0f} steps old; lower rollout.ahead or train.lr",
        (0.0, HALF),
    ),
}
TRAINED = STOPS | ANSWERS | GROUPS | UNEXPLAINED


def diagnose(history: Sequence[Row], unread: str = "") -> dict[str, str]:
    """Metric -> line of advice, from the last steps of `history` (metrics, oldest first); empty while all is well.
    `unread`: text that says where the verifier looked for an answer.

    Rows without any training metric (of a validation alone) are skipped.
    """
    steps = [row for row in history if not TRAINED.keys().isdisjoint(row)][-WINDOW:]
    stops, others, notes = (_holding(causes, steps) for causes in (STOPS, UNEXPLAINED, NOTES))
    causes = _first(stops) or _causes(steps) or _first(others)
    newest = {name: value for row in steps for name, value in row.items()}  # a step without signal lacks some
    lines = {name: _line(name, mean, unread, newest) for name, mean in (causes | notes).items()}
    if causes:
        name, dead = next(iter(causes)), min(map(_dead_share, steps))
        if dead == 1.0 or stops or name in UNEXPLAINED:
            lines[name] = f"nothing is learned: {lines[name]}"
        elif dead >= MOST:
            lines[name] = f"little is learned: {lines[name]}"
    return lines


def diagnose_answers(metrics: Row, unread: str) -> dict[str, str]:
    """The line for a validation most of whose responses are cut off or have no readable answer."""
    row = {f"length/{name}": metrics[name] for name in ("truncated_frac", "parse_rate") if name in metrics}
    held = _first_large(_holding(ANSWERS, [row] * WINDOW))
    return {name: _line(name, mean, unread, row) for name, mean in held.items()}


def advise_ahead(rows: Sequence[Row], phases: Mapping[str, float], config: Mapping[str, Any]) -> list[str]:
    """Whether answers of later steps should fill the time in which a step waits for its longest ones (docs/engines.md).
    Engines of their own are faster from two steps ahead on. Always full, they need the share of the rollout phases that
    a mean answer has of the longest one; a phase is 1 / (1 + ahead) of what the longest one takes.
    """
    names = config["algorithm"].get("preset") or ()
    gpus, rollout, options = config["run"].get("gpus", 1), phases.get("rollout", 0.0), config["rollout"]
    ahead, replicas = options.get("ahead", 0), options.get("replicas", 0)
    training = sum(phases.get(name, 0.0) for name in ("update", "logp_old", "logp_ref", "values"))
    mean, longest = (sum(row.get(f"length/response_{name}") or 0.0 for row in rows) for name in ("mean", "max"))
    refused = any(PRESETS.get(name, {}).get("on_policy") for name in ([names] if isinstance(names, str) else names))
    if refused or rollout < training or not 0 < mean <= longest / 2:
        return []
    share = rollout / (rollout + training)
    took = f"rollouts take {share:.0%} of the time, and a mean answer has {mean / longest:.0%} "
    tips = [] if ahead else ["to sample answers of the next step while the longest are written, use rollout.ahead=1"]
    if gpus > 1 and not replicas:
        full = rollout * min(1.0, (1 + ahead) * mean / longest)
        given = min(gpus - 1, math.ceil(gpus * full / (full + training)))
        beside = f"rollout.ahead={max(2, ahead)} rollout.replicas={given} run.gpus={gpus - given}"
        tips.append(f"to sample while the others train, which is faster from two steps ahead on, use {beside}")
    return [f"{took}of the tokens of the longest: {'; '.join(tips)}"] if tips else []


def _causes(steps: Sequence[Row]) -> dict[str, float]:
    """Means of the causes in ANSWERS, and of those in GROUPS unless the former explain nearly all (MOST)."""
    answers, groups = _first_large(_holding(ANSWERS, steps)), _first(_holding(GROUPS, steps))
    # Algorithms that compare no groups have no group/dead_frac: GROUPS count only if all rewards are the same.
    compared = all("group/dead_frac" in row or _dead_share(row) for row in steps)
    explained = any(ANSWERS[name].share(mean) >= MOST for name, mean in answers.items())
    return answers | (groups if compared and not explained else {})


def _holding(causes: Mapping[str, Cause], steps: Sequence[Row]) -> dict[str, float]:
    """The means of the causes that hold."""
    means = ((name, cause.range, _mean(name, cause, steps)) for name, cause in causes.items())
    return {name: mean for name, (low, high), mean in means if mean is not None and low <= mean <= high}


def _first(means: dict[str, float]) -> dict[str, float]:
    return dict(list(means.items())[:1])


def _first_large(means: dict[str, float]) -> dict[str, float]:
    """The first cause within QUARTER of the most frequent one, and always unreadable answers."""
    shares = {name: ANSWERS[name].share(mean) for name, mean in means.items()}
    large = {name: means[name] for name, share in shares.items() if share >= max(shares.values()) - QUARTER}
    return _first(large) | {name: mean for name, mean in means.items() if name == "length/parse_rate"}


def _mean(metric: str, cause: Cause, steps: Sequence[Row]) -> float | None:
    """Mean over the last steps with enough responses; None while they are too few, or one lacks the metric."""
    values: list[float] = []
    responses = 0.0
    for row in reversed(steps):
        if row.get(metric) is None:
            return None
        values.append(row[metric])
        responses += row.get("count/samples") or 0
        if len(values) >= cause.steps and (len(values) == WINDOW or responses >= ENOUGH):
            return fmean(values)
    return None


def _line(metric: str, mean: float, unread: str, row: Row) -> str:
    shares = {"share": _percent(mean), "rest": _percent(1 - mean)}
    return (TRAINED | NOTES)[metric].line.format(**shares, row=row, unread=unread)


def _percent(share: float) -> str:
    """Percent; "all" and "none" for exactly 1 and 0 only, all else is rounded to 0.1 to 99.9 %."""
    if share in (0.0, 1.0):
        return "all" if share else "none"
    return f"{min(max(share, 0.001), 0.999):.1%}".replace(".0%", "%")


def _dead_share(row: Row) -> float:
    """Share of groups without signal: dropped by dynamic sampling, or with the same reward for all members. If the
    algorithm compares no groups: 1 if all rewards of the step are the same, else 0.
    """
    if "group/dead_frac" in row:
        return max(row["group/dead_frac"], 1 - row.get("group/kept_frac", 1.0))
    return 1.0 if row.get("reward/std") in (None, 0.0) else 0.0
