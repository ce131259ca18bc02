"""Writes RESULTS.md of this experiment and its pictures, from the JSONs of its runs."""

from collections.abc import Mapping
from pathlib import Path

from experiments.counting import page
from experiments.pages import Found, best_rates, by_rate
from experiments.rl_or_sft.pictures import LOOKS

ARMS = page.ARMS
PAGE = """# RL against SFT on the same questions, small

{summary}

The quickstart's model, of random weights, learns to count with 400 demonstrations in three colours (the cold start),
then goes on with questions about pictures in six colours, by RL or by SFT, and is tested also on pictures that differ
from these in one thing. `OMP_NUM_THREADS=1 python experiments/rl_or_sft/run.py` repeats everything on a CPU; `--tiny`
shows that it runs. ± is half of the 95 % interval over seeds (Student), differences are paired by seed. Each seed has
weights, a cold start and training questions of its own; all have the same test questions, {items:.0f} of each kind of
picture.

## Arms

- RL: GRPO, the reward is whether the count is right (`rl.yaml`): 60 steps of 32 questions, 8 answers each.
- SFT on answers: the same questions with their answers, `<answer> 4 </answer>`: 240 steps of 64.
- SFT on worked answers: the same questions with what is seen, then the answer:
  `<think> red blue </think><answer> 2 </answer>`, as in the cold start: 240 steps of 64.

Each arm trains on 15,360 sequences, which RL takes in a quarter of the optimizer steps. Of all validated steps (three
of each run), that counts which does best on {items:.0f} further pictures.

## With how many questions

![Accuracy over the number of training questions]({images}/rl-or-sft-same.svg)

*New pictures like those of training, mean over seeds with its interval.*

![Accuracy over the number of training questions]({images}/rl-or-sft-new.svg)

*Mean over the other kinds of pictures.*

{accuracy}

{kinds}

## RL minus SFT, in points

{differences}

## While they train

![Accuracy over seconds]({images}/rl-or-sft-seconds.svg)

*New pictures like those of training, {largest} training questions, over the seconds of a run.*

## Trials

Learning rates were chosen by trials with 500 questions, on other pictures with another seed. Every trial, %:

{trials}

## Cost

{cost} A run took {seconds} seconds (median). Trials: {trial_cost}

## What this does not show

A model of two hundred thousand numbers without any language, one kind of question, flat pictures: nothing of what a
pretrained model does. The learning rate was chosen with one number of questions and used for all. Worked answers are
what a program wrote, without a mistake, which costs more than answers wherever people have to write them.
"""


def chosen_rates(trials: Mapping[str, Found]) -> dict[str, str]:
    """Arm → the learning rate that did best on `choice`."""
    tried = {arm: runs for arm, runs in trials.items() if "@" in arm}
    return best_rates(by_rate(tried, lambda _, run: page.best(run, "choice")))


def write_page(results: Path, path: Path, images: Path) -> None:
    looks = {name: look.about for name, look in LOOKS.items()}
    page.write_page(results, path, images, name="rl-or-sft", text=PAGE, looks=looks)
