"""Writes RESULTS.md of this experiment and its pictures, from the JSONs of its runs."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from experiments.foundation.asked import FORMS, GROUPS
from experiments.pages import Found, cost, ends, gain, mean_of, picture, read, table

HALF = 40  # steps of the text-only stage, and of the stage with pictures after it
ARMS = {
    "base": "the model as it is",
    "cold": "cold start, which all below begin with",
    "foundation": "RL in text, half of the rollouts",
    "text": "RL in text",
    "pictures": "RL with pictures",
    "mixed": "RL in text and with pictures, mixed",
    "both": "RL in text, then with pictures",
}
SETS = [(group, form) for form in FORMS for group in ("seen", "held", "far")]
SAID = {"seen": "kinds seen", "held": "kinds held out", "far": "diagrams"}
ASKED = {
    ("solids", "all"): "how many objects", ("solids", "count"): "how many of a colour or shape",
    ("solids", "side"): "is this left of that", ("charts", "difference"): "how much higher",
    ("charts", "compare"): "is this higher than that", ("solids", "compare"): "more of these than of those",
    ("solids", "most"): "what is the lowest, the leftmost", ("charts", "which"): "which is the highest",
    ("charts", "value"): "a value", ("diagrams", "next"): "where an arrow leads",
    ("diagrams", "exist"): "is there an arrow", ("diagrams", "count"): "how many boxes or arrows",
}  # fmt: skip
KINDS = {group: ", ".join(ASKED[one] for one in asked) for group, asked in GROUPS.items()}
PAGE = """# Text first, then pictures

{summary}

The small model of [experiments/smolvlm](../smolvlm) answers questions about solids and charts, once from the picture
and once from the same facts in words (`red cube (84%, 13%); …`, `Sales: apples 12, pears 5.`).
`python experiments/foundation/run.py` repeats everything on one GPU; `--tiny` shows that it runs, on a CPU. ± is half
of the 95 % interval over seeds (Student), differences are paired by seed. All seeds have the same questions to learn
from and the same test questions, {items:.0f} of each set, so the intervals do not hold the chance of the items.

## Arms

Every arm goes on from the cold start of its seed: SFT on worked answers (`apples 12, pears 5, 12 - 5 = 7. Answer: 7`)
to a thousand questions of the kinds seen, in words and with pictures. RL is GRPO; the reward is whether the answer is
right (`rl.yaml`). **All have the same number of rollouts, {rollouts}**, half of them in each stage where there are two,
and half as many where it says so.

- Kinds seen, the only ones in the cold start and in RL: {seen}.
- Kinds held out: {held}.
- Diagrams, which neither this model nor its base was trained on: {far}.

{accuracy}

*Greedy accuracy, %.*

## In points more than the cold start

{gains}

## Against RL with pictures alone, at equal rollouts

{against}

![Share of right rollouts with pictures]({images}/foundation-pictures.svg)

*Rollouts with pictures that are right in training, at temperature 1, over steps; after the text-only stage the steps
begin where that ends.*

![Share of right rollouts in text]({images}/foundation-text.svg)

*The same in text.*

## Trials

Settings were chosen on other items, with another seed. Every trial, mean of the kinds seen, %:

{trials}

## Cost

{cost} Trials: {trial_cost}

## What this does not show

One small model and drawn pictures; a few minutes of training. The cold start has already shown how answers are worked
out, in both forms, so this is about what RL adds to that, not about reasoning that comes from RL alone. Kinds held out
are new to the cold start and to RL, not to the model, which learned to read solids and charts by such questions. The
second stage begins with a new optimizer and warm-up. A picture gives its facts less surely than the words do: where
pictures gain less, that may be seeing, not reasoning.
"""


def write_page(
    results: Path,
    page: Path,
    images: Path,
    *,
    name: str = "foundation",
    text: str = PAGE,
    said: Mapping[str, str] = SAID,
    kinds: Mapping[str, str] = KINDS,
    half: int = HALF,
) -> None:
    """Group of questions → what the tables call it (`said`), which these are (`kinds`); `half`: steps of stage one."""
    found, trials = read(results), read(results / "dev")
    arms = {arm: found[arm] for arm in ARMS if arm in found}
    shown = {ARMS["pictures"]: arms.get("pictures", {}), ARMS["both"]: later(arms, half)}
    for form, curves in (("pictures", shown), ("text", {ARMS["text"]: arms.get("text", {})})):
        (images / f"{name}-{form}.svg").write_text(picture(curves, "reward/accuracy", "steps"))
    head = [f"{form}: {said[group]}" for group, form in SETS]
    whole = [run["rollouts"] for arm in ("text", "pictures") for run in arms.get(arm, {}).values()]
    items = [run["curves"]["val/seen_text/items"][-1][2] for runs in arms.values() for run in runs.values()]
    text = text.format(
        summary=summary(arms),
        items=max(items, default=0),
        rollouts=f"{max(whole, default=0):,}",
        accuracy=accuracies(arms, head),
        gains=compared(arms, head, "cold", ("foundation", "text", "pictures", "mixed", "both")),
        against=compared(arms, head, "pictures", ("text", "mixed", "both")),
        trials=table(["trial", "text", "pictures", "steps"], [trial(*one) for one in trials.items()]),
        cost=cost(found),
        trial_cost=cost(trials),
        images="../../docs/images",
        **kinds,
    )
    page.write_text(text, encoding="utf-8")


def later(arms: Mapping[str, Found], half: int) -> Found:
    """The second stage, with its steps shifted to follow those of the first."""
    return {
        seed: {
            "curves": {name: [[step + half, *rest] for step, *rest in points] for name, points in run["curves"].items()}
        }
        for seed, run in arms.get("both", {}).items()
    }


def right(runs: Found, group: str, form: str) -> dict[int, float]:
    return ends(runs, f"val/{group}_{form}/accuracy")


def accuracies(arms: Mapping[str, Found], head: list[str]) -> str:
    rows = []
    for arm, runs in arms.items():
        cells = [mean_of(right(runs, *one)) for one in SETS]
        length = mean_of(ends(runs, "val/seen_pictures/response_mean"), 1, digits=0)
        before = [run["rollouts"] for run in arms.get("foundation", {}).values()] if arm == "both" else [0]
        made = np.mean([run["rollouts"] for run in runs.values()]) + np.mean(before or [0])
        rows.append([ARMS[arm], str(len(runs)), *cells, length, f"{made:,.0f}"])
    return table(["arm", "seeds", *head, "tokens", "rollouts"], rows)


def compared(arms: Mapping[str, Found], head: list[str], to: str, names: tuple[str, ...]) -> str:
    rows = [
        [ARMS[arm], *(gain(right(arms[arm], *one), right(arms.get(to, {}), *one)) for one in SETS)]
        for arm in names
        if arm in arms
    ]
    return table(["arm", *head], rows)


def trial(arm: str, runs: Found) -> list[str]:
    steps = "/".join(str(run["steps"]) for run in runs.values())
    return [f"`{arm}`", *(mean_of(right(runs, "seen", form)) for form in FORMS), steps]


def summary(arms: Mapping[str, Found]) -> str:
    """The findings in one paragraph, with numbers."""
    if not {"cold", "text", "pictures", "both"} <= arms.keys():
        return "Not all arms have been run."
    cold = {form: right(arms["cold"], "seen", form) for form in FORMS}
    carried = gain(right(arms["text"], "seen", "pictures"), cold["pictures"])
    own = gain(right(arms["pictures"], "seen", "pictures"), cold["pictures"])
    first = gain(right(arms["both"], "seen", "pictures"), right(arms["pictures"], "seen", "pictures"))
    held = gain(right(arms["both"], "held", "pictures"), right(arms["pictures"], "held", "pictures"))
    return (
        f"RL in text alone changes answers about pictures by {carried} points, RL with pictures by {own}. Text first "
        f"and then pictures, against pictures alone at equal rollouts: {first} on the kinds seen, {held} on kinds held "
        "out."
    )
