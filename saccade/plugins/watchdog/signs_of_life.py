"""What a process and those that it has started do, as the system counts it: seconds of processors, bytes of disks.

>>> children_cpu("self") >= 0
True
"""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def children(process: int | str) -> Iterator[int]:
    """All that it has started and that runs, with those that they have started."""
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # it may have ended
            for child in map(int, file.read_text().split()):
                yield child
                yield from children(child)


def children_cpu(process: int | str) -> float:
    """Seconds of the processes that it has started, such as compilers, with those that they have waited for."""
    ticks = 0
    for child in children(process):
        with suppress(OSError):
            counted = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11:15]
            ticks += sum(map(int, counted))
    return ticks / os.sysconf("SC_CLK_TCK")


def disk_use() -> list[str]:
    """What this process has read and written, and its threads that wait for a disk at this moment."""
    own = Path("/proc/self")
    if not own.is_dir():
        return []
    counted = [line for line in (own / "io").read_text().splitlines() if line.startswith(("read_b", "write_b"))]
    for task in (own / "task").iterdir():
        with suppress(OSError):  # it may have ended
            if (task / "stat").read_text().rpartition(")")[2].split()[0] == "D":
                counted.append(f"{task.name} at {time.monotonic()}")
    return counted
