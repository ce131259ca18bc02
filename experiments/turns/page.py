"""Writes RESULTS.md of this experiment and its picture, from the JSONs of its runs."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from experiments.pages import Found, by_size, chance, cost, ends, gain, half_width, mean_of, read, table

ARMS = {
    "cold": "cold start",
    "masked": "RL, over-turn masking",
    "unmasked": "RL, no masking",
    "cold_chats": "cold start with chats",
    "masked_chats": "RL from it, over-turn masking",
    "unmasked_chats": "RL from it, no masking",
    "ahead1": "masked, `rollout.ahead=1`",
    "ahead1_unweighed": "masked, `rollout.ahead=1 algorithm.correct=[]`",
    "ahead4": "masked, `rollout.ahead=4`",
    "ahead4_unweighed": "masked, `rollout.ahead=4 algorithm.correct=[]`",
}
PAIRS = {"cold": ("masked", "unmasked"), "cold_chats": ("masked_chats", "unmasked_chats")}
LIMITS = (1, 2, 4, 6, 8, 12, 16, 32)
BROKEN = ("turn_length", "eos_no_answer")  # a call truncated at 16 tokens; a turn without a call or an answer
PAGE = """# Mini-o3: searching for longer than in training

{summary}

A small ring is hidden in one of 16 places of a picture and can be read only after a zoom on its place ([the
task](../../docs/visual_search.md)); a guess is right in a quarter of the cases. The model has random weights (374
thousand) and learns to read and to chat about many pictures, then from 600 searches of at most six turns, then by 80
GRPO steps with at most six turns. With masking, episodes that are over before an answer are left out of the loss.
`python experiments/turns/run.py` repeats everything on one GPU, with `--at-once 2` on two cores; `--tiny` shows that it
runs.

**All RL arms draw the same number of rollouts, {rollouts:,}.** Percent right with so many turns allowed at test time,
256 scenes with one answer each, the same for all seeds; ± is half of the 95 % interval over seeds (Student):

{accuracy}

![Right answers by turns allowed]({images}/turns.svg)

## Masked against unmasked, 32 turns

From the same cold start of each seed, in points; the chance is that of Student's test, not corrected for two starts:

{pairs}

## Why seeds differ

A search of more than six turns was never trained. *Broken* are episodes of 32 turns that end by a turn without a whole
call or answer. If seeds differ in that, accuracy falls where more are broken; *r* is the correlation over seeds. The
second kind of cold start keeps 200 of the long chats among the 600 demonstrations, as one would keep conversations in a
cold start of a pretrained model: the same number of demonstrations is seen as often.

{broken}

## Rollouts that run ahead

With masking, from the same cold starts: steps are trained on tokens that older weights sampled, weighed by truncated
importance (`tis.token`) or not. Differences to `rollout.ahead=0` of the same seed, in points:

{ahead}

## Trials

{trials}

## Cost

{cost} Trials: {trial_cost}

## What this does not show

One drawn task and one small model, which has no language to fall back on: a pretrained model breaks more rarely in late
turns. Six turns and 16 places were chosen so that patience pays; where a guess pays more, or a search ends within the
limit, masking has less to do.
"""

TRIED = "Settings were tried on other scenes, with another seed; percent right with 6 and with 32 turns:\n\n"


def write_page(results: Path, path: Path, images: Path) -> None:
    found, trials = read(results), read(results / "dev")
    arms = {arm: found[arm] for arm in ARMS if arm in found}
    drawn = {ARMS[arm]: within(arms[arm]) for arm in ("masked", "unmasked", "masked_chats", "unmasked_chats", "cold")
             if arm in arms}  # fmt: skip
    (images / "turns.svg").write_text(by_size(drawn, "turns allowed at test time"))
    ahead = [arm for arm in arms if arm.startswith("ahead")]
    text = PAGE.format(
        summary=summary(arms),
        rollouts=max((run["rollouts"] for runs in arms.values() for run in runs.values()), default=0),
        accuracy=table(
            ["arm", "seeds", *map(str, LIMITS)],
            [[ARMS[arm], str(len(runs)), *map(mean_of, within(runs).values())] for arm, runs in arms.items()],
        ),
        pairs=table(
            ["start", "masked, %", "unmasked, %", "difference", "by seed", "chance of it without an effect"],
            [compared(arms, start) for start in PAIRS if start in arms],
        ),
        broken=table(
            ["arm", "right, % by seed", "broken, % by seed", "broken, %", "r"],
            [broken_row(arm, runs) for arm, runs in arms.items()],
        ),
        ahead=table(["arm", "seeds", "6 turns", "32 turns", "mean age of a token, steps", "effective samples, %"], [
            ahead_row(arm, arms) for arm in ahead
        ]) if ahead else "Not run.",
        trials=TRIED + table(["trial", "6 turns", "32 turns", "broken, %"], [
            trial(arm, runs) for arm, runs in trials.items() if arm not in ("read", "chat")  # nothing is measured there
        ]) if trials else "None was run before those of this page.",
        cost=cost(found),
        trial_cost=cost(trials),
        images="../../docs/images",
    )  # fmt: skip
    path.write_text(text, encoding="utf-8")


def within(runs: Found) -> dict[int, dict[int, float]]:
    """Accuracy within a limit of turns: limit → seed → share of right answers."""
    sets = {name.rpartition("/")[0] for run in runs.values() for name in run["curves"] if name.endswith("/accuracy")}
    (name,) = sets - {"reward"} or {"val/val"}
    return {limit: ends(runs, f"{name}/accuracy_within_{limit}_turns") for limit in LIMITS}


def broken(runs: Found) -> dict[int, float]:
    """Share of episodes that end in BROKEN, by seed; a run without such episodes has no such metric."""
    of_all = [(seed, name, curve[-1][2]) for seed, run in runs.items() for name, curve in run["curves"].items()]
    return {seed: sum(value for one, name, value in of_all if one == seed and name.endswith(BROKEN)) for seed in runs}


def broken_row(arm: str, runs: Found) -> list[str]:
    right, lost = within(runs)[LIMITS[-1]], broken(runs)
    columns = [[100 * values[seed] for seed in right] for values in (right, lost)]
    varied = len(right) > 2 and min(map(np.std, columns)) > 0
    shown = (" ".join(f"{value:.0f}" for value in column) for column in columns)
    return [ARMS[arm], *shown, mean_of(lost), f"{np.corrcoef(*columns)[0, 1]:+.2f}" if varied else "-"]


def compared(arms: Mapping[str, Found], start: str) -> list[str]:
    masked, unmasked = (within(arms.get(arm, {}))[LIMITS[-1]] for arm in PAIRS[start])
    apart = {seed: masked[seed] - unmasked[seed] for seed in masked if seed in unmasked}
    by_seed = " ".join(f"{100 * value:+.0f}" for value in apart.values())
    return [ARMS[start], mean_of(masked), mean_of(unmasked), gain(masked, unmasked), by_seed, f"{chance(apart):.2g}"]


def ahead_row(arm: str, arms: Mapping[str, Found]) -> list[str]:
    runs, beside = within(arms[arm]), within(arms.get("masked", {}))
    apart = (gain(runs[limit], beside[limit]) for limit in (6, LIMITS[-1]))
    age, effective = (over_steps(arms[arm], metric) for metric in ("data/staleness_mean", "mismatch/ess"))
    return [ARMS[arm], str(len(arms[arm])), *apart, mean_of(age, scale=1, digits=2), mean_of(effective)]


def over_steps(runs: Found, metric: str) -> dict[int, float]:
    """Mean of a metric over stored steps, by seed; mismatch/ess exists only in runs with importance weights."""
    curves = {seed: run["curves"][metric] for seed, run in runs.items() if metric in run["curves"]}
    return {seed: float(np.mean([value for *_, value in curve])) for seed, curve in curves.items()}


def trial(arm: str, runs: Found) -> list[str]:
    return [f"`{arm}`", *(mean_of(within(runs)[limit]) for limit in (6, LIMITS[-1])), mean_of(broken(runs))]


def summary(arms: Mapping[str, Found]) -> str:
    """The findings in one paragraph, with numbers."""
    said = []
    for start, names in PAIRS.items():
        masked, unmasked = (within(arms.get(arm, {}))[LIMITS[-1]] for arm in names)
        if min(len(masked), len(unmasked)) < 2:
            continue
        a, b = ([100 * value for value in values.values()] for values in (masked, unmasked))
        gap = abs(float(np.mean(a)) - float(np.mean(b))) - half_width(a) - half_width(b)
        said.append(f"after a {ARMS[start]} {mean_of(masked)} % with masking and {mean_of(unmasked)} % without, "
                    f"intervals that {'do not overlap' if gap > 0 else 'overlap'}")  # fmt: skip
    return "Trained with 6 turns, tested with 32: " + ("; ".join(said) or "too few seeds") + "."
