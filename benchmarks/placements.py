"""Simulates the gain of rollouts ahead of training on several GPUs, on the training GPUs (together) or on other GPUs
(beside), for responses of very different lengths, with the decode and update times of one H200. Nothing is generated.

    python benchmarks/placements.py                  # 8 GPUs
    python benchmarks/placements.py --gpus 1         # as `ahead.py` measures

Lengths are those of ahead.py (log-normal, median 400, one in a hundred 8,192), 128 responses per GPU and step. The
rollout of step s begins with the weights after step s - 1 - k. Together, all GPUs sample and then train, and responses
of later steps only fill gaps; beside, the engines go on sampling until new weights come. Either way unfinished
responses continue with the new weights and prefill their tokens again. Moving data and weights takes no time here.
"""

import argparse
import math
from collections import deque

import numpy as np

ROWS, MILLISECONDS = (0, 1, 8, 32, 64, 128, 512), (2.79, 2.79, 2.79, 2.89, 3.22, 3.96, 8.50)  # batch size, decode time
UPDATE, READ = 6.4 / 123_100, 1 / 80_000  # seconds of one GPU per trained token, and per prefilled token
LATER, PROMPT, ANSWERS, SLOTS = 2.3263, 368, 128, 512
TICK = 0.02  # seconds


class Gpu:
    """A GPU that samples."""

    def __init__(self, slots: int) -> None:
        self.slots, self.owed = slots, 0.0  # `owed`: seconds of prefill still to do
        self.waiting = deque[tuple[float, int]]()  # (length, step) of waiting responses, the oldest step first
        self.left, self.done, self.step = np.zeros(0), np.zeros(0), np.zeros(0, int)  # of each live response

    def advance(self) -> np.ndarray:
        """Simulate one tick; returns the step of each response that ends in it."""
        if more := [self.waiting.popleft() for _ in range(min(len(self.waiting), self.slots - len(self.left)))]:
            lengths, steps = zip(*more, strict=True)
            self.left, self.step = np.append(self.left, lengths), np.append(self.step, steps)
            self.done = np.append(self.done, np.zeros(len(more)))
        if self.owed >= TICK:
            self.owed -= TICK
            return self.step[:0]
        tokens = TICK * 1000 / float(np.interp(len(self.left), ROWS, MILLISECONDS))
        over = self.left <= tokens
        ended = self.step[over]
        self.left, self.done, self.step = (x[~over] for x in (self.left - tokens, self.done + tokens, self.step))
        return ended

    def take_back(self) -> None:
        self.owed += READ * float((self.done + PROMPT).sum())


def drawn(gpus: int, steps: int, median: int, most: int) -> np.ndarray:
    """Response lengths in tokens: [steps, responses]."""
    spread = math.log(most / median) / LATER
    normal = np.random.default_rng(0).standard_normal((steps, gpus * ANSWERS))
    return (median * np.exp(spread * normal)).clip(8, most)


def seconds(lengths: np.ndarray, gpus: int, ahead: int, engines: int) -> float:
    """Seconds per step. `engines`: GPUs that only sample while the others train; 0: all do both in turn."""
    steps = len(lengths)
    sampling = [Gpu(SLOTS if engines else ANSWERS) for _ in range(engines or gpus)]
    left, begun, trained, now = [gpus * ANSWERS] * steps, 0, 0, 0.0
    busy, ends = math.inf, list[float]()  # `busy`: end of the running update; inf: none runs
    while trained < steps:
        while begun < min(steps, trained + 1 + ahead):
            for number, length in enumerate(lengths[begun]):
                sampling[number // 8 % len(sampling)].waiting.append((length, begun))  # a group stays together
            begun += 1
        if busy == math.inf and not left[trained]:
            busy = now + UPDATE * lengths[trained].sum() / (gpus - engines)
        now += TICK
        if now >= busy:
            busy, trained = math.inf, trained + 1
            ends.append(now)
            for gpu in sampling:
                gpu.take_back()
        elif engines or busy == math.inf:
            for gpu in sampling:
                for step in gpu.advance():
                    left[step] -= 1
    first = 2 + ahead  # the first steps fill the pipeline; the last cannot run ahead
    last = steps - 1 - ahead
    return (ends[last] - ends[first]) / (last - first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--ahead", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--median", type=int, default=400)
    parser.add_argument("--most", type=int, default=8192)
    args = parser.parse_args()
    lengths = drawn(args.gpus, args.steps, args.median, args.most)
    usual = seconds(lengths, args.gpus, 0, 0)
    print(f"| `rollout.ahead` | together | beside training, on so many of {args.gpus} GPUs |\n|---|---|---|")
    print(f"| 0 | {usual:.1f} s | |")
    for ahead in args.ahead:
        together = seconds(lengths, args.gpus, ahead, 0)
        beside = {engines: seconds(lengths, args.gpus, ahead, engines) for engines in range(1, args.gpus)}
        shown = [f"{engines}: {each:.1f} s, {usual / each:.2f}x" for engines, each in beside.items()]
        print(f"| {ahead} | {together:.1f} s, {usual / together:.2f}x | {'; '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
