"""Which tokens a recurrent layer reads one after the other: segments, of which some begin where another ends.

A segment is a node of a forest. Segments of one level do not read each other: they run as one batch, and those of the
next level begin with their states. The engine's cache has segments of one level, which begin with what it holds; while
it decodes with kernels, they read and write that in place.

    walk = Walk(starts, parents, device)
    walk = RecurrentStates(device, 8).walk(rows, cached, new)

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
    """Segments that run together."""

    tokens: Tensor  # in the forest, segment after segment
    lengths: np.ndarray  # [segments]
    ends: Tensor  # [segments + 1] where they end, behind a 0
    parents: Tensor | None  # [segments] places in the level before


class Walk:
    """Through a forest: its roots begin with nothing."""

    def __init__(self, starts: np.ndarray, parents: np.ndarray, device: torch.device) -> None:
        self.starts, self.parents, self.device = starts, parents, device
        self._windows: dict[int, tuple[Tensor, Tensor]] = {}

    @cached_property
    def levels(self) -> list[Level]:
        depth = np.zeros(len(self.parents), np.int64)
        for node, parent in enumerate(self.parents.tolist()):  # which comes first
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
        """[T] where each token lies among those of the levels, level after level."""
        return torch.argsort(torch.cat([level.tokens for level in self.levels]))

    def windows(self, width: int) -> tuple[Tensor, Tensor]:
        """Rows of all segments, each with the `width` - 1 before it on its path in front, as numbers of tokens (from T
        on: rows of `tails`); and where among these the window of token 0, 1, … begins.
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
        """Rows of `tails` that stand before a root."""
        return np.zeros(count, np.int64)

    def tails(self, layer: int, like: Tensor) -> Tensor:
        """[rows, C] that stand before roots: zeros."""
        return like.new_zeros(1, like.shape[1])

    def states(self, layer: int, shape: tuple[int, ...]) -> Tensor:
        """[roots, …] that roots begin with: zeros."""
        return torch.zeros((len(self.levels[0].lengths), *shape), dtype=torch.float32, device=self.device)

    def keep_tails(self, layer: int, rows: Tensor, width: int) -> None:
        pass

    def keep_states(self, layer: int, states: Tensor) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Steps:
    """One new token of each of many sequences, for kernels that find what is kept of them on the device."""

    addresses: Mapping[tuple[int, str], Tensor]  # by layer and name, [1]: where [rows, …] lies
    rows: Tensor  # [B]
    lengths: Tensor  # [B]; negative: an idle one


class RecurrentStates:
    """What recurrent layers keep of sequences of any length, a row each: by layer and name, [rows, …]."""

    def __init__(self, device: torch.device, rows: int) -> None:
        self.device = device
        self.addresses: dict[tuple[int, str], Tensor] = {}  # on the device: graphs read them, so they stay
        self.clear()
        self.resize(rows)

    def clear(self) -> None:
        self.kept: dict[tuple[int, str], Tensor] = {}
        self.read = np.zeros(0, np.int64)  # tokens that each row has read
        self.free: list[int] = []  # rows, a heap

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.kept.values())

    def resize(self, rows: int) -> None:
        """More rows."""
        self.free += range(len(self.read), rows)  # higher than all others: it stays a heap
        self.read = np.pad(self.read, (0, rows - len(self.read)))
        for key, old in self.kept.items():
            self._allocate(key, old, rows)[: len(old)] = old

    def _allocate(self, key: tuple[int, str], like: Tensor, rows: int) -> Tensor:
        new = self.kept[key] = like.new_zeros((rows, *like.shape[1:]))
        if key not in self.addresses:
            self.addresses[key] = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.addresses[key].fill_(new.data_ptr())
        return new

    def copy(self, here: np.ndarray, there: np.ndarray) -> None:
        self.read[there] = self.read[here]
        source, target = (to_device(rows, self.device) for rows in (here, there))
        for tensor in self.kept.values():
            tensor[target] = tensor[source]

    def put(self, layer: int, name: str, rows: Tensor, values: Tensor) -> None:
        if (layer, name) not in self.kept:
            self._allocate((layer, name), values, len(self.read))
        self.kept[layer, name][rows] = values

    def walk(self, rows: np.ndarray, cached: np.ndarray, new: np.ndarray) -> Walk:
        """Sequences in `rows` have read `cached` tokens, and read `new` more."""
        assert (self.read[rows] == cached)[cached > 0].all(), "a state stands at another token"
        self.read[rows] = cached + new
        return _CachedWalk(self, rows, cached > 0, new)

    def steps(self, rows: Tensor, lengths: Tensor) -> Steps:
        return Steps(addresses=self.addresses, rows=rows, lengths=lengths)


class _CachedWalk(Walk):
    """Through new tokens of sequences, of which some have `begun`."""

    def __init__(self, kept: RecurrentStates, rows: np.ndarray, begun: np.ndarray, new: np.ndarray) -> None:
        super().__init__(np.concatenate([[0], new.cumsum()]), np.full(len(new), -1), kept.device)
        self.kept, self.new = kept, new
        old = rows[begun]
        self.rows, self.old, self.begun = (to_device(x, kept.device) for x in (rows, old, begun))
        self.place = np.where(begun, begun.cumsum() - 1, -1)  # among those that have begun

    def _tail(self, node: int, count: int) -> np.ndarray:
        # Zeros stand before the tails.
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
