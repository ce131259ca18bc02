"""Writes RESULTS.md of this experiment and its pictures, from the JSONs of its runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.pages import Found, by_size, cost, gain, mean_of, picture, read, table
from experiments.scenes import SPLITS

ARMS = {"rl": "RL", "answers": "SFT on answers", "worked": "SFT on worked answers"}
LOOKS = {name: look.about for name, look in SPLITS.items()}  # of the test pictures
PAGE = """# RL against SFT on the same questions

{summary}

The small model of [experiments/smolvlm](../smolvlm) is asked to count and to compare places in flat pictures, which it
has not seen before: how many, more of these than of those, is this left of that, what is the lowest.
`python experiments/counting/run.py` repeats everything on one GPU; `--tiny` shows that it runs, on a CPU. ± is half of
the 95 % interval over seeds (Student), differences are paired by seed. Each seed has other training questions; all
have the same test questions, {items:.0f} of each kind of picture, so the intervals do not hold the chance of the items.

## Arms

- RL: GRPO, the reward is whether the answer is right (`rl.yaml`).
- SFT on answers: the same questions with their answers (`sft.yaml`).
- SFT on worked answers: the same questions with what is looked at, then the answer: `blue bar, blue circle. Answer: 2`.

All have the same seconds ({seconds}, loading and validations included, side by side on one GPU), and of all the step
counts that does best on {items:.0f} further pictures, among those that were validated.

## With how many questions

![Accuracy over the number of training questions]({images}/counting-same.svg)

*New pictures like those of training, mean over seeds with its interval.*

![Accuracy over the number of training questions]({images}/counting-new.svg)

*Mean over the other kinds of pictures.*

{accuracy}

{kinds}

## RL minus SFT, in points

{differences}

## While they train

![Accuracy over seconds]({images}/counting-seconds.svg)

*New pictures like those of training, {largest} training questions, over the seconds of a run.*

## Trials

Settings were chosen with other training questions and other items. Every trial, %:

{trials}

## Cost

{cost} Trials: {trial_cost}

## What this does not show

One small model, drawn pictures, five kinds of questions, {seconds} seconds for each run: not how far any arm gets in
hours. The learning rate was chosen with one number of questions and used for all. RL answers at once, as the model
did before; a policy that was first taught to work answers out was not tried. Worked answers are what a program wrote,
without a mistake, which costs more than answers wherever people have to write them.
"""


def write_page(
    results: Path,
    page: Path,
    images: Path,
    *,
    name: str = "counting",
    text: str = PAGE,
    looks: Mapping[str, str] = LOOKS,
) -> None:
    """`looks`: test set → what its pictures show, `same` first; `name`: of the pictures of this page."""
    found, trials, new = read(results), read(results / "dev"), [look for look in looks if look != "same"]
    sizes = sorted({int(arm.rpartition("_")[2]) for arm in found if "_" in arm})
    largest = sizes[-1] if sizes else 0
    for part, asked in (("same", ["same"]), ("new", new)):
        arms = {ARMS[arm]: {n: mean_over(found.get(f"{arm}_{n}", {}), asked) for n in sizes} for arm in ARMS}
        (images / f"{name}-{part}.svg").write_text(by_size(arms, "training questions"))
    curves = {label: found.get(f"{arm}_{largest}", {}) for arm, label in ARMS.items()}
    (images / f"{name}-seconds.svg").write_text(picture(curves, "val/same/accuracy", "seconds", smooth=1))
    runs = [run for arm, seeds in found.items() if "_" in arm for run in seeds.values()]
    text = text.format(
        summary=summary(found, sizes, new),
        items=max((run["curves"]["val/same/items"][-1][2] for run in runs), default=0),
        seconds=f"{np.median([run['seconds'] for run in runs]):.0f}" if runs else "no",
        largest=f"{largest:,}",
        accuracy=accuracies(found, sizes, [*looks]),
        kinds="; ".join(f"*{look}*: {about}" for look, about in looks.items()) + ".",
        differences=differences(found, sizes, new),
        trials=table(
            ["trial", "like training", "others", "steps"],
            [trial(arm, runs, new) for arm, runs in trials.items() if arm != "cold"],
        ),
        cost=cost(found),
        trial_cost=cost(trials),
        images="../../docs/images",
    )
    page.write_text(text, encoding="utf-8")


def best(run: Mapping[str, Any], look: str) -> float:
    """Accuracy on a set after the step that is best on the set `choice`."""
    step = max(run["curves"]["val/choice/accuracy"], key=lambda point: point[2])[0]
    return next(value for at, _, value in run["curves"][f"val/{look}/accuracy"] if at == step)


def mean_over(runs: Found, looks: list[str]) -> dict[int, float]:
    return {seed: float(np.mean([best(run, look) for look in looks])) for seed, run in runs.items()}


def accuracies(found: Mapping[str, Found], sizes: list[int], looks: list[str]) -> str:
    base = found.get("base", {})
    rows = (
        [["as it is", "", str(len(base)), *(mean_of(mean_over(base, [look])) for look in looks), "", ""]]
        if base
        else []
    )
    for size in sizes:
        for arm, label in ARMS.items():
            runs = found.get(f"{arm}_{size}", {})
            cells = [mean_of(mean_over(runs, [look])) for look in looks]
            made = [
                mean_of({seed: run[name] for seed, run in runs.items()}, 1, digits=0) for name in ("steps", "rollouts")
            ]
            rows.append([label, f"{size:,}", str(len(runs)), *cells, *made])
    return table(["arm", "questions", "seeds", *(f"{look}, %" for look in looks), "steps", "rollouts"], rows)


def differences(found: Mapping[str, Found], sizes: list[int], new: list[str]) -> str:
    rows = []
    for size in sizes:
        rl, *others = (found.get(f"{arm}_{size}", {}) for arm in ARMS)
        for label, runs in zip([*ARMS.values()][1:], others, strict=True):
            cells = [gain(mean_over(rl, looks), mean_over(runs, looks)) for looks in (["same"], new)]
            rows.append([f"{size:,}", label, *cells])
    return table(["questions", "RL minus", "like training", "other kinds"], rows)


def trial(arm: str, runs: Found, new: list[str]) -> list[str]:
    steps = "/".join(str(run["steps"]) for run in runs.values())
    return [f"`{arm}`", mean_of(mean_over(runs, ["same"])), mean_of(mean_over(runs, new)), steps]


def summary(found: Mapping[str, Found], sizes: list[int], new: list[str]) -> str:
    """The findings in one paragraph, with numbers: with the fewest questions and with the most."""
    return " ".join(_finding(found, size, new) for size in (*sizes[:1], *sizes[1:][-1:])) or "Nothing was run."


def _finding(found: Mapping[str, Found], size: int, new: list[str]) -> str:
    said = [
        f"{label} {mean_of(mean_over(runs, ['same']))} % like training and {mean_of(mean_over(runs, new))} % elsewhere"
        for arm, label in ARMS.items()
        if (runs := found.get(f"{arm}_{size}"))
    ]
    return f"With {size:,} training questions: {'; '.join(said)}."
