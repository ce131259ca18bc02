"""Runs the arms and seeds of an experiment as `saccade` commands, several at once, and stores a small JSON of each run.
Does not interpret results; pages.py reads the JSONs.

    jobs = [Job(arm="grpo", seed=0, command="rl", options=("rl.yaml", "train.lr=1e-5"), after="cold")]
    run_all(jobs, Path("runs/language"), Path("results"), at_once=4, until=time.time() + 600)

    args = command_line(__doc__, "language").parse_args()     # --out, --seeds, --arms, --dev, --tiny, --rehearse …
    options_of(HERE, args, ["rl.yaml"], {"model.path": model, "data.val": sets}, "train.lr=1e-5")  # of a Job
    run_and_write(jobs, args, HERE, write_page)               # runs, stores their JSONs, writes the page
"""

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from saccade.cli_run import run_recipe
from saccade.run.loggers import read_metrics
from saccade.system.revision import revision

ROOT = Path(__file__).resolve().parents[1]
# Metrics that are stored of a run; `rollouts` are all that were sampled so far, dropped ones included.
STORED = re.compile(
    r"val/.*/(reward|accuracy(_within_\d+_turns)?|turns/(mean|end/\w+)|pass@\d+|response_mean|truncated_frac|items)"
    r"|reward/(accuracy|learned)|length/response_mean|group/dead_frac|policy/(entropy|kl_ref)|sft/loss|rollouts"
    r"|mismatch/(ess|logp_gap_max)|data/staleness_mean|time/validation"
)
STEPS, SAID, LONG = 60, 4, 80  # also so many answers, cut to so many characters
QUIT = b"quit -t 10\n"  # seconds, after which the daemon no longer waits for its server: that may take for ever
COMPUTES = "import torch; torch.ones(1, device='cuda').sum().item()"
REHEARSED, FEW = ("run.max_steps=2", "train.warmup=0"), 8  # of --rehearse: steps of an arm, items of a validation set


@dataclass(frozen=True, kw_only=True)
class Job:
    arm: str
    seed: int
    command: str  # rl, sft, eval, …
    options: tuple[str, ...]  # YAML files, then options
    after: str = ""  # arm whose model of the same seed is the start, or replaces {after} in the options
    of_seed: int | None = None  # seed of that model, if it is not the same

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.seed}"

    @property
    def parent(self) -> str:
        return self.after and f"{self.after}-{self.seed if self.of_seed is None else self.of_seed}"


def run_all(
    jobs: Sequence[Job], out: Path, stored: Path, *, at_once: int = 1, until: float = math.inf, commit: str = ""
) -> list[str]:
    """Run every job without OUT/results/NAME.json, parents first; returns the names of those that failed. Each JSON is
    copied to `stored` when its run ends. With `at_once` 0 they run in this process. Jobs still running at time `until`
    are killed; the next call restarts them.
    """
    results = out / "results"
    results.mkdir(parents=True, exist_ok=True)
    shutil.copytree(results, stored, dirs_exist_ok=True)
    named = {job.name: job for job in jobs}
    waiting = {name: job for name, job in named.items() if not (results / f"{name}.json").exists()}
    for job in [*waiting.values()]:  # a parent with a result but without a checkpoint runs again
        while job.after and model_of(out, job := named[job.parent]) is None:
            waiting = {job.name: job} | waiting
    about = {"commit": commit or revision() or "unknown", "device": of_gpu("name") or "CPU", "at_once": max(1, at_once)}
    with shared_gpu(at_once) if waiting else nullcontext():
        return _run(named, waiting, out, stored, at_once, until, about)


def _run(
    named: Mapping[str, Job],
    waiting: dict[str, Job],
    out: Path,
    stored: Path,
    at_once: int,
    until: float,
    about: Mapping[str, Any],
) -> list[str]:
    results, failed = out / "results", list[str]()
    running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
    while waiting or running:
        blocked = {*waiting, *running}
        for name, job in [*waiting.items()]:
            if job.parent in failed:
                failed.append(waiting.pop(name).name)
            elif job.parent not in blocked and len(running) < max(1, at_once):
                waiting.pop(name)
                shutil.rmtree(out / name, ignore_errors=True)  # left by a run that was killed
                began = time.time()
                running[name] = (start(job, out, named.get(job.parent), at_once), began)
        time.sleep(0.1 if at_once else 0)
        over = time.time() > until
        for name, (process, began) in [*running.items()]:
            code, cut_off = process.poll(), False
            if code is None and not over:
                continue
            if code is None:
                process.kill()
                code, cut_off = process.wait(), True
            del running[name]
            took = time.time() - began
            found, reason = curves_of(out, named[name]) if code == 0 else ({}, last_lines(out / f"{name}.log"))
            said = "done" if found else "cut off" if cut_off else "failed"
            print(f"{name}: {said} after {took:.0f} s", flush=True)
            if found:
                found = {**about, "began": round(began, 1), "seconds": round(took, 1)} | found
                (results / f"{name}.json").write_text(json.dumps(found) + "\n")
                shutil.copy(results / f"{name}.json", stored)
                needed = any(job.after == named[name].arm for job in named.values())
                for path in out.glob(f"{name}/checkpoints/*{'/state' if needed else ''}"):
                    shutil.rmtree(path)
            else:
                failed.append(name)
            if said == "failed":
                print(reason, flush=True)
        if over:
            return [*failed, *waiting]
    return failed


def last_lines(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])


class Done:
    """Stands for a process that has ended with this exit code."""

    def __init__(self, code: int) -> None:
        self.poll = self.wait = lambda: code
        self.kill = lambda: None


def start(job: Job, out: Path, parent: Job | None, at_once: int) -> Any:
    arguments = [*job.options, f"run.name={job.name}", f"run.out={out}", f"run.seed={job.seed}"]
    if parent is not None and any("{after}" in option for option in arguments):
        arguments = [option.replace("{after}", str(model_of(out, parent))) for option in arguments]
    elif parent is not None:
        arguments.append(f"model.path={model_of(out, parent)}")
    if not at_once:
        try:
            run_recipe(job.command, arguments)
        except Exception:  # the other runs continue
            (out / f"{job.name}.log").write_text(traceback.format_exc(), encoding="utf-8")
            return Done(1)
        return Done(0)
    if memory := of_gpu("memory.total"):  # MiB, divided among the runs
        arguments.append(f"run.gpu_memory_gib={0.95 * float(memory) / 1024 / at_once:.1f}")
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // at_once))
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (out / f"{job.name}.log").open("w") as log:
        command = [sys.executable, "-m", "saccade", job.command, *arguments]
        return subprocess.Popen(
            command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": threads, "PYTHONPATH": path}
        )


def model_of(out: Path, job: Job) -> Path | None:
    """The last checkpoint of a finished run; None if there is none."""
    saved = out.glob(f"{job.name}/checkpoints/step-*") if (out / "results" / f"{job.name}.json").exists() else ()
    return max(saved, key=lambda path: int(path.name.partition("-")[2]), default=None)


def of_gpu(field: str) -> str:
    """What nvidia-smi says of the first GPU; empty without one, and where CUDA_VISIBLE_DEVICES is empty."""
    asked = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    there = shutil.which(asked[0]) and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    return subprocess.check_output(asked, text=True).splitlines()[0] if there else ""


@contextmanager
def shared_gpu(at_once: int) -> Iterator[None]:
    """NVIDIA's MPS daemon, if it is installed, for as long as runs are side by side: without it their kernels take
    turns. Where a process cannot compute through it, runs go without.
    """
    control = shutil.which("nvidia-cuda-mps-control") if at_once > 1 and of_gpu("name") else None
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}  # daemons keep pipes open
    started = control and subprocess.run([control, "-d"], **quiet).returncode == 0  # 1: it runs already
    if started and (asked := subprocess.run([sys.executable, "-c", COMPUTES], capture_output=True)).returncode:
        print(f"without MPS: {asked.stderr.decode(errors='replace').strip().rpartition(chr(10))[2]}", flush=True)
        subprocess.run([control], input=QUIT, **quiet)
        started = False
    try:
        yield
    finally:
        if started:
            subprocess.run([control], input=QUIT, **quiet)


def curves_of(out: Path, job: Job) -> tuple[dict[str, Any], str]:
    """Of each metric step, seconds since the first row, and value; nothing and the reason where a run has no rows."""
    folder, tables = (f"{job.name}-eval" if job.command == "eval" else job.name), dict[str, Any]()
    if job.command == "eval":
        sets = json.loads((out / folder / "results.json").read_text())
        tables = {one: found["by_category"] for one, found in sets.items() if found.get("by_category")}
        rows = [{f"val/{one}/{name}": value for one, found in sets.items() for name, value in found.items()}]
        rows = [{"step": 0, "time": 0.0, **row} for row in rows]
    else:
        rows = [*read_metrics(out / folder)]
    if not rows:
        return {}, f"{out / folder} has no metrics"
    curves, drawn = dict[str, list[tuple[int, float, float]]](), 0
    for row in rows:
        drawn += int(row.get("count/samples", 0))
        for name, value in (row | {"rollouts": drawn} if drawn else row).items():
            if STORED.fullmatch(name) and value is not None:
                point = (row["step"], round(row["time"] - rows[0]["time"], 1), round(value, 5))
                curves.setdefault(name, []).append(point)
    thinned = {name: [points[i] for i in sorted({*np.linspace(0, len(points) - 1, STEPS, dtype=int).tolist()})]
               for name, points in curves.items()}  # fmt: skip
    found = {"steps": rows[-1]["step"], "rollouts": drawn, "curves": thinned, "said": said_by(out / folder)}
    return found | ({"tables": tables} if tables else {}), ""


def said_by(folder: Path) -> list[tuple[str, str]]:
    """(right answer, response) of the first rollouts of the last validation."""
    stored = max(folder.glob("trajectories/val/*/*.jsonl"), key=lambda path: path.stat().st_mtime, default=None)
    rows = [json.loads(line) for line in stored.open(encoding="utf-8")][:SAID] if stored else []
    last = [row["messages"][-1]["content"] for row in rows]
    texts = ["".join(part.get("text", "") for part in parts) for parts in last]
    return [(str(row["gold"])[:LONG], text[:LONG]) for row, text in zip(rows, texts, strict=True)]


# -- the script of an experiment --------------------------------------------------------------------


def options_of(
    here: Path, args: argparse.Namespace, files: Sequence[str], given: Mapping[str, object], *changes: str
) -> tuple[str, ...]:
    """Of a Job: YAML files of the folder `here`, with --tiny its tiny.yaml over them, the options that are `given` a
    value, and changes.
    """
    paths = [str(here / name) for name in (*files, *["tiny.yaml"] * args.tiny)]
    texts = {name: str(v) if isinstance(v, str | Path) else json.dumps(v) for name, v in given.items() if v}
    return (*paths, *(f"{name}={text}" for name, text in texts.items()), *changes)


def rehearsed(jobs: Sequence[Job]) -> list[Job]:
    """The first seed of each arm: two steps, and a few items of each validation set."""
    firsts = {job.arm: job for job in reversed(jobs)}

    def few(option: str) -> str:
        name, _, value = option.partition("=")
        if name != "data.val":
            return option
        sets = [{"path": one} if isinstance(one, str) else one
                for one in (json.loads(value) if value.startswith("[") else [value])]  # fmt: skip
        return f"{name}={json.dumps([one | {'max_samples': FEW} for one in sets])}"

    return [
        replace(job, options=(*map(few, job.options), *(REHEARSED if job.command != "eval" else ())))
        for job in jobs
        if firsts[job.arm] is job
    ]


def command_line(about: str, name: str, at_once: int = 1) -> argparse.ArgumentParser:
    """The parser with the options of every experiment; `about` is its docstring."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / name)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    parser.add_argument("--arms", nargs="*", help="only these, and those whose models they start from")
    parser.add_argument("--at-once", type=int, default=at_once, help=f"runs side by side, {at_once} unless given")
    ask_for_seconds(parser)
    parser.add_argument("--commit", default="", help="where there is no git")
    parser.add_argument("--dev", action="store_true", help="the trials by which settings were chosen")
    parser.add_argument("--page", action="store_true", help="only write the page of the stored results")
    parser.add_argument("--tiny", action="store_true", help="a random model on a CPU, in seconds")
    parser.add_argument("--rehearse", action="store_true", help="two steps of each arm, one seed; results apart")
    parser.add_argument("--go-on", action="store_true", help="not again what is stored, also where runs/ is gone")
    return parser


def ask_for_seconds(parser: argparse.ArgumentParser) -> None:
    """Add --seconds, as the time at which to stop; preparation before the first run counts, too."""

    def seconds(text: str) -> float:
        return time.time() + float(text)

    about = "stop so many seconds after the start; the next call goes on"
    parser.add_argument("--seconds", dest="until", type=seconds, default=math.inf, metavar="SECONDS", help=about)


def chosen(jobs: Sequence[Job], arms: Collection[str] | None) -> list[Job]:
    """The jobs of these arms, and of the arms whose models they start from."""
    known, wanted = {job.arm: job.after for job in jobs}, set(arms or (job.arm for job in jobs))
    if unknown := wanted - known.keys():
        sys.exit(f"--arms {' '.join(sorted(unknown))}: expected some of {', '.join(known)}")
    for arm in [*wanted]:
        while arm := known[arm]:
            wanted.add(arm)
    return [job for job in jobs if job.arm in wanted]


WritePage = Callable[[Path, Path, Path], None]  # folder of the JSONs, page, folder of its pictures


def run_and_write(jobs: Sequence[Job], args: argparse.Namespace, here: Path, write_page: WritePage) -> None:
    """Run the jobs and write the page; then exit with the names of failed runs, if any."""
    name_failed(carry_out(jobs, args, here, write_page))


def name_failed(failed: Sequence[str]) -> None:
    if failed:
        sys.exit(f"not finished: {', '.join(failed)}")


def carry_out(jobs: Sequence[Job], args: argparse.Namespace, here: Path, write_page: WritePage) -> list[str]:
    """Run the jobs, keep their JSONs beside the script and write its page; with --tiny and --rehearse, all in OUT.
    Returns the names of runs that failed.
    """
    out = out_of(args)
    results, page, images = (here / "results", here, ROOT / "docs/images")
    if args.tiny or args.rehearse:
        results, page, images = out / "results", out, out
    stored, failed = results / "dev" if args.dev else results, list[str]()
    if not args.page:
        runs = out / ("dev" if args.dev else "test")
        jobs = chosen(jobs, args.arms)
        if args.rehearse:
            jobs = rehearsed(jobs)
            shutil.rmtree(runs, ignore_errors=True)
        (runs / "results").mkdir(parents=True, exist_ok=True)
        for path in stored.glob("*.json") if args.go_on and not args.rehearse else ():
            if not (runs / "results" / path.name).exists():
                shutil.copy(path, runs / "results")
        at_once = 0 if args.tiny else args.at_once
        failed = run_all(jobs, runs, stored, at_once=at_once, until=args.until, commit=args.commit)
    if not any(results.glob("*.json")):  # a page of trials alone is none of the experiment's
        if args.page:
            sys.exit(f"{results} holds no results yet; leave --page out")
        page = images = out
    images.mkdir(parents=True, exist_ok=True)
    write_page(results, page / "RESULTS.md", images)
    return failed


def out_of(args: argparse.Namespace) -> Path:
    """Runs lie in its folders dev and test; a rehearsal is apart."""
    return Path(args.out.resolve() / ("rehearsal" if args.rehearse else ""))
