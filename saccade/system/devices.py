"""What accelerators can do at best, from their data sheets: the denominators of MFU and bandwidth
share, and what a plan has to fit into.

A device that is not in the table has no peak: its shares are left out, never guessed.

    >>> named("NVIDIA H200").tflops
    989.0
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True, kw_only=True)
class Device:
    name: str
    memory: float  # GiB that a process can have
    tflops: float | None = None  # dense bf16 peak, 1e12 operations per second
    bandwidth: float | None = None  # 1e12 bytes per second
    link: float | None = None  # 1e9 bytes per second to another GPU of the machine
    host: float | None = None  # 1e9 bytes per second to main memory
    network: float = 400.0  # 1e9 bytes per second that its machine sends to others: eight adapters of 400 Gb/s
    count: int = 1  # of such devices that share a run

    @property
    def is_gpu(self) -> bool:
        return self.name != "CPU"


CONTEXT_GIB = 0.8  # of a process on a GPU before its first tensor
OTHER_CHIPS = {"laptop"}  # share a name with a larger one
MEMORY = re.compile(r"(\d+) ?g(?:i?b)?\b")  # in a name


@cache
def table() -> dict[str, list[float]]:
    return yaml.safe_load(Path(__file__).with_name("devices.yaml").read_text(encoding="utf-8"))


def named(name: str) -> Device | None:
    """The row of a device, by what a driver or a person calls it."""
    words = _words(name)
    for gpu, (memory, *peaks) in table().items():
        if _words(gpu) <= words and not words & OTHER_CHIPS:
            tflops, bandwidth, link, host = map(float, peaks)
            return Device(name=name, memory=memory, tflops=tflops, bandwidth=bandwidth, link=link, host=host)
    return None


def only(part: str) -> Device | None:
    """The row that alone has all these words: a 4090 is an RTX 4090."""
    rows = [name for name in table() if _words(part) <= _words(name)]
    return named(rows[0]) if len(rows) == 1 else None


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", MEMORY.sub(r"\1gb", name.lower())))


def says_otherwise(name: str, device: Device) -> bool:
    """Whether the name speaks of another memory than the row: a GH200's is that of its CPU."""
    said = MEMORY.search(name.lower())
    fits = said is None or 0.85 < device.memory / int(said[1]) < 1.1
    return not fits and "gh200" not in name.lower()


def in_precision(device: Device, dtype: str) -> Device:
    """As `model.dtype` uses it: of full precision the table knows no peak."""
    return replace(device, tflops=None) if dtype == "float32" else device


def total_bytes(device: Any) -> int:
    """Memory of the GPU, or the share of it that this process may take."""
    import torch

    index = torch.device(device).index  # torch asks for one here, unlike everywhere else
    share = torch.cuda.get_per_process_memory_fraction(torch.cuda.current_device() if index is None else index)
    return int(share * torch.cuda.mem_get_info(device)[1])


def free_bytes(device: Any) -> int:
    """What new tensors on this GPU may take, cached blocks included."""
    import torch

    free, reserved = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device)
    mine = max(0, total_bytes(device) - reserved)
    return min(free, mine) + reserved - torch.cuda.memory_allocated(device)


def free_host_bytes() -> int:
    """Main memory that this process can still take, of the machine and within its limits."""
    import psutil

    return min([psutil.virtual_memory().available, *left_in_groups()])


# Of control groups, both versions: the controller, its limit, what is used, and what of that is
# only a cache of files.
GROUPS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def left_in_groups(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """What each limit leaves that a container or a scheduler has set; the machine's own numbers do
    not show it.
    """
    lines = own.read_text().splitlines() if own.is_file() else []
    groups = {controller: group for _, controller, group in (line.split(":", 2) for line in lines)}
    for controller, *names, files_cache in GROUPS:
        top = root / controller
        lowest = top / groups.get(controller, "").strip("/")
        for folder in (lowest, *lowest.parents):
            files = [folder / name for name in (*names, "memory.stat")]
            if folder.is_relative_to(top) and all(file.is_file() for file in files):
                limit, used, stat = (file.read_text().split() for file in files)
                cached = dict(zip(stat[::2], stat[1::2], strict=True)).get(files_cache, "0")
                if limit != ["max"]:
                    yield int(limit[0]) - int(used[0]) + int(cached)


def limit_memory(device: Any, gib: float) -> None:
    """This process takes no more than that of the GPU, its context included."""
    import torch

    total = torch.cuda.mem_get_info(device)[1]
    share = min(1.0, max(0.0, gib - CONTEXT_GIB) * 2**30 / total)
    index = torch.device(device).index  # torch refuses a plain "cuda" here
    chosen = torch.cuda.current_device() if index is None else index
    torch.cuda.set_per_process_memory_fraction(share, chosen)


def no_limit(gib: float | None, device: Device) -> str | None:
    """Why `run.gpu_memory_gib` limits nothing on this device; None where it does, or is not set."""
    if gib is None or (device.is_gpu and gib <= device.memory):
        return None
    most = f": {device.name} has {device.memory:.1f} GiB to give" if device.is_gpu else " on a CPU; it is for a GPU"
    return f"run.gpu_memory_gib={gib:g} has no effect{most}"


def unoccupied(wanted: str = "auto") -> Device:
    """The device of this process with the memory that other processes have left."""
    import torch

    device = present(wanted)
    if not device.is_gpu:
        return device
    return replace(device, memory=(torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()) / 2**30)


def present(wanted: str = "auto") -> Device:
    """What `run.device` means here: the GPU of this process with the memory that it has, or the
    CPU.
    """
    import torch

    if wanted == "cpu" or not torch.cuda.is_available():
        return Device(name="CPU", memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    name = torch.cuda.get_device_name()
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    return replace(named(name) or Device(name=name, memory=memory), memory=memory)
