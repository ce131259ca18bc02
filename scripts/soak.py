"""Kill a process of a run of `rl` again and again, at random moments, and resume it: no finished checkpoint may be lost
or damaged, no process may be left behind, and metrics, weights and state must be those of an undisturbed run, to the
bit.

    python scripts/soak.py --kills 1000 --gpus 1 2 2 --folder /tmp/soak  # three runs side by side, two of two ranks

Processes are forked from this one, which has imported all they need; `--launcher local` starts ranks as users do, which
takes longer. Half of the kills hit while a checkpoint is being written.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from saccade.media import pixel_cache
from saccade.models.files import damaged
from saccade.plugins.families.tiny import build
from saccade.plugins.quickstart import counting
from saccade.plugins.quickstart.quickstart import WORDS
from saccade.plugins.ranks import launchers, rank_process, rank_trainer  # noqa: F401  (imported before the first fork)
from saccade.recipes import model_setup, rl
from saccade.run.checkpoint import complete_steps

STEPS = 4
LEFT_ALONE = 0.15  # of the starts: some run has to come to its end
MACHINE = ("time", "perf/", "mem/")


def options(folder: Path, name: str, gpus: int, launcher: str) -> dict[str, Any]:
    """Of a run of a few short steps, of whose first answers about one in five counts as right."""
    return {
        "run.name": name,
        "run.out": str(folder),
        "run.device": "cpu",
        "run.max_steps": STEPS,
        "run.resume": "auto",
        **({"run.gpus": gpus, "run.launcher": launcher} if gpus > 1 else {}),
        "model.path": str(folder.parent / "model"),
        "data.train": str(folder.parent / "train.jsonl"),
        "prompt.instruction": "",
        "prompt.format": "direct",
        "reward.terms": [{"verifier": "count", "args": {"order": ["last_number"], "tolerance": 1}}],
        "rollout.max_tokens": 4,
        "train.prompts_per_step": 2,
        "train.samples_per_prompt": 4,
        "train.lr": 5e-4,
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


def start(folder: Path, name: str, gpus: int, launcher: str) -> list[psutil.Process]:
    """The run, and the ranks that join it."""
    found = [forked(rl.run, options(folder, name, gpus, launcher), log=folder / f"{name}.out")]
    if gpus > 1 and launcher == "join":
        address = f"127.0.0.1:{launchers.PORT}"
        for rank in range(gpus):
            found.append(forked(launchers.run_rank, address, log=folder / f"{name}-rank-{rank}.out"))
    return found


def outcome(run: Path) -> dict[str, Any]:
    """Metrics of each step, and the hash of each file with weights or state of the last one."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, Any] = {
        f"{number} {name}": str(value)
        for number, row in enumerate(rows)
        for name, value in row.items()
        if not name.startswith(MACHINE)
    }
    last = run / "checkpoints" / f"step-{STEPS}"
    files = sorted(last.rglob("*.safetensors"))
    return found | {str(file.relative_to(last)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def disturb(
    running: list[psutil.Process], checkpoints: Path, saved: list[int], chance: random.Random, seconds: float
) -> str | None:
    """Kill one of its processes within so many seconds; what was killed, if it had not ended."""
    if chance.random() < 0.5:
        time.sleep(chance.uniform(0, seconds))
        moment = "at any moment"
    else:  # a few milliseconds after one of the next checkpoints is begun
        step = chance.randint(len(saved) + 1, STEPS)
        while not (checkpoints / f".step-{step}.{running[0].pid}").exists() and ended(running[0]) is None:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.05))
        moment = "while it saved"
    family = [*running, *running[0].children(recursive=True)] if running[0].is_running() else running
    victim = chance.choice(family)
    if ended(running[0]) is not None:
        return None
    for one in [victim] if joined(running) else family:
        with suppress(psutil.NoSuchProcess):
            one.send_signal(signal.SIGKILL)
    _, left = psutil.wait_procs(family, timeout=120)
    assert not left, f"left behind: {left}"
    return f"{'the run' if victim is running[0] else 'a rank'} {moment}"


def joined(running: list[psutil.Process]) -> bool:
    """Whether the run has all its ranks. Before, it waits for others in the place of one that is gone, for minutes."""
    try:
        links = [process.net_connections() for process in running]
    except psutil.NoSuchProcess:
        return False
    return all(len(of_rank) > 1 for of_rank in links[1:])  # to the run, and then to where all ranks meet


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


def soak(folder: Path, gpus: int, launcher: str, kills: Any, most: int, seed: int) -> None:
    """Runs one after the other, until there were so many kills, which several processes count together."""
    folder.mkdir(exist_ok=True)
    with socket.create_server(("", 0)) as door:
        launchers.PORT = door.getsockname()[1]
    chance, began, runs = random.Random(seed), time.monotonic(), 0
    calm = start(folder, "calm", gpus, launcher)
    assert [process.wait() for process in calm] == [0] * len(calm), f"see {folder}/calm.out"
    usual, wanted = time.monotonic() - began, outcome(folder / "calm")
    while kills.value < most:
        name, saved = f"run-{runs}", list[int]()
        checkpoints = folder / name / "checkpoints"
        while True:
            running = start(folder, name, gpus, launcher)
            more = kills.value < most and len(saved) < STEPS and chance.random() > LEFT_ALONE
            what = disturb(running, checkpoints, saved, chance, usual) if more else None
            if what is None:
                assert [process.wait() for process in running] == [0] * len(running), f"see {folder}/{name}.out"
            saved = require_kept(checkpoints, saved)
            if what is None:
                break
            with kills.get_lock():
                kills.value += 1
            done = ", ".join(map(str, saved)) or "nothing"
            print(f"{kills.value}: killed {what} of {folder.name}/{name}; saved: {done}", flush=True)
        found = outcome(folder / name)
        differing = [key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key)]
        assert not differing, f"{folder / name}: not as undisturbed are {sorted(differing)}"
        shutil.rmtree(folder / name)
        runs += 1
    print(f"{folder.name}: {runs} runs, all as undisturbed", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1], help="of each of some runs side by side")
    parser.add_argument("--launcher", choices=["local", "join"], default="join")
    given = parser.parse_args()
    folder: Path = given.folder
    (folder / "warm").mkdir(parents=True)
    model_setup.quiet_libraries()
    build("qwen2_5_vl", folder / "model", words=WORDS)
    counting.write_jsonl(counting.counting_split(24, seed=1, colours=("red", "blue")), folder, name="train")
    torch.set_num_threads(1)  # a pool of threads would not survive a fork
    os.environ["SACCADE_TOKEN"] = "soak"
    rl.run(options(folder / "warm", "run", 1, ""))  # imports and caches
    pixel_cache._workers().shutdown()
    pixel_cache._workers.cache_clear()
    assert threading.active_count() == 1, threading.enumerate()
    kills, began = multiprocessing.Value("i"), time.monotonic()
    lanes = {
        folder / f"{number}-of-{gpus}": (gpus, given.launcher, kills, given.kills, given.seed + number)
        for number, gpus in enumerate(given.gpus)
    }
    going = [forked(soak, lane, *rest, log=folder / "soak.out") for lane, rest in lanes.items()]
    codes = [process.wait() for process in going]
    print((folder / "soak.out").read_text())
    if any(codes):
        sys.exit(1)
    print(f"{kills.value} kills in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
