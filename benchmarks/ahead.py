"""GRPO steps with rollouts that run ahead of training (rollout.ahead), on responses of very different lengths.

    python benchmarks/ahead.py --model runs/3b --ahead 0 1 2 --steps 4
    python benchmarks/ahead.py --model runs/3b --median 100 --most 2048     # a quarter of the lengths
    python benchmarks/ahead.py --model runs/3b --tools 6 --median 100 --most 1024 --steps 6

Response lengths are log-normal (one in a hundred has --most tokens, the longest) and the same for every number of steps
ahead. With --tools N an episode has 1 to N turns, each of a drawn length, and between turns the policy waits for its
environment, a process that sleeps: half of the times more than --wait seconds, one in a hundred --longest. The first
steps compile kernels and fill the pipeline, and the last cannot run ahead, so means are over the steps between, in
whole rounds of k + 1 steps: a longest response has so many steps to finish, and short steps follow a long one. Prints
one JSON object per number of steps ahead: seconds per step, tokens per second, the share of rollout time in which the
engine is idle, its mean number of requests while busy (full: as a share of the responses of a step), and the age of the
oldest token in updates.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model import build
from rl_step import config
from works import parse, sequences, write_rows

import saccade
from saccade.engines.embedded import EmbeddedEngine
from saccade.rollout import episode
from saccade.run.checkpointer import Checkpointer
from saccade.run.loggers import read_metrics
from saccade.run.training_run import Run

LATER = 2.3263  # z-value: one in a hundred normal numbers is larger


ENVIRONMENT = """
import math, time
import numpy as np
from saccade.types import Message

class Waiting:
    def __init__(self, turns, wait, spread):
        self.turns, self.wait, self.spread = turns, wait, spread

    def reset(self, sample, seed):
        self.rng = np.random.default_rng([seed, 1])
        self.left = int(self.rng.integers(1, self.turns, endpoint=True))
        return sample.messages

    def step(self, message):
        self.left -= 1
        if self.left:
            time.sleep(self.wait * math.exp(self.spread * min(LATER, self.rng.standard_normal())))
        return [Message(role="user", parts=("It is not there." + " count" * 60,))], None, not self.left, {}

    def close(self):
        pass
""".replace("LATER", str(LATER))


class Watched:
    """Patches the engine so that each turn ends at a length drawn from its episode's noise, and sums per weight version
    the seconds of polls, and seconds x pending requests."""

    def __init__(self, median: int, most: int, turns: int) -> None:
        self.seconds, self.filled = Counter[int](), Counter[int]()
        submit, poll, noise_key = EmbeddedEngine.submit, EmbeddedEngine.poll, episode.noise_key
        spread = math.log(most / median) / LATER

        def limited(engine: EmbeddedEngine, request: Any) -> None:
            turn = sum(message.role == "assistant" for message in request.messages)
            drawn = median * np.exp(spread * np.random.default_rng(request.noise).standard_normal(turn + 1))
            left = int(drawn.astype(int).clip(8, most).sum()) - request.first_index
            submit(engine, replace(request, sampling=replace(request.sampling, max_tokens=max(1, left))))

        def timed(engine: EmbeddedEngine) -> list[Any]:
            began, requests = time.perf_counter(), engine.pending
            done = poll(engine)
            seconds = time.perf_counter() - began
            self.seconds[engine.version] += seconds
            self.filled[engine.version] += seconds * requests
            cut = "stop" if turns else "length"  # else an episode would end at a turn that reached max_tokens
            return [replace(each, finish=cut) if each.finish == "length" else each for each in done]

        EmbeddedEngine.submit, EmbeddedEngine.poll = limited, timed  # type: ignore[method-assign]
        episode.noise_key = lambda _draw, key: noise_key(key)  # `_draw` names the step, which depends on --ahead


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder; built in the shape of --size if missing")
    parser.add_argument("--size", default="3b")
    parser.add_argument("--work", type=parse, default="W1")
    parser.add_argument("--ahead", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=4, help="that are measured, or a few more")
    parser.add_argument("--median", type=int, default=400)
    parser.add_argument("--most", type=int, default=8192)
    parser.add_argument("--tools", type=int, default=0, help="turns of the longest episodes; lengths are of turns then")
    parser.add_argument("--wait", type=float, default=0.5, help="for an environment, in seconds: the median")
    parser.add_argument("--longest", type=float, default=8.0)
    parser.add_argument("overrides", nargs="*", help="options such as rollout.max_sequences=256")
    args = parser.parse_args()
    if not args.model.exists():
        build(args.model, args.size)
    Checkpointer.due = lambda self, step: False  # type: ignore[method-assign]
    Run.save = lambda run, *, last=False: None  # type: ignore[method-assign]
    watched = Watched(args.median, args.most, args.tools)
    work = args.work | {"new": args.most}
    with tempfile.TemporaryDirectory() as scratch:
        for ahead in args.ahead:
            folder = Path(scratch) / str(ahead)
            folder.mkdir()
            first = max(3, 1 + ahead)  # steps that compile and fill the pipeline; the same for --ahead up to 2
            measured = -(-args.steps // (1 + ahead)) * (1 + ahead)
            steps = first + measured + ahead  # the last steps cannot run ahead
            data = write_rows(folder / "data", str(args.model), work, steps)
            settings = config(folder, str(args.model), data, work, steps) | {"rollout.ahead": ahead}
            if args.tools:
                (folder / "waiting.py").write_text(ENVIRONMENT)
                spread = math.log(args.longest / args.wait) / LATER
                settings |= {
                    "env.name": f"{folder / 'waiting.py'}:Waiting",
                    "env.args": {"turns": args.tools, "wait": args.wait, "spread": spread},
                    "env.max_turns": args.tools,
                    "env.max_total_tokens": work["prompt"] + 64 + args.tools * (args.most + 128),
                    "env.min_turn_tokens": 1,
                    "env.processes": sequences(work) * (1 + ahead),
                }
            watched.seconds.clear()
            watched.filled.clear()
            saccade.rl(settings, *args.overrides)
            rows = [row for row in read_metrics(folder / "runs" / "run") if "time/update" in row]
            rows = rows[first : first + measured]
            names = ("time/step", "time/rollout", "count/rollout_tokens")
            seconds, sampling, tokens = (sum(row[name] for row in rows) for name in names)
            busy, filled = (sum(of[row["step"] - 1] for row in rows) for of in (watched.seconds, watched.filled))
            found = {
                "ahead": ahead,
                "steps": len(rows),
                "step_s": round(statistics.mean(row["time/step"] for row in rows), 2),
                "rollout_s": round(statistics.mean(row["time/rollout"] for row in rows), 2),
                "update_s": round(statistics.mean(row["time/update"] for row in rows), 2),
                "steps_per_h": round(3600 * len(rows) / seconds, 1),
                "tokens_per_s": round(tokens / seconds),
                "rollout_tokens_per_s": round(tokens / sampling),
                "idle": round(1 - busy / sampling, 3),
                "full": round(filled / busy / sequences(work), 3),
                "oldest": max(row["data/staleness_max"] for row in rows),
                "ess": round(min(row["mismatch/ess"] for row in rows), 4),
                "peak_gib": rows[-1].get("mem/gpu_peak_gb"),
            }
            print(json.dumps(found), flush=True)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
