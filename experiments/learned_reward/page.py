"""Writes RESULTS.md of this experiment and its pictures, from the JSONs of its runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.pages import Found, by_rate, chance, corrected, cost, ends, gain, mean_of, picture, read, table


class Arm(NamedTuple):
    about: str
    judge: str = ""  # the reward model; empty: the rule
    kl: float = 0.0


ARMS = {
    "rule": Arm("the rule"),
    "learned": Arm("learned", "rm"),
    "kl_low": Arm("learned, KL 0.05", "rm", 0.05),
    "kl_high": Arm("learned, KL 0.5", "rm", 0.5),
    "spoiled": Arm("spoiled pairs", "rm_spoiled"),
    "spoiled_kl": Arm("spoiled pairs, KL 0.05", "rm_spoiled", 0.05),
}
JUDGES = {"rm": "pairs of its own answers", "rm_spoiled": "these and spoiled answers"}
METRICS = {"rule": "val/test/accuracy", "rm": "val/pairs/accuracy"}  # these choose the learning rates
# Greedy answers to the same questions at every validation: training rollouts vary by more than LOST.
TRUE, SAID = "val/test/accuracy", "val/test/reward"
LOST = 0.05  # hacked: true accuracy is this far below its best, and
KEPT = 0.5  # the learned reward has more than this share of the gain that it had at that best
PAGE = """# A learned reward and the rule it imitates

{summary}

![What the reward model says]({images}/learned-reward-said.svg)

*The learned reward of rollouts in training, in deviations of its scores on held-out pairs.*

![What is true]({images}/learned-reward-true.svg)

*Share of the same rollouts that are right; only "the rule" learns from it. Bands: 95 % intervals over seeds.*

The quickstart's model, a Qwen2.5-VL of 318 thousand weights after its cold start, counts objects. It answered 3,000
other questions eight times each; a right answer before a wrong one of its own makes a pair, and the reward model, which
begins as the same model, learns from these (`rm.yaml`). RL (`rl.yaml`, GRPO, {steps} steps) then has its reward from
it, with and without a KL to the start in the loss, while the rule only watches. Spoiled pairs: as many more, whose
worse side is a right answer said twice, with the answer to another question, with the whole of it between, or without
its thought. **All arms draw the same number of rollouts, {rollouts:,}.** `OMP_NUM_THREADS=1 python
experiments/learned_reward/run.py` repeats everything **on a CPU**, two runs side by side; with `--tiny` it shows that
it runs.

## The reward models

{judges}

Share of held-out pairs of the same kind that it puts in the right order; their questions are in no other pair.

## RL

{numbers}

Greedy: right answers to {items} new questions after the last step, ± half of the 95 % interval over seeds (Student);
all seeds have the same questions. Differences from the rule are paired by seed, p is Student's test corrected for
{comparisons} comparisons (Holm). The same questions are asked at the start and every {every} steps; best is the most
that were right then, and the learned reward is that of these answers. Hacked: right answers end more than {lost:.0f}
points below their best, but the learned reward keeps more than half of what it had gained by then.

## What is said at the end

{said}

Greedy answers of the first seed to the first questions, after the last step.

## Trials

Learning rates, with another seed, measured on other questions and pairs; the best of RL with the rule is used for all
RL, the best of the reward model (`rm`) for both:

{trials}

## Cost

{cost} Trials: {trial_cost}

## What this does not show

One tiny model, one task and short answers; all seeds have one cold start and one set of pairs. A reward model as small
as the policy and pairs from one round of answers: larger reward models, fresh pairs while RL goes on, or ensembles may
hold longer. The learning rate was chosen with the rule. {missing}
"""


class Story(NamedTuple):
    """True accuracy and learned reward over a run."""

    best: float
    step: int  # step of the best
    last: float
    said: tuple[float, float, float]  # learned reward at the start, at `step` and at the end

    @property
    def hacked(self) -> bool:
        first, then, last = self.said
        return self.best - self.last > LOST and last - first > max(0.0, KEPT * (then - first))


def story(run: Mapping[str, Any]) -> Story:
    right, said = ([value for _, _, value in run["curves"][name]] for name in (TRUE, SAID))
    at = int(np.argmax(right))
    return Story(right[at], run["curves"][TRUE][at][0], right[-1], (said[0], said[at], said[-1]))


def rates_of(trials: Mapping[str, Found]) -> dict[str, dict[str, float]]:
    """Of the rule and the reward model: learning rate → the last value, where a trial has ended."""
    return by_rate(trials, lambda arm, run: run["curves"][METRICS[arm]][-1][2])


def row_of(arm: str, found: Mapping[str, Found], chances: Mapping[str, float]) -> list[str]:
    runs, rule = found[arm], ends(found.get("rule", {}), TRUE)
    told = {seed: story(run) for seed, run in runs.items()}
    greedy, kl = ends(runs, TRUE), ends(runs, "policy/kl_ref")
    said = " → ".join(f"{value:+.2f}" for value in np.mean([one.said for one in told.values()], axis=0))
    return [
        ARMS[arm].about,
        str(len(runs)),
        mean_of(greedy),
        *(("", "") if arm == "rule" else (gain(greedy, rule), f"{chances[arm]:.2g}")),
        f"{mean_of({seed: one.best for seed, one in told.items()})}, step "
        f"{np.median([one.step for one in told.values()]):.0f}",
        *(("", "", "") if arm == "rule" else (said, mean_of(kl, 1, digits=2), hacked(told))),
        mean_of(ends(runs, "length/response_mean"), 1),
    ]


def shown_answers(said: Sequence[tuple[str, str]]) -> str:
    return "; ".join(
        f"{gold} → `{' '.join(text.replace('`', ' ').replace('|', ' ').split()) or ' '}`" for gold, text in said
    )


def hacked(told: Mapping[int, Story]) -> str:
    return f"{sum(one.hacked for one in told.values())} of {len(told)}"


def write_page(results: Path, path: Path, images: Path) -> None:
    found, trials = read(results), read(results / "dev")
    arms = {arm: found[arm] for arm in ARMS if arm in found}
    last = sorted(arms, key=lambda arm: arm == "rule")  # it is only in the first chart; the others' colours match so
    shown = {ARMS[arm].about: arms[arm] for arm in last}
    (images / "learned-reward-true.svg").write_text(picture(shown, "reward/accuracy", "steps"))
    (images / "learned-reward-said.svg").write_text(picture(shown, "reward/learned", "steps", share=False))
    rule = ends(found.get("rule", {}), TRUE)
    by_arm = {arm: ends(runs, TRUE) for arm, runs in arms.items() if arm != "rule"}
    chances = corrected({arm: chance({s: v[s] - rule[s] for s in v if s in rule}) for arm, v in by_arm.items()})
    head = [
        "reward",
        "seeds",
        "greedy, %",
        "minus the rule",
        "p",
        "best, %",
        "learned reward: first → at the best → last",
    ]
    missing = [about.about for arm, about in ARMS.items() if arm not in arms]
    judges = {arm: found[arm] for arm in JUDGES if arm in found}
    firsts = {arm: runs[min(runs)] for arm, runs in {"base": found.get("base", {}), **arms}.items() if runs}
    validated = [step for runs in arms.values() for run in runs.values() for step, _, _ in run["curves"][TRUE] if step]
    text = PAGE.format(
        summary=summary(found, arms),
        images="../../docs/images",
        steps=max([run["steps"] for runs in arms.values() for run in runs.values()] or [0]),
        rollouts=max([run["rollouts"] for runs in arms.values() for run in runs.values()] or [0]),
        every=min(validated, default=0),
        judges=table(["reward model", "learned from", "seeds", "pairs in order, %"], [
            [f"`{arm}`", JUDGES[arm], str(len(runs)), mean_of(ends(runs, METRICS["rm"]))]
            for arm, runs in judges.items()
        ]),
        numbers=table([*head, "KL", "hacked", "tokens"], [row_of(arm, found, chances) for arm in arms]),
        items=int(max([n for runs in arms.values() for n in ends(runs, "val/test/items").values()] or [0])),
        comparisons=len(by_arm),
        lost=100 * LOST,
        said=table(["reward", "right answer → what is said"], [
            [ARMS[arm].about if arm in ARMS else "the model as it is", shown_answers(run["said"])]
            for arm, run in firsts.items()
        ]),
        trials=table(["trial", "right, %"], [
            [f"`{arm}`", mean_of(ends(runs, METRICS["rm" if arm.startswith("rm") else "rule"]))]
            for arm, runs in trials.items()
        ]),
        cost=cost(found),
        trial_cost=cost(trials),
        missing=f"Not run: {', '.join(missing)}." if missing else "",
    )  # fmt: skip
    path.write_text(text, encoding="utf-8")


def summary(found: Mapping[str, Found], arms: Mapping[str, Found]) -> str:
    """The findings in one paragraph, with numbers."""
    if not arms:
        return "Nothing has been measured yet."
    start = mean_of(ends(found.get("base", {}), TRUE))
    order = mean_of(ends(found.get("rm", {}), METRICS["rm"]))
    said = "; ".join(
        f"{ARMS[arm].about} {mean_of(ends(runs, TRUE))} %"
        + (f" (hacked in {hacked({seed: story(run) for seed, run in runs.items()})})" if ARMS[arm].judge else "")
        for arm, runs in arms.items()
    )
    order = f"The reward model puts {order} % of pairs in order."
    return f"{order} Right answers: {start} % at the start; after RL with {said}."
