"""Does reinforcement learning teach a model to look again, and does it go on looking when it may?

One command draws scenes, builds a small vision-language model with random weights, teaches it to
read, then the call syntax by a cold start of at most six turns, trains every arm, and evaluates
each with up to 32 turns. Seeds and arms run side by side as processes of their own, on one GPU or
on the cores of a CPU. What is done already is not done again.

    python benchmarks/visual_search.py --out runs/search            # one H200
    python benchmarks/visual_search.py --tiny --out runs/search     # two cores
    python benchmarks/visual_search.py --ahead --seeds 5            # instead: with rollouts that run ahead of training

The policy is never told how many turns it has, and its sampling noise depends on the tokens so far
alone: under a smaller limit the same episode ends earlier. So one evaluation with 32 turns gives
the accuracy under every smaller limit, exactly.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from search_curves import LIMITS, interval, picture, summary, table
from search_stages import TINY, Size, build_model, common_config, draw_data, evaluate, rl_config, sft_config

# What each stage starts from. The first two are shared by all seeds, as a pretrained model is.
STAGES: Mapping[str, str | None] = {
    "data": None,
    "base": "data",
    "sft": "base",
    "sft_direct": "base",
    "cold": "sft",
    "masked": "sft",
    "unmasked": "sft",
    "direct": "sft_direct",
}
SHARED = ("data", "base")
# RL with tools and over-turn masking, with rollouts that run ahead, and without weights that correct for it.
AHEAD: Mapping[str, Mapping[str, Any]] = {
    "ahead1": {"rollout.ahead": 1},
    "ahead1_unweighed": {"rollout.ahead": 1, "algorithm.correct": []},
    "ahead4": {"rollout.ahead": 4},
    "ahead4_unweighed": {"rollout.ahead": 4, "algorithm.correct": []},
}


# -- one job ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Job:
    """A stage, of one seed where seeds differ."""

    stage: str
    seed: int

    @property
    def name(self) -> str:
        return self.stage if self.stage in SHARED else f"{self.stage}-{self.seed}"

    @property
    def needs(self) -> str | None:
        before = STAGES.get(self.stage, "sft")
        return before and Job(stage=before, seed=self.seed).name


def run_job(out: Path, size: Size, job: Job, memory: float | None) -> dict[str, Any]:
    """What the job measured; models and rows stay in files."""
    from saccade.recipes import model_setup

    model_setup.quiet_libraries()
    began = time.monotonic()
    before = json.loads((out / f"{job.needs}.json").read_text()) if job.needs else {}
    found = JOBS[job.stage](out, size, job, before, memory)
    return {"data": before.get("data")} | found | {"seconds": time.monotonic() - began}


def _draw(out: Path, size: Size, job: Job, before: Any, memory: float | None) -> dict[str, Any]:
    return {"data": draw_data(out / "data", size)}


def _base(out: Path, size: Size, job: Job, before: Any, memory: float | None) -> dict[str, Any]:
    data, common = before["data"], common_config(out, size, job.seed, memory)
    model = build_model(out / "model", data, size)
    for name in ("read", "chat"):
        model = _supervised(out, sft_config(common, name, model, data[name], size))
    return {"model": model, "parameters": _parameters(out / "model")}


def _shown(out: Path, size: Size, job: Job, before: Any, memory: float | None) -> dict[str, Any]:
    rows = before["data"]["plain" if job.stage == "sft_direct" else "cold"]
    common = common_config(out, size, job.seed, memory)
    return {"model": _supervised(out, sft_config(common, job.name, before["model"], rows, size))}


def _arm(out: Path, size: Size, job: Job, before: Any, memory: float | None) -> dict[str, Any]:
    """Reinforced, where it is not the cold start; then evaluated."""
    from saccade.recipes import rl

    data, common = before["data"], common_config(out, size, job.seed, memory)
    model, curve = before["model"], []
    if job.stage != "cold":
        arm = "masked" if job.stage in AHEAD else job.stage
        rl.run({**rl_config(common, job.name, arm, model, data, size), **AHEAD.get(job.stage, {})})
        model, curve = _last_checkpoint(out / job.name), _curve(out / job.name)
    return {"model": model, "curve": curve, "evaluation": evaluate(out, job.name, job.stage, model, data, common, size)}


JOBS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "data": _draw,
    "base": _base,
    "sft": _shown,
    "sft_direct": _shown,
    **dict.fromkeys(("cold", "masked", "unmasked", "direct", *AHEAD), _arm),
}


def _supervised(out: Path, config: dict[str, Any]) -> str:
    from saccade.recipes import sft

    sft.run(config)
    return _last_checkpoint(out / config["run"]["name"])


def _last_checkpoint(run: Path) -> str:
    from saccade.run.checkpoint import complete_steps

    return str(run / "checkpoints" / f"step-{complete_steps(run / 'checkpoints')[-1]}")


def _curve(run: Path) -> list[float]:
    """Reward of each step."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [round(line["reward/mean"], 4) for line in lines if "reward/mean" in line]


def _parameters(folder: Path) -> int:
    from saccade.run.checkpoint import tensor_shapes

    return int(sum(np.prod(shape) for shape in tensor_shapes(folder)))


# -- all jobs --------------------------------------------------------------------------------------


def run_all(
    out: Path, size: Size, seeds: Sequence[int], most: int, memory: float | None, stages: Sequence[str]
) -> dict[str, Any]:
    """Each job as a process, as soon as what it starts from is there. Returns what they found."""
    out.mkdir(parents=True, exist_ok=True)
    jobs = {job.name: job for seed in seeds for job in (Job(stage=s, seed=seed) for s in stages)}
    running = dict[str, subprocess.Popen[bytes]]()
    while waiting := [j for j in jobs.values() if not (out / f"{j.name}.json").is_file()]:
        for job in waiting:
            ready = job.needs is None or (out / f"{job.needs}.json").is_file()
            if ready and job.name not in running and len(running) < most:
                running[job.name] = _start(out, size, job, memory)
        for name, process in list(running.items()):
            if process.poll() is not None:
                del running[name]
                if process.returncode:
                    raise SystemExit(f"{name} failed; see {out / name}.log")
                print(f"{name} is done", flush=True)
        time.sleep(0.2)
    return {name: json.loads((out / f"{name}.json").read_text()) for name in jobs}


def write_results(out: Path, jobs: Mapping[str, Any], size: Size, seeds: Sequence[int]) -> None:
    found = summary(jobs, asdict(size), seeds)
    (out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    (out / "visual_search.svg").write_text(picture(found))
    print(table(found))


def ahead_table(jobs: Mapping[str, Any], size: Size, seeds: Sequence[int]) -> str:
    """Percent right under the limit of training and under the largest, with intervals over seeds; means of both."""
    lines = [f"| arm | {size.turns} turns | {LIMITS[-1]} turns | reward of the last ten steps |", "|---" * 4 + "|"]
    for arm in ("masked", *AHEAD):
        found = [jobs[f"{arm}-{seed}"] for seed in seeds]
        columns = [[job["evaluation"]["accuracy"][str(limit)] for job in found] for limit in (size.turns, LIMITS[-1])]
        columns.append([float(np.mean(job["curve"][-10:])) for job in found])
        cells = ("{:.1f} [{:.1f}, {:.1f}]".format(*(100 * x for x in interval(values))) for values in columns)
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _start(out: Path, size: Size, job: Job, memory: float | None) -> subprocess.Popen[bytes]:
    options = [f"--{name}={value}" for name, value in asdict(size).items()]
    options += [f"--memory={memory}"] if memory else []
    with (out / f"{job.name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, __file__, f"--out={out}", f"--job={job.stage},{job.seed}", *options],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/visual_search"))
    parser.add_argument("--tiny", action="store_true", help="small enough for two cores")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ahead", action="store_true", help="arms with rollouts ahead of training instead")
    parser.add_argument("--most", type=int, default=12, help="processes at once")
    parser.add_argument("--memory", type=float, help="GiB of the GPU for each process")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    for field in fields(Size):
        kind = type(field.default)
        reader = (lambda text: text == "True") if kind is bool else kind
        parser.add_argument(f"--{field.name}", type=reader)
    given = vars(parser.parse_args())
    changes = {f.name: given[f.name] for f in fields(Size) if given[f.name] is not None}
    size = replace(TINY if given["tiny"] else Size(), **changes)
    out, memory = given["out"].resolve(), given["memory"]
    if given["job"] is not None:
        stage, seed = given["job"].split(",")
        job = Job(stage=stage, seed=int(seed))
        found = json.dumps(run_job(out, size, job, memory), indent=1)
        (out / f"{job.name}.tmp").write_text(found + "\n")
        (out / f"{job.name}.tmp").replace(out / f"{job.name}.json")
    else:
        seeds = range(given["seeds"])
        stages = ["data", "base", "sft", "masked", *AHEAD] if given["ahead"] else [*STAGES]
        found = run_all(out, size, seeds, given["most"], memory, stages)
        if given["ahead"]:
            print(ahead_table(found, size, seeds))
        else:
            write_results(out, found, size, seeds)


if __name__ == "__main__":
    main()
