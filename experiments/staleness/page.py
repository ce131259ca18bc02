"""Writes RESULTS.md of this experiment and its picture, from the JSONs of its runs."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from experiments.pages import Found, chance, corrected, cost, ends, gain, mean_of, picture, read, table
from experiments.systems.page import LEARNED, SCORE, SMOOTH, differences, mean_over_steps, start_of

AGES = (1, 4, 16)
FIRST, PLAIN = "now", "_unweighed"
ABOUT = {
    FIRST: "0",
    **{f"age_{k}{plain}": f"{k}{', unweighed' if plain else ''}" for k in AGES for plain in ("", PLAIN)},
}
PAGE = """# How old may tokens be?

{summary}

Rollouts that run ahead are trained when the policy is some steps further. `rollout.ahead=k rollout.replicas=1
rollout.at_update=drain` makes every token exactly k steps old (in the first k steps of a run as old as can be), which
scheduling alone does not: with `at_update=interrupt` tokens of this task are less than one step old on average,
whatever k is. The task, its sizes and the cold starts are those of [experiments/systems](../systems/RESULTS.md):
{steps} GRPO steps of 32 questions with 8 rollouts each. Tokens are weighed by truncated importance (`tis.token`, the
default), or not (`algorithm.correct=[]`). Age 0 is the engine inside the trainer. `OMP_NUM_THREADS=1 python
experiments/staleness/run.py` repeats everything **on a CPU**.

{arms}

*Held-out*: greedy accuracy on 600 scenes at the end; ± is half of the 95 % interval over seeds (Student).
*Difference*: to age 0, paired by seed; *p*: Student's test of it, corrected for {comparisons} comparisons (Holm).
*Worst*: the lowest right share of training rollouts, as a mean of {smooth} steps, after the first ten, mean over
seeds. *Effective*: the least effective sample size of a step.

![Right rollouts in training]({images}/staleness.svg)

*Rollouts of training that are right by age, means of {smooth} steps, with 95 % intervals over seeds.*

## Cost

{cost}

## What this does not show

A tiny model, one task, {steps} steps, one learning rate (5e-4, large steps of a small model) and one update per step:
how old tokens may be depends on how far an update moves the policy. A run of {steps} steps has few steps at age 16.
Float32: the engine's log-probs differ from the trainer's by age alone.
"""


def write_page(results: Path, path: Path, images: Path) -> None:
    stored = read(results)
    found = {arm: stored[arm] for arm in ABOUT if arm in stored}
    first = found.get(FIRST, {})
    apart = {arm: differences(runs, first) for arm, runs in found.items() if arm != FIRST}
    chances = corrected({arm: chance(gains) for arm, gains in apart.items()})
    drawn = {ABOUT[arm]: runs for arm, runs in found.items() if arm != f"age_1{PLAIN}"}  # one colour each
    (images / "staleness.svg").write_text(picture(drawn, LEARNED, "steps", SMOOTH))
    head = ["age in steps", "seeds", "held-out, %", "difference", "p", "worst, %", "mean age", "effective, %"]
    text = PAGE.format(
        summary=summary(found, first, chances),
        arms=table(head, [row(arm, runs, first, chances) for arm, runs in found.items()]),
        steps=max((run["steps"] for runs in found.values() for run in runs.values()), default=0),
        comparisons=len(apart),
        smooth=SMOOTH,
        cost=cost(stored),
        images="../../docs/images",
    )
    path.write_text(text, encoding="utf-8")


def row(arm: str, runs: Found, first: Found, chances: Mapping[str, float]) -> list[str]:
    ages = {seed: mean_over_steps(run, "data/staleness_mean") for seed, run in runs.items()}
    least = [point[2] for run in runs.values() for point in run["curves"].get("mismatch/ess", ())]
    lows = {}
    for seed, run in runs.items():
        values = [point[2] for point in run["curves"][LEARNED][10:]] or [run["curves"][LEARNED][-1][2]]
        width = min(SMOOTH, len(values))
        lows[seed] = float(np.convolve(values, np.ones(width) / width, "valid").min())
    return [
        *(ABOUT[arm], str(len(runs)), mean_of(ends(runs, SCORE))),
        *((gain(ends(runs, SCORE), ends(first, SCORE)), f"{chances[arm]:.2g}") if arm != FIRST else ("", "")),
        mean_of(lows),
        mean_of(ages, 1, digits=2).partition(" ")[0],
        f"{100 * min(least):.0f}" if least and PLAIN not in arm else "",
    ]


def summary(found: Mapping[str, Found], first: Found, chances: Mapping[str, float]) -> str:
    """The findings in one paragraph, with numbers."""
    score = ends(first, SCORE)
    said = "; ".join(f"{ABOUT[arm]}: {gain(ends(runs, SCORE), score)} (p {chances[arm]:.2g})"
                     for arm, runs in found.items() if arm != FIRST)  # fmt: skip
    learned = f"held-out accuracy {mean_of(start_of(first))} → {mean_of(score)} %"
    return (f"On a CPU, {len(first)} seeds: {learned} with tokens of the policy that is trained; with older ones, by "
            f"age in steps, in points: {said}.")  # fmt: skip
