"""Writes RESULTS.md of this experiment and its pictures, from the JSONs of its runs."""

from collections.abc import Mapping
from pathlib import Path

from experiments.foundation import page
from experiments.pages import Found, best_rates, by_rate
from experiments.text_first.rows import GROUPS

HALF = 30  # steps of the text-only stage, and of the stage with pictures after it
PAGE = """# Text first, then pictures, small

{summary}

The quickstart's model, of random weights, counts objects that are drawn, or listed (`red blue red how many objects?`).
`OMP_NUM_THREADS=1 python experiments/text_first/run.py` repeats everything on a CPU; `--tiny` shows that it runs. ± is
half of the 95 % interval over seeds (Student), differences are paired by seed. Each seed has weights, a cold start and
questions to learn from of its own; all have the same test questions, {items:.0f} of each set.

## Arms

Every arm goes on from the cold start of its seed: SFT on 400 worked answers (`<think> red blue red </think><answer> 3
</answer>`) about three colours, a quarter each of "how many objects?" and "how many red objects?", in words and with
pictures. RL is GRPO on the first of these questions, in six colours; the reward is whether the count is right
(`rl.yaml`). **All have the same number of rollouts, {rollouts}**, half of them in each stage where there are two, and
half as many where it says so.

- Kinds seen: {seen}, of 1 to 6. The only one in RL.
- Kinds held out: {held}. In the cold start, not in RL.
- More: {far}. Neither in the cold start nor in RL.

{accuracy}

*Greedy accuracy, %.*

## In points more than the cold start

{gains}

## Against RL with pictures alone, at equal rollouts

{against}

![Share of right rollouts with pictures]({images}/text-first-pictures.svg)

*Rollouts with pictures that are right in training, at temperature 1, over steps; after the text-only stage the steps
begin where that ends.*

![Share of right rollouts in text]({images}/text-first-text.svg)

*The same in text.*

## Trials

Learning rates were chosen on other rows, with another seed and half of the steps. Every trial, mean of the kinds seen,
%:

{trials}

## Cost

{cost} Trials: {trial_cost}

## What this does not show

A model of three hundred thousand weights without any language, and one task: counting what is listed is easier than
counting what is seen, so text leaves little to learn. The cold start has shown how answers are worked out in both
forms. The second stage begins with a new optimizer and warm-up.
"""


def chosen_rates(trials: Mapping[str, Found]) -> dict[str, str]:
    """Form → the learning rate that did best on its own questions of the kind seen."""
    tried = {arm: runs for arm, runs in trials.items() if "@" in arm}
    last = "val/seen_{}/accuracy"
    return best_rates(by_rate(tried, lambda form, run: run["curves"][last.format(form)][-1][2]))


def write_page(results: Path, path: Path, images: Path) -> None:
    said = {"seen": "kinds seen", "held": "kinds held out", "far": "more"}
    page.write_page(results, path, images, name="text-first", text=PAGE, said=said, kinds=GROUPS, half=HALF)
