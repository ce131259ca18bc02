"""Segments: the runs of tokens that a recurrent layer reads in sequence. Some begin with the state at another's end.

A segment is a node of a forest. Segments of one level are independent: they run as one batch, and those of the next
level begin with their final states. In the engine's cache all segments have one level and begin with cached states;
when it decodes with kernels, these are read and written in place.

    plan = RecurrentPlan(starts, parents, device)
    plan = RecurrentStates(device, 8).plan(rows, cached, new)

Legend: T tokens, N segments, C channels, K width of the convolution.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from saccade.forest.device_ops import to_device


@dataclass(frozen=True)
class Level:
    """Segments of one depth, which run as one batch."""

    tokens: Tensor  # indices in the forest, segment after segment
    lengths: np.ndarray  # [segments]
    ends: Tensor  # [segments + 1] a 0, then where each ends
    parents: Tensor | None  # [segments] indices of the parents in the level before


class RecurrentPlan:
    """The segments of a forest. Roots begin with zeros."""

    def __init__(self, starts: np.ndarray, parents: np.ndarray, device: torch.device) -> None:
        self.starts, self.parents, self.device = starts, parents, device
        self._windows: dict[int, tuple[Tensor, Tensor]] = {}

    @cached_property
    def levels(self) -> list[Level]:
        depth = np.zeros(len(self.parents), np.int64)
        for node, parent in enumerate(self.parents.tolist()):  # parents come first
            depth[node] = depth[parent] + 1 if parent >= 0 else 0
        found, place = [], np.zeros(len(depth), np.int64)
        for level in range(int(depth.max()) + 1):
            nodes = np.flatnonzero(depth == level)
            before = to_device(place[self.parents[nodes]], self.device) if level else None
            place[nodes] = np.arange(len(nodes))
            tokens = np.concatenate([np.arange(self.starts[node], self.starts[node + 1]) for node in nodes])
            lengths = np.diff(self.starts)[nodes]
            ends = np.concatenate([[0], lengths.cumsum()])
            found.append(Level(to_device(tokens, self.device), lengths, to_device(ends, self.device), before))
        return found

    @cached_property
    def order(self) -> Tensor:
        """[T]: the index of each token when all levels are concatenated."""
        return torch.argsort(torch.cat([level.tokens for level in self.levels]))

    def windows(self, width: int) -> tuple[Tensor, Tensor]:
        """Token indices of all segments, each preceded by the `width` - 1 tokens before it on its path (indices from T
        on are rows of `tails`); and where in them the window of token 0, 1, … begins.
        """
        if width not in self._windows:
            tokens, pieces, before, length = int(self.starts[-1]), [], dict[int, np.ndarray](), 0
            first = np.zeros(tokens, np.int64)
            for node, parent in enumerate(self.parents.tolist()):
                start, end = self.starts[node], self.starts[node + 1]
                tail = before[parent] if parent >= 0 else tokens + self._tail(node, width - 1)
                piece = np.concatenate([tail, np.arange(start, end)])
                before[node] = piece[len(piece) - width + 1 :]
                first[start:end] = length + np.arange(end - start)
                pieces.append(piece)
                length += len(piece)
            self._windows[width] = to_device(np.concatenate(pieces), self.device), to_device(first, self.device)
        return self._windows[width]

    def _tail(self, node: int, count: int) -> np.ndarray:
        """The rows of `tails` that precede a root."""
        return np.zeros(count, np.int64)

    def tails(self, layer: int, like: Tensor) -> Tensor:
        """[rows, C]: inputs that precede roots; here zeros."""
        return like.new_zeros(1, like.shape[1])

    def states(self, layer: int, shape: tuple[int, ...]) -> Tensor:
        """[roots, …]: initial states of roots; here zeros."""
        return torch.zeros((len(self.levels[0].lengths), *shape), dtype=torch.float32, device=self.device)

    def keep_tails(self, layer: int, rows: Tensor, width: int) -> None:
        pass

    def keep_states(self, layer: int, states: Tensor) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Steps:
    """One new token of each of B sequences, for kernels that read and write the cached states on the device."""

    addresses: Mapping[tuple[int, str], Tensor]  # by layer and name, [1]: the address of the cached [rows, …]
    rows: Tensor  # [B]
    lengths: Tensor  # [B]; negative: an idle sequence


class RecurrentStates:
    """The cache of recurrent layers, one row per sequence of any length: by layer and name, [rows, …]."""

    def __init__(self, device: torch.device, rows: int) -> None:
        self.device = device
        self.addresses: dict[tuple[int, str], Tensor] = {}  # on the device; never replaced, as CUDA graphs read them
        self.clear()
        self.resize(rows)

    def clear(self) -> None:
        self.kept: dict[tuple[int, str], Tensor] = {}
        self.lengths = np.zeros(0, np.int64)  # tokens that each row has read
        self.free: list[int] = []  # unused rows, a heap

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.kept.values())

    def resize(self, rows: int) -> None:
        """Grow to this many rows."""
        self.free += range(len(self.lengths), rows)  # higher than all others: it stays a heap
        self.lengths = np.pad(self.lengths, (0, rows - len(self.lengths)))
        for key, old in self.kept.items():
            self._allocate(key, old, rows)[: len(old)] = old

    def _allocate(self, key: tuple[int, str], like: Tensor, rows: int) -> Tensor:
        new = self.kept[key] = like.new_zeros((rows, *like.shape[1:]))
        if key not in self.addresses:
            self.addresses[key] = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.addresses[key].fill_(new.data_ptr())
        return new

    def copy(self, here: np.ndarray, there: np.ndarray) -> None:
        self.lengths[there] = self.lengths[here]
        source, target = (to_device(rows, self.device) for rows in (here, there))
        for tensor in self.kept.values():
            tensor[target] = tensor[source]

    def put(self, layer: int, name: str, rows: Tensor, values: Tensor) -> None:
        if (layer, name) not in self.kept:
            self._allocate((layer, name), values, len(self.lengths))
        self.kept[layer, name][rows] = values

    def plan(self, rows: np.ndarray, cached: np.ndarray, new: np.ndarray) -> RecurrentPlan:
        """Sequences in `rows` have read `cached` tokens, and read `new` more."""
        assert (self.lengths[rows] == cached)[cached > 0].all(), "a state stands at another token"
        self.lengths[rows] = cached + new
        return _CachedPlan(self, rows, cached > 0, new)

    def steps(self, rows: Tensor, lengths: Tensor) -> Steps:
        return Steps(addresses=self.addresses, rows=rows, lengths=lengths)


class _CachedPlan(RecurrentPlan):
    """New tokens of cached sequences. Those that have `begun` start from their cached states, the others from zeros."""

    def __init__(self, kept: RecurrentStates, rows: np.ndarray, begun: np.ndarray, new: np.ndarray) -> None:
        super().__init__(np.concatenate([[0], new.cumsum()]), np.full(len(new), -1), kept.device)
        self.kept, self.new = kept, new
        old = rows[begun]
        self.rows, self.old, self.begun = (to_device(x, kept.device) for x in (rows, old, begun))
        self.place = np.where(begun, begun.cumsum() - 1, -1)  # index among those that have begun

    def _tail(self, node: int, count: int) -> np.ndarray:
        # Row 0 of `tails` is zeros, the cached tails follow.
        return 1 + self.place[node] * count + np.arange(count) if self.place[node] >= 0 else np.zeros(count, np.int64)

    def tails(self, layer: int, like: Tensor) -> Tensor:
        zeros = super().tails(layer, like)
        if (self.place < 0).all():
            return zeros
        return torch.cat([zeros, self.kept.kept[layer, "tail"][self.old].flatten(0, 1)])

    def states(self, layer: int, shape: tuple[int, ...]) -> Tensor:
        if (self.place < 0).all():
            return super().states(layer, shape)
        found = self.kept.kept[layer, "state"][self.rows]
        return found if (self.place >= 0).all() else found.masked_fill(~self.begun.view(-1, *[1] * len(shape)), 0)

    def keep_tails(self, layer: int, rows: Tensor, width: int) -> None:
        ends = (self.new + width - 1).cumsum()
        last = to_device(ends[:, None] + np.arange(1 - width, 0), self.device)
        self.kept.put(layer, "tail", self.rows, rows[last])

    def keep_states(self, layer: int, states: Tensor) -> None:
        self.kept.put(layer, "state", self.rows, states)
