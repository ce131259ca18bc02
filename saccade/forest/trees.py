"""Prefix trees over the token rows of a group, under a token budget.

The trunk is the longest common prefix of ids and media of all rows (computed, not assumed); below it,
rows that share a longer prefix share further nodes. Knows nothing of tensors or algorithms.

    trees = grow([Row(ids, media, end=len(ids)), ...], budget=16_384)
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from saccade.types import MediaSpan

# A branch below the trunk that is shorter than this costs more (its own attention call) than it
# saves.
MIN_BRANCH = 4


class Row(NamedTuple):
    ids: np.ndarray
    media: tuple[MediaSpan, ...]
    end: int  # number of tokens that are packed


class Node(NamedTuple):
    owner: int  # a row that passes through it
    start: int  # its span in the tokens of that row
    end: int
    parent: int


class Tree(NamedTuple):
    nodes: tuple[Node, ...]
    paths: tuple[tuple[int, ...], ...]  # nodes of each row, root first

    @property
    def tokens(self) -> int:
        return sum(node.end - node.start for node in self.nodes)


def grow(rows: Sequence[Row], budget: int | None) -> Iterator[Tree]:
    """Yield one tree, or several of consecutive rows, each within the budget or with a single row."""
    whole = _tree(rows)
    if budget is None or whole.tokens <= budget:
        yield whole
        return
    taken = len(rows) * budget // whole.tokens
    while rows:
        tree = _fitting(rows, budget, guess=taken)
        yield tree
        taken = len(tree.paths)
        rows = rows[taken:]


def _fitting(rows: Sequence[Row], budget: int, *, guess: int) -> Tree:
    """The tree of the most leading rows that fit the budget, at least one.

    Exponential search from the guess, then bisection: the cost of a tree grows with its rows, and
    consecutive trees of a group mostly have about the same number.
    """
    fits, too_many = 0, len(rows) + 1
    count, step = max(1, min(guess, len(rows))), 1
    while too_many - fits > 1:
        tree = _tree(rows[:count])
        if tree.tokens <= budget or count == 1:
            found, fits, count = tree, count, count + step
        else:
            too_many, count = count, count - step
        step *= 2
        if not fits < count < too_many:
            count = (fits + too_many) // 2
    return found


def _tree(rows: Sequence[Row]) -> Tree:
    nodes: list[Node] = []
    paths: list[tuple[int, ...]] = [()] * len(rows)

    # Depth first, with an explicit stack: a group may branch deeper than Python's recursion limit.
    growing: list[tuple[list[int], int, int, tuple[int, ...]]] = [(list(range(len(rows))), 0, -1, ())]
    while growing:
        names, start, parent, path = growing.pop()
        alone, end = len(names) == 1, min(rows[i].end for i in names)
        end = end if alone else _common_prefix([rows[i] for i in names], start, end)
        if not alone and parent >= 0 and end - start < MIN_BRANCH:
            growing += [([name], start, parent, path) for name in reversed(names)]
            continue
        if end > start:
            nodes.append(Node(names[0], start, end, parent))
            parent = len(nodes) - 1
            path = (*path, parent)
        branches: dict[tuple[object, ...], list[int]] = {}
        for name in names:
            if rows[name].end == end:
                paths[name] = path
            else:
                branches.setdefault(_next(rows[name], end), []).append(name)
        growing += [(branch, end, parent, path) for branch in reversed(branches.values())]
    return Tree(tuple(nodes), tuple(paths))


def _next(row: Row, place: int) -> tuple[object, ...]:
    """Key of the branch that a row takes: its next id, and the medium that starts there."""
    media = [span.media.key for span in row.media if span.start == place]
    return (int(row.ids[place]), *media)


def _common_prefix(rows: Sequence[Row], start: int, limit: int) -> int:
    """The end of the common prefix of all rows, never inside a media span."""
    first = rows[0]
    end = limit
    for other in rows[1:]:
        different = first.ids[start:end] != other.ids[start:end]
        if len(different) and different[place := int(different.argmax())]:
            end = start + place
        if first.media != other.media:
            theirs = {span.start: span for span in other.media}
            for span in first.media:
                if start <= span.start < end and theirs.get(span.start) != span:
                    end = span.start
                    break
    for span in first.media:
        if span.start < end < span.end:
            end = span.start
    return end
