"""Writes RESULTS.md of this experiment and its picture, from the JSONs of its runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.pages import Found, chance, cost, ends, gain, half_width, mean_of, picture, read, table

ARMS = {
    "embedded": "embedded engine, one process",
    "ahead": "`rollout.ahead=1`",
    "ranks": "`run.gpus=2`: two processes",
    "vllm": "`rollout.engine=vllm`",
    "beside": "`rollout.ahead=1 rollout.replicas=1`",
    "order": "the first row, questions in the order in which they were drawn",
}
SHORT = {"ahead": "`rollout.ahead=1`", "vllm": "vLLM", "beside": "`rollout.ahead=1` side by side"}
FIRST = "embedded"
SCORE, LEARNED = "val/val/accuracy", "reward/accuracy"
SMOOTH = 9  # steps over which a point of a learning curve is averaged
PAGE = """# The same run, carried out otherwise

{summary}

The quickstart's task: a Qwen2.5-VL of 318 thousand random weights learns to count, first from 400 demonstrations, then
by {steps} GRPO steps of 32 questions with 8 rollouts each (`rl.yaml`), in float32. Every seed has its own weights and
cold start, from which all arms go on with the same questions in the same order. `OMP_NUM_THREADS=1 python
experiments/systems/run.py` repeats everything **on a CPU**, one run at a time; an interpreter that has vLLM's CPU build
(`make .venv-vllm/.installed`) runs that arm, too. The two processes of `run.gpus=2` exchange gradients over gloo. ± is
half of the 95 % interval over seeds (Student), differences are paired by seed.

{arms}

*Held-out*: greedy accuracy on 600 scenes at the end. *Training*: right rollouts of the last ten steps. *Inside*: steps
at which the mean over seeds, of {smooth} steps, lies inside the interval of the first row. *Same*: steps from the first
on in which the rollouts of a seed have the rewards and lengths of those of the first row, and of how many. *Gap*: the
largest difference between a log-prob of the engine and the trainer's. *Age*: mean age of a trained token, in steps.

![Right rollouts in training]({images}/systems.svg)

*Rollouts of training that are right, means of {smooth} steps, with 95 % intervals over seeds: embedded, ahead, ranks
(`run.gpus=2`, hidden behind embedded where both are the same), vllm, order (as drawn).*

{by_seed}

## Why arms differ where they do

- **Two processes** draw the tokens of one: the noise of a token belongs to its question, not to its place in a
  batch. They part only where a sum in another order moves a probability over the edge of the noise.
- **vLLM** has noise of its own, so its rollouts are other draws from the same policy: in every step its log-probs are
  those of the trainer up to the gap above.
- **Rollouts ahead** belong in part to the policy of one step before; their tokens are weighed by the ratio of both.
  Over 160 steps of 64 questions they cost [3.0 ± 2.8 points](../../docs/performance.md), so a price that is too small
  to be seen here is likely.
- **In another order** the same engine has other questions in a step: what a change does that is none of the engine. As
  drawn, every six rows hold each count once; the runs above shuffle them. Balanced steps may help, or the difference
  is chance: without an effect it would be as large with probability {order} (Student's test, not corrected for the
  {others} comparisons of the table).

## Cost

{cost}
Other work may have shared the cores, so seconds of arms are not compared.

## What this does not show

A tiny model, one task, {steps} steps and {n} seeds: differences below the ± of the table cannot be seen, and none was
looked for in long runs. Float32 on a CPU: half precision on a GPU rounds more (the gap of engines is then 1e-2 and
more, [performance](../../docs/performance.md)). Two processes of one machine over gloo say nothing of nccl or of
several machines. Nothing was tuned for an arm; sizes were chosen once, before any of these runs, from one run with seed
100 (60 steps of 64 questions: 33 to 66 % in 51 seconds of a core). {missing}
"""


def write_page(results: Path, path: Path, images: Path) -> None:
    stored = read(results)
    first = stored.get(FIRST, {})
    found = {arm: stored[arm] for arm in ARMS if arm in stored}
    (images / "systems.svg").write_text(picture(found, LEARNED, "steps", SMOOTH))
    missing = [about for arm, about in ARMS.items() if arm not in found]
    seeds = sorted({seed for runs in found.values() for seed in runs})
    scores = {"cold start": start_of(first), **{ARMS[arm]: ends(runs, SCORE) for arm, runs in found.items()}}
    by_seed = [[label, *(f"{100 * values[seed]:.1f}" if seed in values else "-" for seed in seeds)]
               for label, values in scores.items()]  # fmt: skip
    text = PAGE.format(
        summary=summary(found, first),
        arms=table(
            ["arm", "seeds", "held-out, %", "difference", "training, %", "inside", "same", "gap", "age"],
            [row(arm, runs, first) for arm, runs in found.items()],
        ),
        by_seed=table(["held-out accuracy by seed, %", *map(str, seeds)], by_seed),
        steps=max((run["steps"] for runs in found.values() for run in runs.values()), default=0),
        n=len(seeds),
        cost=cost(stored),
        smooth=SMOOTH,
        others=len(found.keys() - {FIRST}),
        order=f"{chance(differences(found.get('order', {}), first)):.2f}",
        missing=f"Not run: {', '.join(missing)}." if missing else "",
        images="../../docs/images",
    )
    path.write_text(text, encoding="utf-8")


def row(arm: str, runs: Found, first: Found) -> list[str]:
    last = {seed: float(np.mean([point[2] for point in run["curves"][LEARNED][-10:]])) for seed, run in runs.items()}
    ages = {seed: mean_over_steps(run, "data/staleness_mean") for seed, run in runs.items()}
    gaps = [point[2] for run in runs.values() for point in run["curves"].get("mismatch/logp_gap_max", ())]
    other = arm != FIRST
    shared = [same(runs[seed], first[seed]) for seed in runs if seed in first]
    steps = sum(runs[seed]["steps"] for seed in runs if seed in first)
    return [
        *(ARMS[arm], str(len(runs)), mean_of(ends(runs, SCORE))),
        gain(ends(runs, SCORE), ends(first, SCORE)) if other else "",
        mean_of(last),
        f"{inside(runs, first):.0%}" if other else "",
        f"{sum(shared)} of {steps}" if other else "",
        f"{max(gaps, default=0):.0e}",
        mean_of(ages, 1, digits=2).partition(" ")[0],
    ]


def differences(runs: Found, first: Found) -> dict[int, float]:
    before = ends(first, SCORE)
    return {seed: value - before[seed] for seed, value in ends(runs, SCORE).items() if seed in before}


def start_of(runs: Found) -> dict[int, float]:
    return {seed: run["curves"][SCORE][0][2] for seed, run in runs.items()}


def mean_over_steps(run: Mapping[str, Any], metric: str) -> float:
    return float(np.mean([point[2] for point in run["curves"].get(metric, [[0, 0, 0.0]])]))


def same(run: Mapping[str, Any], first: Mapping[str, Any]) -> int:
    """Number of first steps in which rollouts have the same mean reward and length in both runs."""
    pairs = ([[point[2] for point in one["curves"][name]] for one in (run, first)]
             for name in (LEARNED, "length/response_mean"))  # fmt: skip
    alike = np.all([np.equal(*(values[: min(map(len, both))] for values in both)) for both in pairs], axis=0)
    return int(np.cumprod(alike).sum())


def inside(runs: Found, first: Found) -> float:
    """Share of the steps at which the mean of one learning curve is inside the interval of the other."""
    one, other = (np.array([smoothed([point[2] for point in run["curves"][LEARNED]]) for run in arm.values()])
                  for arm in (runs, first))  # fmt: skip
    halves = np.array([half_width(column) for column in other.T])
    return float((abs(one.mean(0) - other.mean(0)) <= halves).mean())


def smoothed(values: list[float]) -> np.ndarray:
    width = min(SMOOTH, len(values))
    return np.convolve(values, np.ones(width) / width, "valid")


def summary(found: Mapping[str, Found], first: Found) -> str:
    """The findings in one paragraph, with numbers."""
    score = ends(first, SCORE)
    others = [f"{SHORT[arm]} {gain(ends(runs, SCORE), score)} points"
              for arm, runs in found.items() if arm in SHORT]  # fmt: skip
    both = [(run, first[seed]) for seed, run in found.get("ranks", {}).items() if seed in first]
    alike, steps = sum(same(*pair) for pair in both), sum(run["steps"] for run, _ in both)
    said = [f"two processes have the same rollouts in {alike} of {steps} steps"] * bool(steps) + others
    return (f"On a CPU, {len(first)} seeds: held-out accuracy {mean_of(start_of(first))} → {mean_of(score)} % with "
            f"the embedded engine in one process; {', '.join(said)}.")  # fmt: skip
