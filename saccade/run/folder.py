"""The folder of a run: created once, locked while a process writes to it, compared with the config on resume.

Does not interpret the metrics, rollouts and checkpoints inside it.

    with RunFolder.open(options, texts, command="rl", manifest={"data": hashes}) as folder:
        print(folder.metrics)
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from fnmatch import fnmatch
from functools import cache
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import Any

from saccade import config as configs
from saccade.errors import ConfigError, EnvironmentProblem, SaccadeError
from saccade.system.revision import revision

CHOSEN = "config.yaml"  # the options that were given; CONFIG holds all options
CONFIG, MANIFEST, METRICS, LOG = "config.resolved.yaml", "manifest.json", "metrics.jsonl", "log.txt"
TRAJECTORIES, CHECKPOINTS, LOCK = "trajectories", "checkpoints", ".lock"
RECORD = "record"  # inside TRAJECTORIES: completions, with rollout.record=write
OF_RANKS = ("rank-*.log", ".seen-by-ranks*")  # written by the ranks of a run on several GPUs
QUARANTINE = "quarantine.jsonl"  # rows that are left out
RESULTS = "results.json"  # of an evaluation

# What a resumed run may change: its length, hardware and memory layout, its validation and logging (a changed
# validation set is reported), which failures it tolerates, and where its judge is. `run.name` and `run.out` only say
# where the folder is.
MAY_DIFFER = (
    *("run.max_steps", "run.max_hours", "run.resume", "run.name", "run.out", "run.trace"),
    *("run.gpus", "run.launcher", "run.restarts", "run.min_gpus", "rollout.replicas"),
    *("train.layout", "train.offload", "train.sequence_parallel", "train.micro_tokens", "model.checkpointing"),
    *("reward.max_error_rate", "reward.deadline", "reward.workers", "data.max_bad_fraction"),
    "data.val",
    *("reward.judge.url", "reward.judge.key", "reward.judge.cache", "reward.judge.price"),
    *("reward.judge.concurrency", "reward.judge.per_minute", "reward.judge.retries"),
    *("reward.judge.timeout", "reward.judge.deadline"),
)
MAY_DIFFER_SECTIONS = ("run.stop.", "val.", "save.", "track.")
REFUSALS = (2, 3)  # exit codes of a run that was refused before it began
# Keys of the manifest that a resumed run must find unchanged.
PINNED = ("data", "template", "weights")

PACKAGES = (
    *("saccade", "torch", "transformers", "tokenizers", "safetensors", "numpy", "pillow"),
    *("pydantic", "PyYAML", "typer", "rich", "datasets", "accelerate", "peft", "math-verify"),
    *("triton", "tensorboard", "wandb", "mlflow", "swanlab"),
)


class RunFolder:
    """The folder of a run. `resumed` says whether there was a run in it before."""

    def __init__(self, path: Path, *, resumed: bool) -> None:
        self.path, self.resumed = path, resumed
        self.metrics, self.log = path / METRICS, path / LOG
        self.trajectories, self.checkpoints = path / TRAJECTORIES, path / CHECKPOINTS
        self.changed: list[str] = []  # files of the user's functions that changed since the last start

    @classmethod
    @contextmanager
    def open(
        cls, options: Mapping[str, Any], texts: Mapping[str, str], *, command: str, manifest: Mapping[str, Any]
    ) -> Iterator[RunFolder]:
        """Create OUT/NAME and write its config and manifest, or resume the run in it. The folder is locked against
        other processes until the context ends. `options`: all options as a tree; `texts`: the config files to write, by
        name.
        """
        path = Path(options["run"]["out"]) / options["run"]["name"]
        existed = path.exists()
        if existed and not path.is_dir():
            raise ConfigError(f"{path} is a file; choose another run.name or --out")
        path.mkdir(parents=True, exist_ok=True)
        with locked(path):
            folder = cls(path, resumed=existed and _take_up(path, options, manifest))
            folder._write_start(options, texts, {**manifest, "command": command})
            try:
                yield folder
            except (SaccadeError, KeyboardInterrupt) as error:
                if getattr(error, "exit_code", REFUSALS[0]) in REFUSALS and not folder.resumed:
                    folder._remove_if_nothing_happened()
                raise

    def set_aside_records(self) -> list[str]:
        """Rename metrics and rollouts, because the run starts again; returns the new names."""
        number = next(n for n in count(1) if not (self.path / f"{METRICS}.{n}").exists())
        for file in (self.metrics, self.trajectories):
            file.rename(f"{file}.{number}")
        self.metrics.touch()
        self.trajectories.mkdir()
        return [f"{METRICS}.{number}", f"{TRAJECTORIES}.{number}"]

    def _write_start(self, options: Mapping[str, Any], texts: Mapping[str, str], manifest: Mapping[str, Any]) -> None:
        for folder in (self.trajectories, self.checkpoints):
            folder.mkdir(exist_ok=True)
        for file in (self.metrics, self.log):
            file.touch()
        before = read_manifest(self.path) if self.resumed else {}
        facts = start_facts(options, manifest, before)
        hashes = before.get("functions", {})
        self.changed = [f for f, digest in facts["functions"].items() if hashes.get(f, digest) != digest]
        write_start(self.path, texts, facts)

    def _remove_if_nothing_happened(self) -> None:
        """Remove the folder of a start that was refused or interrupted, so that the command can be given again, unless
        it contains anything that `open` did not write.
        """
        inside = {str(entry.relative_to(self.path)) for entry in self.path.rglob("*")}
        ours = {CHOSEN, CONFIG, MANIFEST, METRICS, LOG, LOCK, TRAJECTORIES, CHECKPOINTS}
        ours |= {file.name for pattern in OF_RANKS for file in self.path.glob(pattern)}
        if inside <= ours and not self.metrics.stat().st_size:
            for name in (CHOSEN, MANIFEST, CONFIG):  # first: without them, a start in this folder is allowed
                (self.path / name).unlink(missing_ok=True)
            shutil.rmtree(self.path, ignore_errors=True)  # a rank that has not ended yet may write its log


# -- resume ----------------------------------------------------------------------------------------


def _take_up(path: Path, options: Mapping[str, Any], manifest: Mapping[str, Any]) -> bool:
    """Whether the folder holds a run to resume; raises if that run cannot be continued."""
    if options["run"]["resume"] == "none":
        raise ConfigError(f"{path} exists: use run.resume=auto to continue it, or another run.name=… or --out DIR")
    stored = path / CONFIG
    if not stored.exists():
        made_here = (LOCK, TRAJECTORIES, CHECKPOINTS, METRICS, LOG, f"{CONFIG}.*", *OF_RANKS)
        if all(any(fnmatch(entry.name, pattern) for pattern in made_here) for entry in path.iterdir()):
            return False  # killed before its first file was complete, or while it was removed
        raise ConfigError(f"{path} holds other files and no run; choose another run.name=… or --out DIR")
    before = configs.load(stored).model_dump(mode="json")
    changes = [
        f"{key}: {old!r} in the folder, {new!r} now"
        for key, (old, new) in differences(before, options).items()
        if key not in MAY_DIFFER and not key.startswith(MAY_DIFFER_SECTIONS)
    ]
    changes += _manifest_changes(read_manifest(path), manifest)
    if changes:
        listed = "\n  ".join(changes)
        raise ConfigError(f"{path} began with other options; restore them, or choose another run.name=…\n  {listed}")
    return True


def _manifest_changes(stored: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[str]:
    now = json.loads(json.dumps(dict(manifest), default=str))
    # What is missing now is reported by the code that needs it.
    changed = [key for key in PINNED if key in stored and now.get(key) not in (None, stored[key])]
    reasons = {key: f"{stored[key]!r} in the folder, {now[key]!r} now" for key in changed}
    files = [  # which of the data changed
        f"{new['path']}, or a medium that its rows show ({old['rows']} usable rows in the folder, {new['rows']} now)"
        for old, new in zip(stored.get("sets", []), now.get("sets", []), strict=False)
        if old["hash"] != new["hash"]
    ]
    if "data" in reasons and files:
        reasons["data"] = ", ".join(files)
    if "weights" in reasons:
        reasons["weights"] += " (those of model.path, from which adapters and references start)"
    return [f"{key} changed on disk: {text}" for key, text in reasons.items()]


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Options that differ between two trees, by full name: (value before, value now)."""
    old, new = dict(leaves(before)), dict(leaves(now))
    return {key: (old.get(key), new.get(key)) for key in sorted(old | new) if old.get(key) != new.get(key)}


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def write_whole(path: Path, text: str) -> None:
    """Write the file atomically, even if the machine crashes or another process writes to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


# -- lock ------------------------------------------------------------------------------------------


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with open(path / LOCK, "ab+", buffering=0) as lock:
        os.register_at_fork(after_in_child=lock.close)  # a worker that outlives us must not keep the folder locked
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock.fileno(), 100, 0).decode(errors="replace").strip() or "unknown"
            hint = "wait for it, or choose another run.name=…"
            raise ConfigError(f"{path} is in use by process {holder}; {hint}") from None
        except OSError as error:
            hint = "put run.out on a local disk"
            raise EnvironmentProblem(f"{path} cannot be locked ({error.strerror}); {hint}") from None
        lock.truncate(0)
        lock.write(f"{os.getpid()} on {socket.gethostname()}\n".encode())
        yield


# -- facts for the manifest ------------------------------------------------------------------------


def start_facts(options: Mapping[str, Any], manifest: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest that says also when, where and by which versions a command was started, after the starts of the one
    that was there before.
    """
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    start = {"time": now, "command": manifest["command"], "argv": sys.argv, "pid": os.getpid()}
    return {
        **manifest,
        "seed": options["run"]["seed"],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "git": revision(),
        "packages": _versions(),
        "functions": _function_files(options),
        "starts": [*before.get("starts", []), start],
    }


def write_start(path: Path, texts: Mapping[str, str], facts: Mapping[str, Any]) -> None:
    manifest = json.dumps(facts, indent=2, ensure_ascii=False, default=str) + "\n"
    for name, text in {**texts, MANIFEST: manifest}.items():
        write_whole(path / name, text)


@cache  # all metadata of an environment take 0.2 s to read
def _versions() -> dict[str, str]:
    return {one.name: one.version for one in metadata.distributions() if one.name in PACKAGES}


def _function_files(options: Mapping[str, Any]) -> dict[str, str]:
    """Hashes of the files that options name as file.py:name, or as file.py."""
    found = re.findall(r'"([^"]+\.py)(?::\w+)?"', json.dumps(options, ensure_ascii=False))
    files = [path for path in sorted(set(found)) if Path(path).is_file()]
    return {path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in files}
