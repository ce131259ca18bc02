"""Peak performance and memory of accelerators, from data sheets: the denominators of MFU and of bandwidth utilisation,
and the limits of a memory plan.

A device that is not in the table has no peak: its utilisation is left out, never guessed.

    >>> lookup("NVIDIA H200").tflops
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
    count: int = 1  # number of such devices in a run

    @property
    def is_gpu(self) -> bool:
        return self.name != "CPU"


CONTEXT_GIB = 0.8  # GPU memory of a process before its first tensor
OTHER_CHIPS = {"laptop"}  # words of smaller chips that share a larger one's name
MEMORY = re.compile(r"(\d+) ?g(?:i?b)?\b")  # memory size in a device name


@cache
def table() -> dict[str, list[float]]:
    return yaml.safe_load(Path(__file__).with_name("devices.yaml").read_text(encoding="utf-8"))


def lookup(name: str) -> Device | None:
    """The row of a device by its name, as a driver reports it or a user writes it."""
    words = _words(name)
    for gpu, (memory, *peaks) in table().items():
        if _words(gpu) <= words and not words & OTHER_CHIPS:
            tflops, bandwidth, link, host = map(float, peaks)
            return Device(name=name, memory=memory, tflops=tflops, bandwidth=bandwidth, link=link, host=host)
    return None


def lookup_unique(part: str) -> Device | None:
    """The row that has all these words, if only one has: 4090 gives the RTX 4090."""
    rows = [name for name in table() if _words(part) <= _words(name)]
    return lookup(rows[0]) if len(rows) == 1 else None


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", MEMORY.sub(r"\1gb", name.lower())))


def memory_contradicts(name: str, device: Device) -> bool:
    """Whether the name states another memory size than the row; a GH200's name states that of its CPU."""
    said = MEMORY.search(name.lower())
    fits = said is None or 0.85 < device.memory / int(said[1]) < 1.1
    return not fits and "gh200" not in name.lower()


def in_precision(device: Device, dtype: str) -> Device:
    """The device as `model.dtype` uses it: the table has no peak for float32."""
    return replace(device, tflops=None) if dtype == "float32" else device


def total_bytes(device: Any) -> int:
    """Memory of the GPU, or the part of it that this process may use."""
    import torch

    index = torch.device(device).index  # torch requires one here, unlike elsewhere
    share = torch.cuda.get_per_process_memory_fraction(torch.cuda.current_device() if index is None else index)
    return int(share * torch.cuda.mem_get_info(device)[1])


def free_gpu_bytes(device: Any) -> int:
    """Bytes available to new tensors on this GPU, torch's cached blocks included."""
    import torch

    free, reserved = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device)
    mine = max(0, total_bytes(device) - reserved)
    return min(free, mine) + reserved - torch.cuda.memory_allocated(device)


def free_host_bytes() -> int:
    """Bytes of main memory that this process can still use, of the machine and within its cgroup limits."""
    import psutil

    return min([psutil.virtual_memory().available, *free_cgroup_bytes()])


# cgroups v2 and v1: controller, files with limit and usage, and the memory.stat key of the file cache in that usage,
# which can be reclaimed.
GROUPS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_cgroup_bytes(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """Bytes left under each cgroup limit, as set by a container or a scheduler; the machine's own numbers do not show
    these limits.
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
    """Limit this process to `gib` of GPU memory, CUDA context included."""
    import torch

    total = torch.cuda.mem_get_info(device)[1]
    share = min(1.0, max(0.0, gib - CONTEXT_GIB) * 2**30 / total)
    index = torch.device(device).index  # torch refuses a plain "cuda" here
    chosen = torch.cuda.current_device() if index is None else index
    torch.cuda.set_per_process_memory_fraction(share, chosen)


def limit_problem(gib: float | None, device: Device) -> str | None:
    """Why `run.gpu_memory_gib` has no effect on this device; None if it has, or is not set."""
    if gib is None or (device.is_gpu and gib <= device.memory):
        return None
    most = f": {device.name} has {device.memory:.1f} GiB to give" if device.is_gpu else " on a CPU; it is for a GPU"
    return f"run.gpu_memory_gib={gib:g} has no effect{most}"


def device_with_free_memory(wanted: str = "auto") -> Device:
    """The device of this process, with only the memory that other processes leave free."""
    import torch

    device = current_device(wanted)
    if not device.is_gpu:
        return device
    return replace(device, memory=(torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()) / 2**30)


def count(wanted: str = "auto") -> int:
    """Returns how many GPUs `run.device` can use on this machine; 0: it means the CPU."""
    import torch

    return 0 if wanted == "cpu" or not torch.cuda.is_available() else torch.cuda.device_count()


def current_device(wanted: str = "auto") -> Device:
    """The device that `run.device` selects: the GPU of this process with its actual memory, or the CPU."""
    import torch

    if wanted == "cpu" or not torch.cuda.is_available():
        return Device(name="CPU", memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    name = torch.cuda.get_device_name()
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    return replace(lookup(name) or Device(name=name, memory=memory), memory=memory)
