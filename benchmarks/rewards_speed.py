"""Measures the time of rewards: cheap verifiers in this process, and math in worker processes.

python benchmarks/rewards_speed.py
"""

from __future__ import annotations

import time

from saccade.config import RewardConfig
from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.scorer import Scorer

GOLDS = ["7", r"\frac{1}{2}", r"\sqrt{12}", "x^2-1", "(1, 2)", "100 cm"]
ANSWERS = ["7", "0.5", r"2\sqrt{3}", "(x+1)(x-1)", "(1,2)", "1 m"]
COUNTING = "<think>I count the things one by one</think>\n<answer>{}</answer>"


def seconds(terms: list[str], samples: list[RewardSample]) -> tuple[float, float]:
    """Seconds of the first pass, which starts the processes, and of the fastest of the following ones."""
    with Scorer(RewardConfig(terms=terms), prompt_format="think_answer", max_tokens=64) as scorer:
        times = []
        for _ in range(6):
            began = time.perf_counter()
            scorer.score(samples)
            times.append(time.perf_counter() - began)
    return times[0], min(times[1:])


def main() -> None:
    counts = [RewardSample(id=str(n), response=COUNTING.format(n % 10), answer=str(n % 9)) for n in range(512)]
    formulas = [
        RewardSample(id=str(n), response=COUNTING.format(f"{a} + {n}" if n > 5 else a), answer=g)
        for n in range(252)
        for a, g in [(ANSWERS[n % 6], GOLDS[n % 6])]
    ]
    for name, terms, samples in (
        ("count and format, in place", ["count", "format:think_answer"], counts),
        ("math, in worker processes", ["math"], formulas),
    ):
        first, best = seconds(terms, samples)
        each = best / len(samples) * 1e6
        print(f"{name}: first {first:.3f} s, then {best:.3f} s, {each:.0f} us per sample")


if __name__ == "__main__":
    main()
