"""Which members, groups and tokens take part in training: functions of plain numbers, or of tensors
for tokens. Imports no torch and uses no records.

>>> discard_reason([1.0, 1.0, 1.0, 1.0])
'constant'
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal

from saccade.types import ALWAYS_EXCLUDED

if TYPE_CHECKING:
    from torch import Tensor

EXCLUDABLE = ("truncated", "overturn", "void")  # statuses that `exclude_status` may add
CONSTANT_TOLERANCE = 1e-8
ROUNDING = 1e-9  # added before rounding down: 0.29 * 100 is 28.999999999999996


def is_constant(values: Sequence[float]) -> bool:
    """Whether all values are equal; their range is compared, so that rounding never counts as a difference."""
    largest = max(abs(value) for value in values)
    return max(values) - min(values) <= CONSTANT_TOLERANCE * max(1.0, largest)


def discard_reason(
    outcomes: Sequence[float], low: float = 0.01, high: float = 0.99
) -> Literal["empty", "constant", "low", "high"] | None:
    """Why dynamic sampling drops a group, or None to keep it. `outcomes`: raw outcomes of live members."""
    if not outcomes:
        return "empty"
    if is_constant(outcomes):
        return "constant"
    mean = sum(outcomes) / len(outcomes)
    if mean <= low:
        return "low"
    return "high" if mean >= high else None


def is_excluded(status: str, exclude_status: Collection[str] = ()) -> bool:
    return status in ALWAYS_EXCLUDED or status in exclude_status


def share(fraction: float, count: int) -> int:
    """`fraction` of `count`, rounded down, but at least 1."""
    return max(1, int(fraction * count + ROUNDING))


def high_entropy(
    entropies: Tensor,  # [T]
    live: Tensor,  # [T] bool
    sequence: Tensor,  # [T] index of the sequence of each token
    *,
    fraction: float,
    scope: Literal["step", "sequence"] = "step",
) -> Tensor:
    """[T] bool: the live tokens with the highest entropy, of the step or of each sequence (arXiv 2506.01939)."""
    entropies = entropies.double().where(live, -float("inf"))
    if scope == "step":
        return live & (entropies >= entropy_threshold(entropies[live], fraction))
    counts = sequence.bincount()
    lengths = sequence[live].bincount(minlength=len(counts))
    ranked = entropies.argsort(descending=True, stable=True)
    ranked = ranked[sequence[ranked].argsort(stable=True)]  # by sequence, then by entropy
    owner = sequence[ranked]
    rank = owner.new_ones(len(owner)).cumsum(0) - 1 - (counts.cumsum(0) - counts)[owner]
    kept = (lengths * fraction + ROUNDING).long().clamp(min=1)
    return live & live.new_zeros(len(live)).index_put((ranked,), rank < kept[owner])


def entropy_threshold(entropies: Tensor, fraction: float) -> Tensor:
    """The (1 - fraction)-quantile, linearly interpolated, for any number of tokens; 0 without tokens."""
    if not len(entropies):
        return entropies.new_zeros(())
    place = round((len(entropies) - 1) * (1 - fraction), 9)
    below = int(place)
    ordered = entropies.sort().values
    return ordered[below].lerp(ordered[min(below + 1, len(ordered) - 1)], place - below)
