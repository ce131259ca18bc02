"""GRPO steps with rollouts that run ahead of training, on answers of very different lengths.

    python benchmarks/ahead.py --model runs/3b --ahead 0 1 2 --steps 4
    python benchmarks/ahead.py --model runs/3b --median 100 --most 2048     # a quarter of the lengths

Lengths are drawn for each rollout (log-normal; one in a hundred has --most tokens, the longest), the same for every
number of steps ahead. The first steps compile kernels and fill the pipe, the last have nothing to run ahead with: means
are those of the steps between, in whole rounds: a longest answer has k + 1 steps to be finished in, and short steps
follow a long one. Prints one JSON object per number: seconds of a step, tokens a second over these, and the oldest
token in updates.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model import build
from rl_step import config
from works import parse, write_rows

import saccade
from saccade.engines.embedded import EmbeddedEngine
from saccade.run.checkpointer import Checkpointer
from saccade.run.loggers import read_metrics
from saccade.run.training_run import Run

LATER = 2.3263  # standard deviations, above which one in a hundred lies


def draw_lengths(median: int, most: int) -> None:
    """From now on the engine ends each sequence at a length that follows from its noise alone."""
    submit, spread = EmbeddedEngine.submit, math.log(most / median) / LATER

    def limited(engine: EmbeddedEngine, request: Any) -> None:
        drawn = median * math.exp(spread * np.random.default_rng(request.noise).standard_normal())
        left = min(most, max(8, int(drawn))) - request.first_index
        submit(engine, replace(request, sampling=replace(request.sampling, max_tokens=max(1, left))))

    EmbeddedEngine.submit = limited  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder; built in the shape of --size if missing")
    parser.add_argument("--size", default="3b")
    parser.add_argument("--work", type=parse, default="W1")
    parser.add_argument("--ahead", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=4, help="that are measured, or a few more")
    parser.add_argument("--median", type=int, default=400)
    parser.add_argument("--most", type=int, default=8192)
    parser.add_argument("overrides", nargs="*", help="options such as rollout.max_sequences=256")
    args = parser.parse_args()
    if not args.model.exists():
        build(args.model, args.size)
    Checkpointer.due = lambda self, step: False  # type: ignore[method-assign]
    Run.save = lambda run, *, last=False: None  # type: ignore[method-assign]
    draw_lengths(args.median, args.most)
    work = args.work | {"new": args.most}
    with tempfile.TemporaryDirectory() as scratch:
        for ahead in args.ahead:
            folder = Path(scratch) / str(ahead)
            folder.mkdir()
            first = 1 + ahead  # compiles, and fills the pipe
            measured = -(-args.steps // (1 + ahead)) * (1 + ahead)
            steps = first + measured + ahead  # the last have nothing to run ahead with
            data = write_rows(folder / "data", str(args.model), work, steps)
            settings = config(folder, str(args.model), data, work, steps) | {"rollout.ahead": ahead}
            saccade.rl(settings, *args.overrides)
            rows = [row for row in read_metrics(folder / "runs" / "run") if "time/update" in row]
            rows = rows[first : first + measured]
            seconds, tokens = (sum(row[name] for row in rows) for name in ("time/step", "count/rollout_tokens"))
            found = {
                "ahead": ahead,
                "steps": len(rows),
                "step_s": round(statistics.mean(row["time/step"] for row in rows), 2),
                "rollout_s": round(statistics.mean(row["time/rollout"] for row in rows), 2),
                "update_s": round(statistics.mean(row["time/update"] for row in rows), 2),
                "tokens_per_s": round(tokens / seconds),
                "oldest": max(row["data/staleness_max"] for row in rows),
                "ess": round(min(row["mismatch/ess"] for row in rows), 4),
                "peak_gib": rows[-1].get("mem/gpu_peak_gb"),
            }
            print(json.dumps(found), flush=True)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
