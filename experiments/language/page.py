"""Writes RESULTS.md of this experiment and its pictures, from the JSONs of its runs."""

from pathlib import Path

import numpy as np

from experiments.pages import Found, cost, ends, gain, mean_of, picture, read, table

ARMS = {
    "base": "the model as it is",
    "cold": "cold start: SFT on the solutions",
    "sft": "cold start, then SFT goes on",
    "grpo": "cold start, then GRPO",
    "dapo": "cold start, then DAPO",
}
LEVELS = ("one digit + one", "one * one", "two digits + one", "two + two", "two - two", "two * one")
PAGE = """# A real language model

{summary}

SmolLM2-135M-Instruct, from the 4-bit file of a public package. `python experiments/language/run.py --data data/gsm8k`
repeats everything on one GPU; `--tiny` shows that it runs, on a CPU. ± is half of the 95 % interval over
seeds (Student), differences are paired by seed.

## GSM8K

Arms start from the cold start of their seed and have the same seconds each ({seconds}, loading included, side by side
on one GPU); `sft.yaml` and `rl.yaml` have the settings. Trained on 6,973 questions; measured on the 1,319 of the test:
greedy accuracy (the last number is the answer), and with eight samples at temperature 1 of the first 400: pass@1, the
mean, and pass@8, whether one is right. All seeds have the same questions, so the intervals do not hold the chance of
the items.

{gsm8k}

![Share of right rollouts in training]({images}/language-gsm8k.svg)

*Rollouts of training that are right, at temperature 1, over the seconds of an arm.*

## Sums

`What is 47 + 8? Reply with the answer only.`, without a cold start or an example: GRPO alone (`arithmetic.yaml`).
200 sums of each level that are not in training, greedy; 20 where both numbers have one digit, of which there are 81.

{sums}

![Share of right rollouts in training]({images}/language-sums.svg)

## Trials

Settings were chosen on 500 rows held out of train and other sums, with another seed: the learning rate by pass@1 of
both, since greedy accuracy does not tell the three apart. Every trial:

{trials}

## Cost

{cost} Trials: {trial_cost}

## What this does not show

One small model with 4-bit weights, one set of questions, one prompt, {seconds} seconds of training for each arm: not
what these algorithms reach in hours, nor their order on other models. SFT took 18 times as many steps as GRPO in those
seconds, DAPO a quarter as many; at equal rollouts the order may differ. The learning rate was chosen for GRPO and used
for DAPO, too. Sums were drawn by us; a level that the model already masters says little, and where 3 + 5 is measured
5 + 3 may have been trained.
"""


def write_page(results: Path, path: Path, images: Path, seconds: int) -> None:
    found, trials = read(results), read(results / "dev")
    arms = {arm: found[arm] for arm in ARMS if arm in found}
    rl = {label: arms[label.lower()] for label in ("GRPO", "DAPO") if label.lower() in arms}
    (images / "language-gsm8k.svg").write_text(picture(rl, "reward/accuracy", "seconds"))
    sums = {"GRPO alone": found.get("sums_grpo", {})}
    (images / "language-sums.svg").write_text(picture(sums, "reward/accuracy", "seconds"))
    text = PAGE.format(
        summary=summary(found),
        seconds=seconds,
        gsm8k=gsm8k(arms),
        sums=levels(found.get("sums_base", {}), found.get("sums_grpo", {})),
        trials=table(
            ["trial", "GSM8K, greedy", "sums, greedy", "pass@1 of eight", "steps"],
            [trial(arm, runs) for arm, runs in trials.items()],
        ),
        cost=cost(found),
        trial_cost=cost(trials),
        images="../../docs/images",
    )
    path.write_text(text, encoding="utf-8")


def gsm8k(arms: dict[str, Found]) -> str:
    cold = ends(arms.get("cold", {}), "val/gsm8k/accuracy")
    before = ends(arms.get("cold", {}), "val/eight/pass@8")
    head = ["arm", "seeds", "greedy, %", "gain", "pass@1, %", "pass@8, %", "gain", "tokens", "steps", "rollouts"]
    rows = []
    for arm, runs in arms.items():
        greedy, eight = ends(runs, "val/gsm8k/accuracy"), ends(runs, "val/eight/pass@8")
        later = arm not in ("base", "cold")
        cells = [ARMS[arm], str(len(runs)), mean_of(greedy), gain(greedy, cold) if later else ""]
        cells += [mean_of(ends(runs, "val/eight/accuracy")), mean_of(eight), gain(eight, before) if later else ""]
        cells += [mean_of(ends(runs, "val/gsm8k/response_mean"), 1, digits=0)]
        rows.append(cells + [f"{np.mean([run[name] for run in runs.values()]):,.0f}" for name in ("steps", "rollouts")])
    return table(head, rows)


def levels(base: Found, grpo: Found) -> str:
    rows = []
    for level, about in enumerate(LEVELS, 1):
        before, after = (ends(runs, f"val/level{level}/accuracy") for runs in (base, grpo))
        rows.append([f"{level}: {about}", mean_of(before), mean_of(after)])
    for metric, about in (("accuracy", "all: pass@1"), ("pass@8", "all: pass@8")):
        rows.append([about, *(mean_of(ends(runs, f"val/eight/{metric}")) for runs in (base, grpo))])
    lengths = (mean_of(ends(runs, "val/eight/response_mean"), 1) for runs in (base, grpo))
    return table(["level", "before, %", "after GRPO, %"], [*rows, ["all: tokens", *lengths]])


def trial(arm: str, runs: Found) -> list[str]:
    by_level = [ends(runs, f"val/level{level}/accuracy") for level in range(1, len(LEVELS) + 1)]
    means = {seed: float(np.mean([values[seed] for values in by_level])) for seed in by_level[0]}
    steps = "/".join(str(run["steps"]) for run in runs.values())
    sampled = mean_of(ends(runs, "val/eight/accuracy"))
    return [f"`{arm}`", mean_of(ends(runs, "val/gsm8k/accuracy")), mean_of(means), sampled, steps]


def summary(found: dict[str, dict[int, dict]]) -> str:
    """The findings in one paragraph, with numbers."""
    greedy, eight = ({arm: ends(found.get(arm, {}), f"val/{name}") for arm in [*ARMS, "sums_base", "sums_grpo"]}
                     for name in ("gsm8k/accuracy", "eight/pass@8"))  # fmt: skip
    cold = f"GSM8K, greedy: {mean_of(greedy['base'])} % as it is, {mean_of(greedy['cold'])} % after a cold start."
    later = ", ".join(f"{name} {gain(greedy[name.lower()], greedy['cold'])}" for name in ("GRPO", "DAPO", "SFT"))
    passes = ", ".join(f"{name} {gain(eight[name.lower()], eight['cold'])}" for name in ("GRPO", "DAPO", "SFT"))
    ones = [mean_of(ends(found.get(arm, {}), "val/eight/accuracy")) for arm in ("sums_base", "sums_grpo")]
    return (f"{cold} For the same time from there, in points: {later}; pass@8: {passes}.\n"
            f"Sums, GRPO alone: {ones[0]} % → {ones[1]} % right, pass@8 {mean_of(eight['sums_base'])} % → "
            f"{mean_of(eight['sums_grpo'])} %.")  # fmt: skip
