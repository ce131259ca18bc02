"""Kill a process of a run again and again, at random moments, and resume it: no finished checkpoint may be lost or
damaged, no process may be left behind, and the numbers must be those of an undisturbed run.

    python scripts/soak.py --kills 1000 --folder /tmp/soak                          # one process
    python scripts/soak.py --kills 200 --gpus 2 --launcher join --folder /tmp/soak  # a controller and two ranks

Processes are forked from this one, which has imported all they need; `--launcher local` starts ranks as users do, which
takes longer. Half of the kills hit while a checkpoint is being written.
"""

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from saccade.media import pixel_cache
from saccade.models.files import damaged
from saccade.plugins.ranks import launchers, rank_process, rank_trainer  # noqa: F401  (imported before the first fork)
from saccade.recipes import sft
from saccade.run.checkpoint import complete_steps

STEPS = 6
MACHINE = ("time/", "perf/", "mem/")


def options(folder: Path, name: str, given: Any) -> dict[str, Any]:
    return {
        "run.name": name,
        "run.out": str(folder),
        "run.device": "cpu",
        "run.max_steps": STEPS,
        "run.resume": "auto",
        **({"run.gpus": given.gpus, "run.launcher": given.launcher} if given.gpus > 1 else {}),
        "model.path": "tiny:qwen2",
        "data.train": str(folder / "train.jsonl"),
        "train.prompts_per_step": 2,
        "train.lr": 1e-3,
        "train.eps": 1e-3,
        "train.schedule": "constant",
        "save.every": 1,
        "save.keep": STEPS,
        "track.tensorboard": False,
    }


def forked(call: Callable[..., Any], *arguments: Any, log: Path) -> psutil.Process:
    """A process that makes one call and ends."""
    if pid := os.fork():
        return psutil.Process(pid)
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(out, number)
    try:
        call(*arguments)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def start(folder: Path, name: str, given: Any) -> list[psutil.Process]:
    """The run, and the ranks that join it."""
    found = [forked(sft.run, options(folder, name, given), log=folder / f"{name}.out")]
    if given.gpus > 1 and given.launcher == "join":
        address = f"127.0.0.1:{launchers.PORT}"
        for rank in range(given.gpus):
            found.append(forked(launchers.run_rank, address, log=folder / f"{name}-rank-{rank}.out"))
    return found


def numbers(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(MACHINE)} for row in rows]


def alike(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    """Up to the order of sums, which does not depend on a kill; so nearly to the bit."""
    return len(one) == len(other) and all(
        abs(a[name] - b[name]) <= 1e-4 * abs(a[name]) + 1e-5
        for a, b in zip(one, other, strict=True)
        for name in a
        if isinstance(a[name], float) and a[name] == a[name]
    )


def disturb(running: list[psutil.Process], checkpoints: Path, chance: random.Random, seconds: float) -> str | None:
    """Kill one of its processes within so many seconds; what was killed, if it had not ended."""
    if chance.random() < 0.5:
        time.sleep(chance.uniform(0, seconds))
        moment = "at any moment"
    else:  # a few milliseconds after a checkpoint is begun
        while not any(checkpoints.glob(f".step-*.{running[0].pid}")) and ended(running[0]) is None:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.05))
        moment = "while it saved"
    family = [*running, *running[0].children(recursive=True)] if running[0].is_running() else running
    victim = chance.choice(family)
    if ended(running[0]) is not None:
        return None
    begun = all(rank.is_running() and rank.net_connections() for rank in running[1:])
    for one in [victim] if begun else family:  # else they wait for each other for minutes
        one.send_signal(signal.SIGKILL)
    _, left = psutil.wait_procs(family, timeout=120)
    assert not left, f"left behind: {left}"
    return f"{'the run' if victim is running[0] else 'a rank'} {moment}"


def ended(process: psutil.Process) -> int | None:
    """Its exit code; None while it runs."""
    try:
        return process.wait(timeout=0)
    except psutil.TimeoutExpired:
        return None


def require_kept(checkpoints: Path, saved: list[int]) -> list[int]:
    """The steps that are whole, among which are those that were."""
    now = complete_steps(checkpoints) if checkpoints.is_dir() else []
    assert set(now) >= set(saved), f"steps {saved} were saved, and {now} are there"
    assert not [path for step in now if (path := damaged(checkpoints / f"step-{step}"))]
    return now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--launcher", choices=["local", "join"], default="local")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    turns = [[("user", f"say {n}"), ("assistant", f"{n} {n + 1}")] for n in range(24)]
    rows = [{"messages": [{"role": role, "content": text} for role, text in both]} for both in turns]
    (given.folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    torch.set_num_threads(1)  # a pool of threads would not survive a fork
    os.environ["SACCADE_TOKEN"] = "soak"
    alone = argparse.Namespace(gpus=1)
    sft.run(options(given.folder, "warm", alone))  # imports and caches
    pixel_cache._workers().shutdown()
    pixel_cache._workers.cache_clear()
    assert threading.active_count() == 1, threading.enumerate()
    chance, began = random.Random(given.seed), time.monotonic()
    calm = start(given.folder, "calm", given)
    assert [process.wait() for process in calm] == [0] * len(calm), f"see {given.folder}/calm.out"
    usual, kills, runs = time.monotonic() - began, 0, 0
    while kills < given.kills:
        name, saved = f"run-{runs}", list[int]()
        checkpoints = given.folder / name / "checkpoints"
        while True:
            running = start(given.folder, name, given)
            more = kills < given.kills and len(saved) < STEPS
            what = disturb(running, checkpoints, chance, usual) if more else None
            kills += what is not None
            if what is None:
                assert [process.wait() for process in running] == [0] * len(running), f"see {given.folder}/{name}.out"
            saved = require_kept(checkpoints, saved)
            if what is None:
                break
            print(f"{kills}: killed {what} of {name}; saved: {', '.join(map(str, saved))}", flush=True)
        assert alike(numbers(given.folder / "calm"), numbers(given.folder / name)), name
        runs += 1
    print(f"{kills} kills, {runs} runs, all as undisturbed, {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
