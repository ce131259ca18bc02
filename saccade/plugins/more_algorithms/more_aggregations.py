"""Aggregations beside the usual ones: over trajectories of several sequences, over groups, or none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from saccade.algorithms.aggregation import inverse
from saccade.algorithms.table import Entry, add

if TYPE_CHECKING:
    from torch import Tensor

ROWS: dict[str, Entry] = {}


@add(ROWS, "mean over trajectories of their token mean")
def sample_mean(lengths: Tensor, trajectory: Tensor, group: Tensor) -> Tensor:
    """Token mean over all sequences of a trajectory, then mean over trajectories."""
    return _pooled_mean(lengths, trajectory)


@add(ROWS, "mean over groups of their token mean")
def group_mean(lengths: Tensor, trajectory: Tensor, group: Tensor) -> Tensor:
    return _pooled_mean(lengths, group)


@add(ROWS, "sum(l)")
def token_sum(lengths: Tensor, trajectory: Tensor, group: Tensor) -> Tensor:
    return inverse(lengths.new_ones(()).expand_as(lengths), lengths)


def _pooled_mean(lengths: Tensor, pool: Tensor) -> Tensor:
    names, index = pool.unique(return_inverse=True)
    tokens = lengths.new_zeros(len(names)).index_add(0, index, lengths)
    return inverse((tokens > 0).sum() * tokens[index], lengths)
