"""Measures the bookkeeping time of a step: metrics of 512 trajectories, a phase of the console.

python benchmarks/metrics_speed.py
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable

import numpy as np

from saccade.run.console import Console
from saccade.run.metrics import group_metrics
from saccade.types import Group, Media, MediaSpan, Message, Sample, Source, Trajectory

PICTURE = Media(hash="aa11", width=56, height=56, data=b"file")
PROMPT, RESPONSE = 7, 512  # tokens


def trajectory(repeat: int) -> Trajectory:
    policy = np.arange(PROMPT + RESPONSE) >= PROMPT
    return Trajectory(
        sample_id="s",
        repeat=repeat,
        ids=np.full(len(policy), 5, np.int64),
        sources=np.where(policy, int(Source.POLICY), int(Source.PROMPT)).astype(np.int8),
        logprobs=np.where(policy, -0.5, np.nan).astype(np.float32),
        versions=np.where(policy, 3, -1).astype(np.int32),
        media=(MediaSpan(media=PICTURE, start=0, length=4, grid=(1, 4, 4)),),
        reward=float(repeat % 2),
        outcome=float(repeat % 2),
        parts={"count": 1.0, "format": 1.0},
        advantages=np.ones(RESPONSE, np.float32),
    )


def best(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    question = (Message(role="user", parts=(PICTURE, "How many objects?")),)
    sample = Sample(id="s", messages=question, answer="3")
    members = tuple(map(trajectory, range(8)))
    groups = [Group(sample=sample, trajectories=members, uid=str(n)) for n in range(64)]
    print(f"metrics of 512 trajectories: {best(lambda: group_metrics(groups), 20) * 1e3:.1f} ms")
    console = Console(1, "rl", file=io.StringIO())

    def thousand_phases() -> None:
        for _ in range(1000):
            with console.phase("rollout"):
                console.progress(1, 2)

    print(f"one phase of the console: {best(thousand_phases, 5) * 1e3:.1f} us")


if __name__ == "__main__":
    main()
