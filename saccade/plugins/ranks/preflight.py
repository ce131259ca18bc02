"""Checks before a rank loads weights: it reaches the other ranks, their GPUs can all-reduce, and it sees the files and
has the memory that the run needs. Callers add the rank and its machine to an error.

    seen = look(config, family.path, run.path)      # in the controller
    require_seen(seen, 3)                           # in rank 3
"""

import hashlib
import os
import queue
import re
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import saccade
from saccade.config import Config
from saccade.config.schema.section import Section, extra, given_options
from saccade.errors import EnvironmentProblem
from saccade.models.files import fingerprint
from saccade.plugins.ranks.machines import named
from saccade.system.devices import free_gpu_bytes
from saccade.system.disk import refusal

MEET_LIMIT = 300.0  # seconds until all ranks have joined: many may load the same libraries from a slow disk
SUM_LIMIT = 120.0  # seconds of the first collective, in which nccl initializes and opens its connections
SEEN_LIMIT = 30.0  # seconds until a new file is visible through a network file system
SUMMED, SUMS = 1 << 26, 3  # bytes of a timed all-reduce, and how many are timed
MARK = ".seen-by-ranks"
ELSE = "end what else runs there, `nvidia-smi` shows it"


def versions() -> dict[str, str]:
    """The versions that all machines of a run must have."""
    return {name: metadata.version(name) for name in ("torch", "transformers")} | {"code": code_hash()}


def code_hash(root: Path = Path(saccade.__file__).parent) -> str:
    """A hash of the files of a package, because code of the same version may have been edited."""
    found = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".yaml")):
        found.update(str(path.relative_to(root)).encode() + b"\n" + path.read_bytes())
    return found.hexdigest()[:12]


def look(config: Config, model: str, logs: Path) -> dict[str, Any]:
    """What this machine sees, for `require_seen`, which looks for the mark written to `logs`. `model` may be empty."""
    texts = [*_texts(config)]
    named = [*texts, *(re.split("[:@#]", text)[0] for text in texts)]  # FILE.py:NAME, PATH@SPLIT
    paths = dict.fromkeys([*filter(None, [model]), *filter(os.path.exists, named)])
    mark = secrets.token_hex(8)
    (logs / MARK).write_text(mark, encoding="utf-8")
    return {
        "paths": [os.path.abspath(path) for path in paths],
        "weights": fingerprint(Path(model)) if model else None,
        "logs": os.path.abspath(logs),
        "mark": mark,
    }


def _texts(value: Any, path: bool = False) -> Iterator[str]:
    """Option values that may be paths: all of options that are declared as paths, of others those with a slash."""
    if isinstance(value, str) and (path or os.sep in value):
        yield value
    elif isinstance(value, Section):
        for _, field, one in given_options(value):
            yield from _texts(one, extra(field).get("path", False))
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(one, path)


def require_seen(seen: Mapping[str, Any], rank: int) -> None:
    """Refuse a machine that does not see the controller's files."""
    for path in seen["paths"]:
        if not os.path.exists(path):
            raise EnvironmentProblem(f"{path} is not there; all machines must see the same paths")
    if seen["weights"] is not None and fingerprint(Path(seen["paths"][0])) != seen["weights"]:
        raise EnvironmentProblem(
            f"model.path: {seen['paths'][0]} has other weights than that of the run; copy it again"
        )
    logs, end = Path(seen["logs"]), time.monotonic() + SEEN_LIMIT
    while not ((file := logs / MARK).is_file() and file.read_text(encoding="utf-8") == seen["mark"]):
        if time.monotonic() > end:
            raise EnvironmentProblem(
                f"run.out: {logs} is another folder here; use one on a disk that all machines share"
            )
        time.sleep(0.5)
    try:
        mine = logs / f"{MARK}-{rank}"
        mine.touch()
        mine.unlink()
    except OSError as error:
        raise EnvironmentProblem(f"run.out: {logs}: {refusal(error) or error}") from error


def require_room(folder: Path, needed: float, device: torch.device, hint: str = ELSE) -> None:
    """Refuse a GPU without the `needed` bytes free, which the weights alone take."""
    if device.type != "cuda":
        return
    if needed > (free := free_gpu_bytes(device)):
        have = f"{free / 2**30:.1f} GiB of the GPU are free, and the weights alone take {needed / 2**30:.1f}"
        raise EnvironmentProblem(f"{folder}: {have}; {hint}")


def meet(store: Any, hosts: Sequence[str], limit: float = MEET_LIMIT) -> list[int]:
    """Wait until every rank has stored the name of its GPU. Returns the ranks that share a GPU with another rank, which
    nccl refuses and gloo does not.
    """
    keys = [f"gpu-{rank}" for rank in range(len(hosts))]
    try:
        store.wait(keys, timedelta(seconds=limit))
    except RuntimeError:
        absent = named(hosts, (rank for rank, key in enumerate(keys) if not store.check([key])))
        raise EnvironmentProblem(f"{absent} did not come within {limit:g} s; its log says why") from None
    gpus = [store.get(key) for key in keys]
    if not all(gpus) and any(gpus):
        blind = named(hosts, (rank for rank, gpu in enumerate(gpus) if not gpu))
        raise EnvironmentProblem(f"{blind} sees no GPU, others do; `nvidia-smi` shows why")
    return [rank for rank, gpu in enumerate(gpus) if gpu and gpus.count(gpu) > 1]


def require_sum(device: torch.device, limit: float = SUM_LIMIT) -> None:
    """Check a first all-reduce on `device`; in a thread, because nccl's initialization cannot be interrupted."""
    found: queue.SimpleQueue[float | RuntimeError] = queue.SimpleQueue()

    def add() -> None:
        try:
            number = torch.ones((), device=device)
            dist.all_reduce(number)
            found.put(number.item())
        except RuntimeError as error:
            found.put(error)

    threading.Thread(target=add, name="first sum", daemon=True).start()
    try:
        total = found.get(timeout=limit)
    except queue.Empty:
        total = RuntimeError(f"no answer for {limit:g} s")
    if isinstance(total, RuntimeError):
        hint = "with several networks set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME; NCCL_DEBUG=INFO logs more"
        raise EnvironmentProblem(f"a sum over all ranks on {device.type} failed ({total}); {hint}") from total
    if total != dist.get_world_size():
        raise EnvironmentProblem(f"the ones of {dist.get_world_size()} ranks sum up to {total:g}; check the GPU")


def sum_speed(device: torch.device) -> float:
    """Bus bandwidth of an all-reduce over all ranks in GB/s, as nccl counts it."""
    numbers, size = torch.ones(SUMMED // 4, device=device), dist.get_world_size()
    dist.all_reduce(numbers)
    numbers[0].item()  # waits for the GPU, here and below
    began = time.monotonic()
    for _ in range(SUMS):
        dist.all_reduce(numbers)
    numbers[0].item()
    return SUMS * SUMMED * 2 * (size - 1) / size / (time.monotonic() - began) / 1e9
