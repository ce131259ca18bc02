"""Runs programs of the benchmarks as processes with a time limit; each writes one result.

    bench = Bench(folder=Path("runs/x"), model=ensure_model(Path("runs/x/model"), "tiny"))
    run(bench, "saccade-t1", ("rl_step.py",), "T1", steps=2)["status"]       # ok | failed

A program reads --model, --work, --steps and --data, and writes a JSON file to --result (works.py).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from works import parse, write_rows

HERE = Path(__file__).resolve().parent
LIMIT = 520.0  # seconds per part
LOOK = 0.5  # seconds between two polls of the GPU's memory


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the description as written, and the defaults of options that have one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


@dataclass(frozen=True, kw_only=True)
class Bench:
    folder: Path  # for rows, logs and results
    model: Path
    limit: float = LIMIT


def run(
    bench: Bench, name: str, program: Sequence[str], work: str, *, steps: int, more: Sequence = ()
) -> dict[str, Any]:
    """Run a program; returns its result, or the reason of its failure."""
    data = bench.folder / "data" / f"{work}-{steps}" / "train.jsonl"
    if not data.exists():
        write_rows(data.parent, str(bench.model), parse(work), steps)
    log, result = bench.folder / f"{name}.log", bench.folder / f"{name}.json"
    result.unlink(missing_ok=True)
    command = [*program, "--model", bench.model, "--work", work, "--steps", steps]
    command += ["--data", data, "--result", result, *more]
    began = time.time()
    held, problem = start(command, log=log, limit=bench.limit)
    about = {"work": work, "asked": parse(work), "options": list(map(str, more))}
    about |= {"took": time.time() - began, "gpu_gib": held}
    if problem is not None:
        return about | {"status": "failed", "reason": problem}
    return about | {"status": "ok"} | json.loads(result.read_text())


def start(command: Sequence[Any], *, log: Path, limit: float) -> tuple[float | None, str | None]:
    """Run a command; returns the peak GiB in use on the GPU, and what went wrong, if anything."""
    paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    surroundings = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
    held: list[float] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            cwd=HERE,
            env=os.environ | surroundings,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its own processes can be ended with it
        )
        try:
            end = time.time() + limit
            while process.poll() is None and time.time() < end:
                held += gpu_memory()
                time.sleep(LOOK)
        finally:  # also if interrupted: a part that goes on would hold the GPU
            late = process.poll() is None
            if late:
                os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    most = max(held, default=None)
    if late:
        return most, f"not done after {limit:.0f} s, see {log}"
    last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
    return most, f"exit code {code}, {''.join(last)[-300:]}, see {log}" if code else None


def gpu_memory() -> list[float]:
    """GiB in use now on the GPU, by all processes; empty without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    which = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = ["nvidia-smi", "-i", which, "--query-gpu=memory.used"]
    found = subprocess.run(
        [*query, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return [int(found) / 1024] if found.isdigit() else []


def ensure_model(folder: Path, size: str, limit: float = LIMIT) -> Path:
    """Build the model if it is missing, in a separate process, so that the GPU's memory is freed."""
    if not folder.exists():
        require_gpu(size)
        code = f"import model; model.build({str(folder)!r}, {size!r})"
        _, problem = start(["-c", code], log=Path(f"{folder}.log"), limit=limit)
        if problem is not None:
            raise SystemExit(f"the model could not be built: {problem}")
    return folder


def require_gpu(size: str) -> None:
    import torch

    if size != "tiny" and not torch.cuda.is_available():
        raise SystemExit(f"a {size} model needs a GPU; --tiny is the dry run on a CPU")


def read(paths: Sequence[Path]) -> dict[str, Any]:
    """Merge the parts of several files: for each the last that succeeded, else the first."""
    parts: dict[str, Any] = {}
    for path in paths:
        found = json.loads(path.read_text())["parts"] if path.exists() else {}
        parts |= {n: p for n, p in found.items() if n not in parts or p["status"] == "ok"}
    return parts


def write(path: Path, parts: dict[str, Any]) -> None:
    path.write_text(json.dumps({"parts": parts}, indent=1) + "\n")


def warm(part: dict[str, Any], name: str) -> float | None:
    """Median over the steps after the first, which loads kernels and allocates memory."""
    values = [step[name] for step in part["steps"][1:] or part["steps"] if name in step]
    return median(values) if values and None not in values else None


def shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
