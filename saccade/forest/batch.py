"""`Forest`: sequences packed as trees of tokens. `Batch`: a forest and its per-token columns. Numpy only.

(batch,) = pack(groups, micro_tokens=16_384)
batch.ids, batch.predictors, batch.targets
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from saccade.forest.trees import Row, Tree, grow
from saccade.types import MediaSpan


class _Nodes(NamedTuple):
    leaves: np.ndarray  # [sequences] int64: the last node of each
    sizes: np.ndarray  # [nodes] int64: tokens
    parents: np.ndarray  # [nodes] int64, -1 for a root; parents come before their children
    media: tuple[MediaSpan, ...]  # spans in packed tokens, once per node


@dataclass(frozen=True, kw_only=True, eq=False)
class Forest:
    """Sequences that share nodes of tokens, each node attending to itself (causally) and to all of its
    ancestors. A token is packed once, however many sequences pass through it.

    Trees and packed arrays are computed on first use, so a process that only passes a forest on does
    not compute them.
    """

    rows: np.ndarray  # [row tokens] int32: ids of the sequences end to end, each up to its last sampled token
    row_lengths: np.ndarray  # [sequences] int64: tokens of each in `rows`
    sampled_runs: np.ndarray  # [runs, 2] int64: start and end in `rows` of each run of sampled tokens, in order
    lengths: np.ndarray  # [sequences] int64: sampled tokens
    keys: tuple[tuple[str, int], ...]  # (sample id, repeat) of each sequence
    groups: np.ndarray  # [sequences] int64, index of the group inside the step
    media_lists: tuple[tuple[MediaSpan, ...], ...]  # the distinct lists of media spans, in tokens of a row
    media_index: np.ndarray  # [sequences] int64: index into `media_lists`
    support: tuple[np.ndarray, ...] | None = None  # ids that truncated sampling kept, per target
    with_ends: bool = False  # also pack the last token of each sequence, at which nothing is predicted
    budget: int = 0  # most tokens of one of the `pieces`; 0: a single piece
    whole: bool = False  # do not divide a group that is over the budget
    dp_rank: int | None = None  # which data-parallel group computes it, if several share a step

    def __post_init__(self) -> None:
        assert len(self.row_lengths) == len(self.lengths) == len(self.groups)
        assert len(self.rows) == self.row_lengths.sum()

    # -- trees --

    @cached_property
    def row_starts(self) -> np.ndarray:
        """[sequences + 1]"""
        return _starts(self.row_lengths)

    @cached_property
    def target_starts(self) -> np.ndarray:
        """[sequences + 1]"""
        return _starts(self.lengths)

    @cached_property
    def trees(self) -> list[Tree]:
        """One per group, or several if the group is over the budget; in the order of the sequences."""
        rows = [
            Row(self.rows[start:end], self.media_lists[index], end - start - (not self.with_ends))
            for (start, end), index in zip(pairwise(self.row_starts.tolist()), self.media_index, strict=True)
        ]
        cuts = [0, *(np.flatnonzero(np.diff(self.groups)) + 1).tolist(), len(rows)]
        budget = None if self.whole else self.budget or None
        return [tree for first, end in pairwise(cuts) for tree in grow(rows[first:end], budget)]

    @cached_property
    def pieces(self) -> list[tuple[slice, Forest]]:
        """Forests of at most `budget` tokens, or of one larger tree, each with the slice of its sequences."""
        cuts: list[list[Tree]] = []
        left = 0
        for tree in self.trees:
            if not cuts or tree.tokens > left:
                cuts.append([])
                left = self.budget or sum(tree.tokens for tree in self.trees)
            cuts[-1].append(tree)
            left -= tree.tokens
        found, first = [], 0
        for trees in cuts:
            mine = slice(first, first := first + sum(len(tree.paths) for tree in trees))
            found.append((mine, piece := self.cut(mine)))
            vars(piece)["trees"] = trees
        return found

    def cut(self, mine: slice) -> Forest:
        """The forest of a slice of its sequences."""
        low, high = self.row_starts[[mine.start, mine.stop]]
        runs = slice(*np.searchsorted(self.sampled_runs[:, 0], [low, high]))
        targets = slice(*self.target_starts[[mine.start, mine.stop]])
        used, media_index = np.unique(self.media_index[mine], return_inverse=True)
        return replace(
            self,
            rows=self.rows[low:high],
            row_lengths=self.row_lengths[mine],
            sampled_runs=self.sampled_runs[runs] - low,
            lengths=self.lengths[mine],
            keys=self.keys[mine],
            groups=self.groups[mine],
            media_lists=tuple(self.media_lists[index] for index in used),
            media_index=media_index,
            support=None if self.support is None else self.support[targets],
        )

    @cached_property
    def _nodes(self) -> _Nodes:
        starts, parents, leaves, media = [0], list[int](), list[int](), list[MediaSpan]()
        row = 0
        for tree in self.trees:
            first_node = len(parents)
            for node in tree.nodes:
                shown, offset = self.media_lists[self.media_index[row + node.owner]], starts[-1] - node.start
                media += [s.moved(offset) for s in shown if node.start <= s.start < node.end]
                parents.append(node.parent + first_node if node.parent >= 0 else -1)
                starts.append(starts[-1] + node.end - node.start)
            leaves += [first_node + path[-1] for path in tree.paths]
            row += len(tree.paths)
        return _Nodes(np.array(leaves), np.diff(starts), np.array(parents), tuple(media))

    leaves, sizes, parents, media = (property(attrgetter(f"_nodes.{name}")) for name in _Nodes._fields)

    @cached_property
    def node_starts(self) -> np.ndarray:
        """[nodes + 1]: where each node is packed."""
        return _starts(self.sizes)

    @cached_property
    def above(self) -> np.ndarray:
        """[nodes]: tokens of all ancestors."""
        found: list[int] = []
        sizes = self.sizes.tolist()
        for parent in self.parents.tolist():
            found.append(found[parent] + sizes[parent] if parent >= 0 else 0)
        return np.array(found, dtype=np.int64)

    # -- what is packed --

    @cached_property
    def _stretches(self) -> tuple[np.ndarray, np.ndarray]:
        """The nodes on the path of every sequence, root first, and where each begins in `rows`."""
        parents, nodes, counts = self.parents.tolist(), list[int](), []
        for node in self.leaves.tolist():
            path = []
            while node >= 0:
                path.append(node)
                node = parents[node]
            nodes += reversed(path)
            counts.append(len(path))
        return np.array(nodes), np.repeat(self.row_starts[:-1], counts) + self.above[nodes]

    @cached_property
    def ids(self) -> np.ndarray:
        """[tokens] int64, as packed."""
        return self._once(self.rows).astype(np.int64)

    def _once(self, values: np.ndarray) -> np.ndarray:
        """[…, row tokens] → […, tokens]: each as the first sequence that passes through it has it."""
        nodes, starts = self._stretches
        firsts = starts[np.unique(nodes, return_index=True)[1]].tolist()
        spans = zip(firsts, self.sizes.tolist(), strict=True)
        return np.concatenate([values[..., start : start + size] for start, size in spans], axis=-1)

    def _packed(self, places: np.ndarray) -> np.ndarray:
        """Packed indices of the tokens at `places` (ascending) in `rows`."""
        nodes, starts = self._stretches
        counts = np.diff(np.searchsorted(places, starts), append=len(places))
        return places + np.repeat(self.node_starts[nodes] - starts, counts)

    def positions(self, rule: Callable[[np.ndarray, tuple[MediaSpan, ...]], np.ndarray]) -> np.ndarray:
        """[axes, tokens] position ids of packed tokens. `rule`: (ids of a row, its media) → [axes, length]."""
        found = []
        for (start, end), index in zip(pairwise(self.row_starts.tolist()), self.media_index, strict=True):
            media = (span for span in self.media_lists[index] if span.start < end - start)
            found.append(rule(self.rows[start:end], tuple(media)))
        return self._once(np.concatenate(found, axis=1))

    @cached_property
    def _places(self) -> np.ndarray:
        counts = np.diff(self.sampled_runs).ravel()
        ends = counts.cumsum()
        return np.repeat(self.sampled_runs[:, 1] - ends, counts) + np.arange(self.target_count)

    @cached_property
    def predictors(self) -> np.ndarray:
        """[targets]: the packed token that predicts each sampled one."""
        return self._packed(self._places - 1)

    @cached_property
    def targets(self) -> np.ndarray:
        """[targets] int64: the sampled tokens."""
        return self.rows[self._places].astype(np.int64)

    @cached_property
    def sampled(self) -> np.ndarray | None:
        """[targets]: packed index of each target; None unless packed `with_ends`."""
        return self._packed(self._places) if self.with_ends else None

    @cached_property
    def target_count(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def sequence(self) -> np.ndarray:
        """[targets] int64: index into `keys`."""
        return np.repeat(np.arange(len(self.keys)), self.lengths)

    @cached_property
    def has_media(self) -> np.ndarray:
        """[sequences] bool: whether a sequence shows a medium."""
        return np.array([bool(spans) for spans in self.media_lists])[self.media_index]


def _starts(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], sizes.cumsum()])


def _of_forest(name: str) -> Any:
    return property(attrgetter(f"forest.{name}"))


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A forest, and columns of its targets.

    The hidden state at token `predictors[r]` predicts `targets[r]` for sequence
    `sequence[r]`. Reads of one sequence are contiguous and in order of time. The last token of a
    trunk predicts one target per leaf.

    A column has a value per target, or one per sequence that holds for all of its targets; `per_target`
    returns one value per target in both cases.
    """

    forest: Forest
    advantages: np.ndarray | None = None  # float32, as are all below
    scales: np.ndarray | None = None  # 1 / denominator of the aggregation
    rollout_logprobs: np.ndarray | None = None
    old_logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    old_entropies: np.ndarray | None = None
    keep: np.ndarray | None = None  # factor of the policy term from filters, 0 where it is dropped
    weights: np.ndarray | None = None  # correction weights
    rewards: np.ndarray | None = None  # of the sequence, after shaping
    selected: np.ndarray | None = None  # 0/1: tokens that the policy loss treats differently
    ages: np.ndarray | None = None  # steps since each token was sampled
    values: np.ndarray | None = None  # the critic's values before the update
    returns: np.ndarray | None = None  # the critic's targets
    last_values: np.ndarray | None = None  # [sequences] the critic's value after the last token
    ref_totals: np.ndarray | None = None  # [sequences] log-prob of all targets under the reference

    # Forwarded to the forest.
    ids, predictors, targets, sequence = map(_of_forest, ("ids", "predictors", "targets", "sequence"))
    keys, groups, lengths, target_count = map(_of_forest, ("keys", "groups", "lengths", "target_count"))
    node_starts, parents, media, support = map(_of_forest, ("node_starts", "parents", "media", "support"))
    dp_rank, positions, has_media, sampled = map(_of_forest, ("dp_rank", "positions", "has_media", "sampled"))

    def __post_init__(self) -> None:
        for name, column in self.columns.items():
            assert len(column) in (len(self.keys), self.target_count), name

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """The columns that are set, by name."""
        return {name: column for name, column in vars(self).items() if isinstance(column, np.ndarray)}

    def per_target(self, name: str) -> Any:
        """The column [targets] of this name, or None."""
        column = getattr(self, name)
        return column if column is None or len(column) == self.target_count else np.repeat(column, self.lengths)

    @property
    def tokens(self) -> int:
        return int(self.forest.sizes.sum())

    @property
    def ends(self) -> np.ndarray | None:
        """[sequences]: the last sampled token of each."""
        return None if self.sampled is None else self.sampled[self.lengths.cumsum() - 1]

    def pieces(self) -> list[Batch]:
        """Micro-batches: the batch of each of the forest's pieces."""
        return [self.cut(mine, forest) for mine, forest in self.forest.pieces]

    def cut(self, mine: slice, forest: Forest | None = None) -> Batch:
        """The batch of a slice of its sequences. `forest`: their forest, if it was made already."""
        targets = slice(*self.forest.target_starts[[mine.start, mine.stop]])
        taken: dict[str, Any] = {n: c[mine if len(c) == len(self.keys) else targets] for n, c in self.columns.items()}
        return Batch(forest=forest or self.forest.cut(mine), **taken)
