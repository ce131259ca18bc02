"""Kill a process of a run of `rl` again and again, at random moments, and resume it: no finished checkpoint may be lost
or damaged, no process may be left behind, and metrics, weights and state must be those of an undisturbed run, to the
bit.

    python scripts/soak.py --kills 1000 --lanes alone ranks sharded --folder /tmp/soak  # three runs side by side

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
from saccade.system.process import end_with_parent

STEPS = 4
LEFT_ALONE = 0.15  # share of starts without a kill, so that some runs finish
MACHINE = ("time", "perf/", "mem/")
# Lane → options of its runs: one process, two ranks, two ranks with sharded weights, two ranks and an engine.
LANES: dict[str, dict[str, Any]] = {
    "alone": {},
    "ranks": {"run.gpus": 2},
    "sharded": {"run.gpus": 2, "train.layout": "sharded"},
    "replica": {"run.gpus": 2, "rollout.replicas": 1},
}
ENGINE = "an engine"


def options(folder: Path, name: str, lane: str, launcher: str) -> dict[str, Any]:
    """Options of a run of a few short steps; about one in five of its first answers counts as right."""
    return {
        "run.name": name,
        "run.out": str(folder),
        "run.device": "cpu",
        "run.max_steps": STEPS,
        "run.resume": "auto",
        **LANES[lane],
        **({"run.launcher": launcher} if "run.gpus" in LANES[lane] else {}),
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
    """Fork a process that makes one call and ends; its output goes to `log`."""
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


def start(folder: Path, name: str, lane: str, launcher: str) -> list[psutil.Process]:
    """Start the run, and the processes that join it as ranks and engines."""
    given = options(folder, name, lane, launcher)
    count = given["run.gpus"] + given.get("rollout.replicas", 0) if given.get("run.launcher") == "join" else 0
    return [forked(rl.run, given, log=folder / f"{name}.out"), *(joining(folder, name) for _ in range(count))]


def joining(folder: Path, name: str) -> psutil.Process:
    return forked(launchers.run_rank, f"127.0.0.1:{launchers.PORT}", log=folder / f"{name}-joined.out")


def outcome(run: Path) -> dict[str, Any]:
    """Metrics of each step, and the hash of each file with weights or state of the last step."""
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
    running: list[psutil.Process], run: Path, saved: list[int], chance: random.Random, seconds: float
) -> str | None:
    """Kill a random process of the run within `seconds`; returns what was killed, or None if the run had ended before.
    The other processes must end, too, unless it was an engine, which is removed from `running`.
    """
    if chance.random() < 0.5:
        time.sleep(chance.uniform(0, seconds))
        moment = "at any moment"
    else:  # up to 50 ms after one of the next checkpoints is begun
        step = chance.randint(min(len(saved) + 1, STEPS), STEPS)
        while not (run / "checkpoints" / f".step-{step}.{running[0].pid}").exists() and ended(running[0]) is None:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.05))
        moment = "while it saved"
    family = [*running, *running[0].children(recursive=True)] if running[0].is_running() else running
    victim = chance.choice(family)
    if ended(running[0]) is not None:
        return None
    engine = joined(running) and victim in running[1:] and victim.pid not in ranks_of(run)
    for one in [victim] if joined(running) else family:
        with suppress(psutil.NoSuchProcess):
            one.send_signal(signal.SIGKILL)
    if engine:
        victim.wait()
        running.remove(victim)
        return f"{ENGINE} {moment}"
    running[0].wait(timeout=120)
    for one in running[1:]:  # an engine that replaces another may not have found the run
        if not connections(one):
            one.send_signal(signal.SIGKILL)
    _, left = psutil.wait_procs(family, timeout=120)
    assert not left, f"left behind: {left}"
    return f"{'the run' if victim is running[0] else 'a rank'} {moment}"


def ranks_of(run: Path) -> set[int]:
    """Process ids of the ranks, from their logs."""
    found = set()
    for log in run.glob("rank-*.log"):
        begun = [line.split()[1] for line in log.read_text().splitlines() if line.startswith("process ")]
        found |= {*map(int, begun[-1:])}
    return found


def joined(running: list[psutil.Process]) -> bool:
    """Whether the run has all its ranks. Until then it waits for minutes for a process to replace a killed one."""
    ranks = sum(connections(process) > 1 for process in running[1:])  # one to the run, then one to the rendezvous
    return len(running) == 1 or ranks >= 2


def connections(process: psutil.Process) -> int:
    try:
        return len(process.net_connections())
    except psutil.Error:
        return 0


def ended(process: psutil.Process) -> int | None:
    """Its exit code; None while it runs."""
    try:
        return process.wait(timeout=0)
    except psutil.TimeoutExpired:
        return None


def require_kept(checkpoints: Path, saved: list[int]) -> list[int]:
    """The steps with complete checkpoints; raises unless they include `saved` and none is damaged."""
    now = complete_steps(checkpoints) if checkpoints.is_dir() else []
    assert set(now) >= set(saved), f"steps {saved} were saved, and {now} are there"
    assert not [path for step in now if (path := damaged(checkpoints / f"step-{step}"))]
    return now


def soak(folder: Path, lane: str, launcher: str, kills: Any, most: int, seed: int) -> None:
    """Start one run after another until `kills`, which all lanes share, has reached `most`."""
    end_with_parent()
    folder.mkdir(exist_ok=True)
    with socket.create_server(("", 0)) as door:
        launchers.PORT = door.getsockname()[1]
    chance, began, runs = random.Random(seed), time.monotonic(), 0
    calm = start(folder, "calm", lane, launcher)
    assert [process.wait() for process in calm] == [0] * len(calm), f"see {folder}/calm.out"
    usual, wanted = time.monotonic() - began, outcome(folder / "calm")
    while kills.value < most:
        name, saved = f"run-{runs}", list[int]()
        what: str | None = ""
        while what is not None:
            running = start(folder, name, lane, launcher)
            first = [*running]
            while True:
                more = kills.value < most and len(saved) < STEPS and chance.random() > LEFT_ALONE
                what = disturb(running, folder / name, saved, chance, usual) if more else None
                if what is not None:
                    with kills.get_lock():
                        kills.value += 1
                    print(f"{kills.value}: killed {what} of {folder.name}/{name}; saved before: {saved}", flush=True)
                if what is None or not what.startswith(ENGINE):
                    break
                running.append(joining(folder, name))
            if what is None:
                codes = [process.wait() for process in first if process in running]
                assert codes == [0] * len(codes), f"see {folder}/{name}.out"
                for process in set(running) - set(first):  # an engine that came too late still waits for a run
                    with suppress(psutil.NoSuchProcess):
                        process.send_signal(signal.SIGKILL)
                        process.wait()
            saved = require_kept(folder / name / "checkpoints", saved)
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
    parser.add_argument("--lanes", nargs="+", choices=LANES, default=["alone"], help="runs side by side")
    parser.add_argument("--launcher", choices=["local", "join"], default="join")
    given = parser.parse_args()
    folder: Path = given.folder
    (folder / "warm").mkdir(parents=True)
    model_setup.quiet_libraries()
    build("qwen2_5_vl", folder / "model", words=WORDS)
    counting.write_jsonl(counting.counting_split(24, seed=1, colours=("red", "blue")), folder, name="train")
    torch.set_num_threads(1)  # a pool of threads would not survive a fork
    os.environ["SACCADE_TOKEN"] = "soak"
    rl.run(options(folder / "warm", "run", "alone", ""))  # imports and caches
    pixel_cache._workers().shutdown()
    pixel_cache._workers.cache_clear()
    for thread in threading.enumerate():  # those of the run end a moment after it
        if thread is not threading.main_thread():
            thread.join(10)
    assert threading.active_count() == 1, threading.enumerate()
    kills, began = multiprocessing.Value("i"), time.monotonic()
    lanes = {
        folder / f"{number}-{lane}": (lane, given.launcher, kills, given.kills, given.seed + number)
        for number, lane in enumerate(given.lanes)
    }
    going = [forked(soak, lane, *rest, log=folder / "soak.out") for lane, rest in lanes.items()]
    codes = [process.wait() for process in going]
    print((folder / "soak.out").read_text())
    if any(codes):
        sys.exit(1)
    print(f"{kills.value} kills in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
