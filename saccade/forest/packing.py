"""Trajectories → token forests under a token budget, and back.

The members of a group share what they have in common: a trunk (the longest common prefix of ids and
media, computed, not assumed) and below it whatever some of them share again. A token is packed once
however many sequences pass through it; a read says at which token and for which sequence a target
is predicted. Knows nothing of tensors, models or algorithms.

    batches = pack(groups, micro_tokens=16_384)
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, compress
from typing import Any, NamedTuple

import numpy as np

from saccade.types import BY_SEQUENCE, Batch, Forest, Group, MediaSpan, Trajectory

EVERYTHING = np.empty(0, dtype=np.int64)  # support of a token where nothing was cut away
# A branch below the trunk that is shorter than this costs more (its own attention call) than it
# saves.
MIN_BRANCH = 4


class _Node(NamedTuple):
    owner: int  # a member that passes through it
    start: int  # its span in the tokens of that member
    end: int
    parent: int


class _Tree(NamedTuple):
    members: tuple[Trajectory, ...]
    group: int
    nodes: tuple[_Node, ...]
    paths: tuple[tuple[int, ...], ...]  # nodes of each member, root first

    @property
    def tokens(self) -> int:
        return sum(node.end - node.start for node in self.nodes)


def pack(
    groups: Sequence[Group], *, micro_tokens: int, ends: bool = False, whole: bool = False, parts: int = 1
) -> list[Batch]:
    """Forests of at most `micro_tokens` tokens, whole groups where they fit, in the order of the
    groups.

    Trajectories that are not `trained`, or have no sampled token, are left out. A group over the
    budget repeats its trunk, or with `whole` is a forest of its own, as a sequence over it is. With
    `ends` the last sampled token of each sequence, at which nothing is predicted, is packed too. With
    several `parts` each gets forests of its own, of about as many tokens.
    """
    trees = [*_trees(groups, None if whole else micro_tokens, ends)]
    if parts == 1:
        return [_batch(forest, ends) for forest in _forests(trees, micro_tokens)]
    dealt = deal([tree.tokens for tree in trees], parts)
    return [
        _batch(forest, ends, part)
        for part, mine in enumerate(dealt)
        for forest in _forests([trees[index] for index in mine], micro_tokens)
    ]


def deal(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Indices for each part, in order. The largest go first, each to the part that has least."""
    dealt: list[list[int]] = [[] for _ in range(parts)]
    given = [0] * parts
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        least = given.index(min(given))
        dealt[least].append(index)
        given[least] += sizes[index]
    return [sorted(mine) for mine in dealt]


def _forests(trees: Sequence[_Tree], micro_tokens: int) -> list[list[_Tree]]:
    forests: list[list[_Tree]] = []
    left = 0
    for tree in trees:
        if not forests or tree.tokens > left:
            forests.append([])
            left = micro_tokens
        forests[-1].append(tree)
        left -= tree.tokens
    return forests


def select(batch: Batch, sequences: Sequence[int]) -> Batch:
    """The part of a forest that some of its sequences need, with their reads."""
    forest = batch.forest
    wanted = np.zeros(len(batch.keys), dtype=bool)
    wanted[list(sequences)] = True
    reads, rows = np.repeat(wanted, forest.lengths), np.repeat(wanted, forest.row_lengths)
    needed = np.zeros(len(forest.parents), dtype=bool)
    for node in forest.leaves[wanted].tolist():
        while node >= 0 and not needed[node]:
            needed[node] = True
            node = int(forest.parents[node])
    tokens = np.repeat(needed, forest.sizes)
    new_node, new_token = np.cumsum(needed) - 1, np.cumsum(tokens) - 1
    parents = forest.parents[needed]
    part = replace(
        forest,
        rows=forest.rows[rows],
        drawn=forest.drawn[rows],
        lengths=forest.lengths[wanted],
        leaves=new_node[forest.leaves[wanted]],
        sizes=forest.sizes[needed],
        parents=np.where(parents >= 0, new_node[parents], -1),
        keys=tuple(compress(forest.keys, wanted)),
        groups=forest.groups[wanted],
        media=tuple(replace(span, start=int(new_token[span.start])) for span in forest.media if tokens[span.start]),
        support=None if forest.support is None else tuple(compress(forest.support, reads)),
    )
    cut: dict[str, Any] = {n: c[wanted if n in BY_SEQUENCE else reads] for n, c in batch.columns.items()}
    return Batch(forest=part, **cut)


def halves(batch: Batch, *, whole: bool) -> tuple[Batch, Batch] | None:
    """Two parts of about as many sequences; `whole`: no group is divided. None: it is one."""
    count = len(batch.keys)
    cuts = np.flatnonzero(np.diff(batch.groups)) + 1 if whole else np.arange(1, count)
    if not len(cuts):
        return None
    middle = int(cuts[np.abs(cuts - count / 2).argmin()])
    return select(batch, range(middle)), select(batch, range(middle, count))


def has_media(batch: Batch) -> np.ndarray:
    """[sequences] bool: whether a sequence passes through a medium."""
    if not batch.media:
        return np.zeros(len(batch.keys), dtype=bool)
    holding = set(batch.forest.media_nodes)
    found: list[bool] = []
    for node, parent in enumerate(batch.parents.tolist()):
        found.append(node in holding or (parent >= 0 and found[parent]))
    return np.array(found)[batch.forest.leaves]


# -- trees -----------------------------------------------------------------------------------------


def _trees(groups: Sequence[Group], budget: int | None, ends: bool) -> Iterator[_Tree]:
    for index, group in enumerate(groups):
        members = [t for t in group.trajectories if t.trained and t.response_length]
        if not members:
            continue
        whole = _tree(members, index, ends)
        if budget is None or whole.tokens <= budget:
            yield whole
            continue
        taken = len(members) * budget // whole.tokens
        while members:
            tree = _fitting(members, index, ends, budget, guess=taken)
            yield tree
            taken = len(tree.members)
            members = members[taken:]


def _fitting(members: Sequence[Trajectory], group: int, ends: bool, budget: int, *, guess: int) -> _Tree:
    """The tree of as many members, from the first on, as fit the budget, and of one at least.

    Looks further and further from the guess, then halves what is left: a tree costs as much as it
    has members, and most neighbours in a group take about as many.
    """
    fits, too_many = 0, len(members) + 1
    count, step = max(1, min(guess, len(members))), 1
    while too_many - fits > 1:
        tree = _tree(members[:count], group, ends)
        if tree.tokens <= budget or count == 1:
            found, fits, count = tree, count, count + step
        else:
            too_many, count = count, count - step
        step *= 2
        if not fits < count < too_many:
            count = (fits + too_many) // 2
    return found


def _tree(members: Sequence[Trajectory], group: int, with_ends: bool) -> _Tree:
    # The last target is predicted one token earlier, and what follows is never read.
    ends = [t.end - (not with_ends) for t in members]
    nodes: list[_Node] = []
    paths: list[tuple[int, ...]] = [()] * len(members)

    # In depth as they branch; a group may branch more often than Python calls may nest.
    growing: list[tuple[list[int], int, int, tuple[int, ...]]] = [(list(range(len(members))), 0, -1, ())]
    while growing:
        names, start, parent, path = growing.pop()
        alone, end = len(names) == 1, min(ends[i] for i in names)
        end = end if alone else _common_prefix([members[i] for i in names], start, end)
        if not alone and parent >= 0 and end - start < MIN_BRANCH:
            growing += [([name], start, parent, path) for name in reversed(names)]
            continue
        if end > start:
            nodes.append(_Node(names[0], start, end, parent))
            parent = len(nodes) - 1
            path = (*path, parent)
        branches: dict[tuple[object, ...], list[int]] = {}
        for name in names:
            if ends[name] == end:
                paths[name] = path
            else:
                branches.setdefault(_next(members[name], end), []).append(name)
        growing += [(branch, end, parent, path) for branch in reversed(branches.values())]
    return _Tree(tuple(members), group, tuple(nodes), tuple(paths))


def _next(trajectory: Trajectory, place: int) -> tuple[object, ...]:
    """What tells branches apart: the next id, and which medium starts there."""
    media = [span.media.key for span in trajectory.media if span.start == place]
    return (int(trajectory.ids[place]), *media)


def _common_prefix(members: Sequence[Trajectory], start: int, limit: int) -> int:
    """How far all members agree, never ending inside a media span."""
    first = members[0]
    end = limit
    for other in members[1:]:
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


# -- batches ---------------------------------------------------------------------------------------


def _batch(trees: Sequence[_Tree], with_ends: bool, part: int | None = None) -> Batch:
    members = [member for tree in trees for member in tree.members]
    starts, parents, leaves, media = [0], list[int](), list[int](), list[MediaSpan]()
    for tree in trees:
        first_node = len(parents)
        for node in tree.nodes:
            shown, offset = tree.members[node.owner].media, starts[-1] - node.start
            media += [s.moved(offset) for s in shown if node.start <= s.start < node.end]
            parents.append(node.parent + first_node if node.parent >= 0 else -1)
            starts.append(starts[-1] + node.end - node.start)
        leaves += [first_node + path[-1] for path in tree.paths]
    drawn = np.concatenate([member.policy_mask[: member.end] for member in members])
    logprobs = np.concatenate([member.logprobs[: member.end] for member in members])
    lengths, support = [member.response_length for member in members], [member.support for member in members]
    kept = [one or (EVERYTHING,) * n for one, n in zip(support, lengths, strict=True)] if any(support) else []
    advantages = [member.advantages for member in members]
    forest = Forest(
        rows=np.concatenate([member.ids[: member.end] for member in members]),
        drawn=drawn,
        lengths=np.array(lengths),
        leaves=np.array(leaves),
        sizes=np.diff(starts),
        parents=np.array(parents),
        keys=tuple(member.key for member in members),
        groups=np.repeat([tree.group for tree in trees], [len(tree.members) for tree in trees]),
        media=tuple(media),
        support=tuple(chain(*kept)) if kept else None,
        with_ends=with_ends,
        part=part,
    )
    return Batch(
        forest=forest,
        rollout_logprobs=logprobs[drawn],
        advantages=None if any(a is None for a in advantages) else np.concatenate(advantages),  # type: ignore[arg-type]
    )
