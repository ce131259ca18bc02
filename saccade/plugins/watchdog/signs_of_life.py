"""CPU seconds and disk bytes of a process and its descendants, from /proc.

>>> children_cpu("self") >= 0
True
"""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def children(process: int | str) -> Iterator[int]:
    """Yields the ids of all its running descendants."""
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # it may have ended
            for child in map(int, file.read_text().split()):
                yield child
                yield from children(child)


def children_cpu(process: int | str) -> float:
    """CPU seconds of its running descendants, such as compilers, and of the children that these have waited for."""
    ticks = 0
    for child in children(process):
        with suppress(OSError):
            counted = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11:15]
            ticks += sum(map(int, counted))
    return ticks / os.sysconf("SC_CLK_TCK")


def disk_use() -> list[str]:
    """Bytes that this process has read and written, and its threads in uninterruptible (disk) sleep now."""
    own = Path("/proc/self")
    if not own.is_dir():
        return []
    counted = [line for line in (own / "io").read_text().splitlines() if line.startswith(("read_b", "write_b"))]
    for task in (own / "task").iterdir():
        with suppress(OSError):  # it may have ended
            if (task / "stat").read_text().rpartition(")")[2].split()[0] == "D":
                counted.append(f"{task.name} at {time.monotonic()}")
    return counted
