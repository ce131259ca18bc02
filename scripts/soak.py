"""Kill a process of a run on several GPUs again and again, at random moments, and resume it: no finished checkpoint may
be lost or damaged, no process may be left behind, and the numbers must be those of an undisturbed run.

    python scripts/soak.py --kills 20 --folder /tmp/soak
"""

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import yaml

from saccade.models.files import damaged
from saccade.plugins.quickstart import counting
from saccade.run.checkpoint import complete_steps

STEPS = 6
MACHINE = ("time/", "perf/", "mem/")


def options(folder: Path, name: str) -> dict[str, Any]:
    counting.write_jsonl(counting.counting_split(24, seed=24, colours=("red", "blue")), folder, name="train")
    sizes = {"prompts_per_step": 4, "samples_per_prompt": 4, "eps": 1e-3, "schedule": "constant"}
    return {
        "run": {"name": name, "out": str(folder), "device": "cpu", "max_steps": STEPS, "gpus": 2, "resume": "auto"},
        "model": {"path": "tiny:qwen2_5_vl"},
        "data": {"train": str(folder / "train.jsonl")},
        "prompt": {"format": "direct"},
        "reward": {"terms": ["count"]},
        "rollout": {"max_tokens": 6},
        "train": sizes,
        "save": {"every": 1, "keep": STEPS},
        "track": {"tensorboard": False},
    }


def start(folder: Path, name: str) -> subprocess.Popen[bytes]:
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(options(folder, name)))
    with (folder / f"{name}.out").open("ab") as out:
        return subprocess.Popen([sys.executable, "-m", "saccade", "rl", str(file)], stdout=out, stderr=out)


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


def disturb(running: subprocess.Popen[bytes], chance: random.Random, seconds: float) -> str:
    """Kill one of its processes within so many seconds; what was killed."""
    time.sleep(chance.uniform(0, seconds))
    try:
        family = [psutil.Process(running.pid), *psutil.Process(running.pid).children(recursive=True)]
        victim = chance.choice(family)
        name = "controller" if victim.pid == running.pid else "rank"
        victim.kill()
    except psutil.NoSuchProcess:
        return "nothing, it had ended"
    running.wait(60)
    _, left = psutil.wait_procs(family, timeout=30)
    assert not left, f"left behind: {left}"
    return name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(given.seed)
    began = time.monotonic()
    assert start(given.folder, "calm").wait() == 0
    usual, kills, runs = time.monotonic() - began, 0, 0
    while kills < given.kills:
        name, saved = f"run-{runs}", [0]
        while True:
            running = start(given.folder, name)
            if kills < given.kills and len(saved) <= STEPS:
                kills += 1
                what = disturb(running, chance, usual)
                checkpoints = given.folder / name / "checkpoints"
                now = complete_steps(checkpoints) if checkpoints.is_dir() else []
                assert not [path for step in now if (path := damaged(checkpoints / f"step-{step}"))]
                assert not now or now[-1] >= saved[-1], f"step {saved[-1]} was saved, and {now} are there"
                saved = now or saved
                print(f"{kills}: killed {what} of {name}; saved: step {saved[-1]}", flush=True)
            if running.wait() == 0:
                break
        assert alike(numbers(given.folder / "calm"), numbers(given.folder / name)), name
        runs += 1
    print(f"{kills} kills, {runs} runs, all as undisturbed", flush=True)


if __name__ == "__main__":
    main()
