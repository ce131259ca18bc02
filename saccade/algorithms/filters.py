"""Which members and groups train at all. Plain numbers in, plain answers out; no torch, no records.

>>> keep_group([1.0, 0.0, 0.0, 0.0])
True
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from saccade.types import ALWAYS_EXCLUDED

EXCLUDABLE = ("truncated", "overturn", "void")  # statuses that `exclude_status` may add
CONSTANT_TOLERANCE = 1e-8


def is_constant(values: Sequence[float]) -> bool:
    """By range, so that a rounding residue never counts as a difference."""
    largest = max(abs(value) for value in values)
    return max(values) - min(values) <= CONSTANT_TOLERANCE * max(1.0, largest)


def discard_reason(
    outcomes: Sequence[float], low: float = 0.01, high: float = 0.99
) -> Literal["empty", "constant", "low", "high"] | None:
    """Why dynamic sampling drops a group; None keeps it. `outcomes`: raw, of live members only."""
    if not outcomes:
        return "empty"
    if is_constant(outcomes):
        return "constant"
    mean = sum(outcomes) / len(outcomes)
    if mean <= low:
        return "low"
    return "high" if mean >= high else None


def keep_group(outcomes: Sequence[float], low: float = 0.01, high: float = 0.99) -> bool:
    return discard_reason(outcomes, low, high) is None


def is_excluded(status: str, exclude_status: Collection[str] = ()) -> bool:
    return status in ALWAYS_EXCLUDED or status in exclude_status


def in_baseline(status: str, exclude_status: Collection[str], excluded_in_baseline: bool) -> bool:
    """Whether a member enters the statistics of its group."""
    if status in ALWAYS_EXCLUDED:
        return False
    return excluded_in_baseline or status not in exclude_status


def overlong_penalty(length: int, *, max_tokens: int, buffer: int, factor: float = 1.0) -> float:
    """0 up to `max_tokens - buffer` sampled tokens, then down to -factor (arXiv 2503.14476)."""
    if buffer == 0:
        return 0.0
    return factor * max(-1.0, min(0.0, (max_tokens - buffer - length) / buffer))
