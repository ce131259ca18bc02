"""The learning rate at an update: a pure function of the config.

>>> rate(0, total=10, lr=1.0, schedule="linear", warmup=2, min_lr=0.0)
0.5
"""

from __future__ import annotations

import math
from collections.abc import Callable

SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "cosine_with_min_lr": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
}
DEFAULT_FLOOR = {"cosine_with_min_lr": 0.1}


def rate(update: int, *, total: int, lr: float, schedule: str, warmup: float, min_lr: float) -> float:
    """`warmup` counts updates, or is a share of `total` when below 1. The first update already
    moves.
    """
    warm = warmup if warmup >= 1 else warmup * total
    if update < warm:
        return lr * min(1.0, (update + 1) / warm)
    progress = min(1.0, (update - warm) / max(1.0, total - warm))
    floor = min_lr or DEFAULT_FLOOR.get(schedule, 0.0)
    return lr * (floor + (1 - floor) * SHAPES[schedule](progress))
