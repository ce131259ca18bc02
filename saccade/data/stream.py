"""An endless, repeatable order over a data set.

The order of an epoch depends only on (seed, epoch), not on workers or on what was taken before. So the state is three
numbers and the hash of the data, and a restored stream continues with exactly the next row.

    >>> stream = Stream(dataset, seed=42, config=DataConfig())
    >>> batch, state = stream.take(128), stream.state()
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from saccade.config import DataConfig
from saccade.data.dataset import Dataset
from saccade.errors import ConfigError, DataError
from saccade.types import Sample


class Stream:
    """An endless stream of samples. Its position is the epoch of the next row, and the row's index in that epoch."""

    def __init__(self, dataset: Dataset, *, seed: int, config: DataConfig) -> None:
        if not dataset.samples:
            raise DataError(f"data.train has no usable row:\n{dataset.summary}")
        self.dataset, self.seed, self.epoch = dataset, seed, 0
        self._cursor = 0
        self._mixing = config.mixing
        self._keys = _sort_keys(dataset, config.order)
        self._shuffle = config.order == "shuffle"
        self._order = self.order(0)
        self.rows_per_epoch = len(self._order)  # of epoch 0; a mixture by weight varies a little

    def take(self, count: int) -> list[Sample]:
        """The next rows, continuing into the next epoch if needed."""
        taken: list[Sample] = []
        while len(taken) < count:
            piece = self._order[self._cursor : self._cursor + count - len(taken)]
            taken += [self.dataset.samples[index] for index in piece]
            self._move_to(self.epoch, self._cursor + len(piece))
        return taken

    def peek(self, count: int) -> list[Sample]:
        """The rows that `take` will return next, up to the end of this epoch."""
        return [self.dataset.samples[i] for i in self._order[self._cursor :][:count]]

    def state(self) -> dict[str, Any]:
        return {"seed": self.seed, "epoch": self.epoch, "cursor": self._cursor, "data": self.dataset.hash}

    def restore(self, state: Mapping[str, Any]) -> None:
        if state["data"] != self.dataset.hash:
            raise DataError("the data changed since this state was saved; use the old data or start a new run")
        if state["seed"] != self.seed:
            raise ConfigError(f"the state was saved with run.seed={state['seed']}, now it is {self.seed}")
        self.epoch, self._order = state["epoch"], self.order(state["epoch"])
        self._move_to(state["epoch"], state["cursor"])

    def _move_to(self, epoch: int, cursor: int) -> None:
        if cursor >= len(self._order):
            epoch, cursor = epoch + 1, 0
            self._order = self.order(epoch)
        self.epoch, self._cursor = epoch, cursor

    # -- the order of an epoch -------------------------------------------------------------

    def order(self, epoch: int) -> np.ndarray:
        """Indices of samples in the order of this epoch."""
        parts = [part for part in self.dataset.parts if part.stop > part.start]
        if parts[0].weight is None:
            return self._pass(0, len(self.dataset.samples), [epoch])
        weights = np.array([part.weight for part in parts], dtype=np.float64)
        sizes = [part.stop - part.start for part in parts]
        picks = _picks(weights / weights.sum(), sizes, [self.seed, epoch], first=self._mixing == "first_exhausted")
        order = np.empty(len(picks), dtype=np.int64)
        for index, part in enumerate(parts):
            places = np.flatnonzero(picks == index)
            laps = range(-(-len(places) // sizes[index]))
            rows = [self._pass(part.start, part.stop, [epoch, index, lap]) for lap in laps]
            order[places] = np.concatenate([*rows, np.empty(0, dtype=np.int64)])[: len(places)]
        return order

    def _pass(self, start: int, stop: int, key: Sequence[int]) -> np.ndarray:
        """Every row from start to stop once."""
        if self._shuffle:
            return start + np.random.default_rng([self.seed, *key]).permutation(stop - start)
        rows = range(start, stop)
        return np.array(rows if self._keys is None else sorted(rows, key=self._keys.__getitem__), dtype=np.int64)


def _picks(shares: np.ndarray, sizes: Sequence[int], seed: Sequence[int], *, first: bool) -> np.ndarray:
    """The source of each draw, until the first or every source is exhausted."""
    random = np.random.default_rng([*seed, len(sizes)])
    picks = np.empty(0, dtype=np.int64)
    while True:
        more = random.choice(len(sizes), size=max(sum(sizes), len(picks)), p=shares)
        picks = np.concatenate([picks, more])
        places = [np.flatnonzero(picks == index) for index in range(len(sizes))]
        ends = [where[size - 1] for where, size in zip(places, sizes, strict=True) if len(where) >= size]
        if ends and (first or len(ends) == len(sizes)):
            return picks[: (min(ends) if first else max(ends)) + 1]


def _sort_keys(dataset: Dataset, order: str) -> list[Any] | None:
    if order in ("shuffle", "sequential"):
        return None
    if order == "length":
        if not dataset.lengths:
            raise ConfigError("data.order=length needs token lengths; load the data with a length function")
        return list(dataset.lengths)
    column = order.removeprefix("column:")
    if column in (order, ""):
        raise ConfigError(f"data.order={order}: write shuffle, sequential, length or column:NAME")
    missing = next((sample for sample in dataset.samples if sample.extra.get(column) is None), None)
    if missing is not None:
        columns = ", ".join(sorted(missing.extra)) or "none"
        raise ConfigError(f"data.order={order}: row {missing.id} has no such column; it has {columns}")
    values = [sample.extra[column] for sample in dataset.samples]
    try:
        return [float(value) for value in values]  # also numbers that are written as text
    except (TypeError, ValueError):
        if not all(isinstance(value, str) for value in values):
            raise ConfigError(f"data.order={order}: the column must hold numbers or text throughout") from None
        return values
