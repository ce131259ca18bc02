"""Writes RESULTS.md of this experiment and its picture, from the JSONs of its runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.pages import Found, best_rates, by_rate, chance, corrected, cost, half_width, mean_of, read, table

PRESETS = {
    "grpo": "the safe start",
    "dr_grpo": "GRPO without its biases of length and difficulty",
    "dapo": "dynamic sampling, a wider clip, 16 samples",
    "gspo": "one ratio for a sequence",
    "cispo": "clips the weight, not the gradient; 16 samples",
    "sapo": "a smooth gate for the clip",
    "rloo": "leave-one-out baseline, 4 samples",
    "remax": "a greedy answer is the baseline",
    "reinforce_pp": "whitened over the step, 1 sample",
    "ppo": "a critic, 1 sample",
    "easyr1": "EasyR1's objective, 5 samples",
}
SCORE = "val/val/accuracy"
LEVEL = 0.05
PAGE = """# Which algorithm should I take?

{summary}

![Accuracy of each preset after equal rollouts]({images}/presets.svg)

The quickstart's task: a Qwen2.5-VL of 318 thousand random weights learns to count, first from 400 demonstrations, then
by RL whose reward is the count, right and in the format. Every arm draws {budget:,} rollouts, dropped ones and greedy
baselines included, 240 in a step, and makes four updates from those of a step; all weights learn. A preset is used as
its row says, with the learning rate that was best for it in the trials below. Every seed has its own weights and cold
start, from which all presets go on. `OMP_NUM_THREADS=1 python experiments/presets/run.py` repeats everything **on a
CPU**, two runs side by side; with `--tiny` it shows that it runs.

## Numbers

{numbers}

Greedy accuracy on {items:,} new scenes; ± is half of the 95 % interval over seeds (Student). All seeds have the same
questions to learn from and to be measured on. Differences from the cold start and from GRPO are paired by seed; p is
Student's test of those from GRPO, corrected for {comparisons} comparisons (Holm), and below {level} a difference is
called one. Seconds for a point: seconds of training on one core after the first step, without validations, of the
fastest seed (other work shared the cores), divided by the points gained on average. Dynamic sampling (`dapo`) draws
more for a step: it counts as it was at the last validation within these rollouts, which is made every second step.

## Trials

The learning rate of each preset, with another seed and measured on other questions; accuracy in %, all that were tried
(-: failed):

{trials}

## Cost

{cost} Trials: {trial_cost}

## What this does not show

One tiny model, one task and answers of at most twelve tokens: what presets do about long answers (the overlong penalty
of DAPO, the length bias that Dr. GRPO removes, ratios of whole sequences) has nothing to act on here. A learning rate
was chosen with one seed; other options are those of the rows. Equal rollouts are neither equal time nor equal prompts:
presets with few samples see more questions.
"""


class Reached(NamedTuple):
    accuracy: float  # in %
    seconds: float  # of training
    rollouts: float


class Row(NamedTuple):
    preset: str
    accuracy: dict[int, float]  # by seed
    gain: dict[int, float]  # over the cold start, by seed
    over_grpo: dict[int, float]
    chance: float
    point: str  # seconds per point of accuracy gained

    @property
    def verdict(self) -> str:
        if self.preset == "grpo" or self.chance >= LEVEL:
            return ""
        return "better" if np.mean([*self.over_grpo.values()]) > 0 else "worse"


def reached(run: Mapping[str, Any], budget: float) -> Reached:
    """Results at the last validation within the budget of rollouts."""
    drawn = np.array(run["curves"].get("rollouts", [(0, 0, 0)]))
    steps, seconds, accuracy = np.array(run["curves"][SCORE]).T
    rollouts = np.interp(steps, drawn[:, 0], drawn[:, 2])
    last = max(0, int((rollouts <= budget).sum()) - 1)
    validating = sum(took for step, _, took in run["curves"].get("time/validation", ()) if 0 < step <= steps[last])
    return Reached(100 * accuracy[last], seconds[last] - validating, rollouts[last])


def budget_of(found: Mapping[str, Found]) -> float:
    """Rollouts of a run: the median, as only presets with dynamic sampling use more."""
    drawn = [run["rollouts"] for runs in found.values() for run in runs.values() if run["rollouts"]]
    return float(np.median(drawn or [0]))


def rates_of(trials: Mapping[str, Found]) -> dict[str, dict[str, float]]:
    """Preset → learning rate → accuracy."""
    budget = budget_of(trials)
    tried = {arm: runs for arm, runs in trials.items() if arm != "cold"}
    return by_rate(tried, lambda _, run: reached(run, budget).accuracy)


def compared(found: Mapping[str, Found]) -> list[Row]:
    """Presets from the best to the worst, compared with GRPO."""
    budget, start = budget_of(found), start_of(found)
    ends = {p: {seed: reached(run, budget) for seed, run in found[p].items()} for p in PRESETS if p in found}
    accuracy = {p: {seed: one.accuracy for seed, one in by_seed.items()} for p, by_seed in ends.items()}
    over = {p: _minus(values, accuracy.get("grpo", {})) for p, values in accuracy.items()}
    chances = corrected({p: chance(gain) for p, gain in over.items() if p != "grpo"})
    rows = [
        Row(p, accuracy[p], gain := _minus(accuracy[p], start), over[p], chances.get(p, 1.0), _point(by_seed, gain))
        for p, by_seed in ends.items()
    ]
    return sorted(rows, key=lambda row: -np.mean([*row.accuracy.values()]))


def _minus(values: Mapping[int, float], others: Mapping[int, float]) -> dict[int, float]:
    return {seed: value - others[seed] for seed, value in values.items() if seed in others}


def _point(by_seed: Mapping[int, Reached], gain: Mapping[int, float]) -> str:
    points = np.mean([*gain.values()])
    return f"{min(one.seconds for one in by_seed.values()) / points:.2f}" if points > 0 else "-"


def start_of(found: Mapping[str, Found]) -> dict[int, float]:
    """Accuracy of each seed's cold start: that of its runs before their first step."""
    return {seed: 100 * run["curves"][SCORE][0][2] for p in PRESETS for seed, run in found.get(p, {}).items()}


# -- the picture -----------------------------------------------------------------------------------

LEFT, WIDE, RIGHT, HIGH, TOP, BOTTOM = 120, 330, 250, 28, 44, 62
COLOUR = {"better": "#2c7d4f", "worse": "#c23b4e", "": "#777777"}


def picture(rows: Sequence[Row], start: float) -> str:
    """A line for each preset: its mean and interval, over the interval of GRPO."""
    spans = {row.preset: _span(row.accuracy) for row in rows}
    low = min([start, *(mean - half for mean, half in spans.values())]) - 1
    high = max([start, *(mean + half for mean, half in spans.values())]) + 1
    width, height = LEFT + WIDE + RIGHT, TOP + HIGH * len(rows) + BOTTOM

    def x(value: float) -> float:
        return round(LEFT + (value - low) / (high - low) * WIDE, 1)

    def text(at: float, y: float, said: str, anchor: str = "start", more: str = 'fill="#222"') -> str:
        return f'<text x="{at}" y="{y}" text-anchor="{anchor}" {more}>{said}</text>'

    foot = TOP + HIGH * len(rows)
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        text(LEFT + WIDE / 2, TOP - 16, "accuracy, %", "middle"),
        text(LEFT + WIDE + 20, TOP - 16, "minus GRPO"),
        text(LEFT + WIDE + 130, TOP - 16, "s for a point"),
    ]
    if "grpo" in spans:
        mean, half = spans["grpo"]
        wide = round(x(mean + half) - x(mean - half), 1)
        body.append(f'<rect x="{x(mean - half)}" y="{TOP}" width="{wide}" height="{foot - TOP}" fill="#dfe9f3"/>')
    body.append(f'<path d="M{x(start)},{TOP}V{foot}" stroke="#999" stroke-dasharray="4 3"/>')
    body.append(text(x(start), foot + 34, "at the start", "middle", 'fill="#666"'))
    unit = next(unit for unit in (1, 2, 5, 10, 20, 50, 100) if high - low <= 8 * unit)
    for tick in range(unit * int(np.ceil(low / unit)), int(high) + 1, unit):
        body.append(text(x(tick), foot + 16, f"{tick}", "middle", 'fill="#666"'))
    for n, row in enumerate(rows):
        (mean, half), y = spans[row.preset], TOP + HIGH * n + HIGH / 2
        colour = "#1b6ca8" if row.preset == "grpo" else COLOUR[row.verdict]
        body.append(text(LEFT - 12, y + 4, row.preset, "end", f'fill="{colour}" font-weight="bold"'))
        body.append(f'<path d="M{x(mean - half)},{y}H{x(mean + half)}" stroke="{colour}" stroke-width="3"/>')
        body.append(f'<circle cx="{x(mean)}" cy="{y}" r="5.5" fill="{colour}"/>')
        if row.preset != "grpo":
            body.append(text(LEFT + WIDE + 20, y + 4, mean_of(row.over_grpo, 1, signed=True), more=f'fill="{colour}"'))
        body.append(text(LEFT + WIDE + 130, y + 4, row.point))
    legend = "green, red: better, worse than GRPO beyond chance; grey: no difference shown; lines: 95 % intervals"
    return "\n".join([*body, text(12, height - 10, legend, more='fill="#666" font-size="12"'), "</svg>"]) + "\n"


def _span(values: Mapping[int, float]) -> tuple[float, float]:
    return float(np.mean([*values.values()])), half_width([*values.values()])


# -- the page --------------------------------------------------------------------------------------


def write_page(results: Path, path: Path, images: Path) -> None:
    found, trials = read(results), read(results / "dev")
    rows, rates = compared(found), best_rates(rates_of(trials))
    start = float(np.mean([*start_of(found).values()] or [0]))
    (images / "presets.svg").write_text(picture(rows, start))
    head = ["preset", "what it is", "lr", "accuracy, %", "gain", "minus GRPO", "p", "differs", "steps", "s for a point"]
    numbers = [
        [
            f"`{row.preset}`",
            PRESETS[row.preset],
            rates.get(row.preset, "-"),
            mean_of(row.accuracy, 1),
            mean_of(row.gain, 1, signed=True),
            *(("", "") if row.preset == "grpo" else (mean_of(row.over_grpo, 1, signed=True), f"{row.chance:.2g}")),
            row.verdict,
            f"{np.mean([run['steps'] for run in found[row.preset].values()]):.0f}",
            row.point,
        ]
        for row in rows
    ]
    tried = rates_of(trials)
    every = sorted({rate for of_preset in tried.values() for rate in of_preset}, key=float)
    items = {run["curves"]["val/val/items"][-1][2] for p in PRESETS for run in found.get(p, {}).values()}
    text = PAGE.format(
        summary=summary(rows, start),
        images="../../docs/images",
        budget=int(budget_of(found)) if rows else 0,
        numbers=table(head, numbers),
        items=int(max(items, default=0)),
        comparisons=max(0, len(rows) - 1),
        level=LEVEL,
        trials=table(["preset", *every], [
            [f"`{p}`", *(f"**{of[r]:.1f}**" if r == rates[p] else f"{of[r]:.1f}" if r in of else "-" for r in every)]
            for p, of in tried.items()
        ]),
        cost=cost(found),
        trial_cost=cost(trials),
    )  # fmt: skip
    path.write_text(text, encoding="utf-8")


def summary(rows: Sequence[Row], start: float) -> str:
    """The findings in one paragraph, with numbers."""
    if not rows:
        return "Nothing has been measured yet."
    by_verdict = {
        verdict: ", ".join(
            f"{row.preset} ({mean_of(row.over_grpo, 1, signed=True)})" for row in rows if row.verdict == verdict
        )
        for verdict in ("better", "worse")
    }
    said = "; ".join(f"{verdict}: {names}" for verdict, names in by_verdict.items() if names)
    ends = {row.preset: mean_of(row.accuracy, 1) for row in rows}
    return (f"From {start:.1f} % right: GRPO reaches {ends.get('grpo', '-')} %, the best ({rows[0].preset}) "
            f"{ends[rows[0].preset]} %, the last ({rows[-1].preset}) {ends[rows[-1].preset]} %. Of {len(rows) - 1} "
            f"presets, {sum(row.verdict != '' for row in rows)} differ from GRPO beyond chance"
            f"{f', in points: {said}' if said else ''}.")  # fmt: skip
