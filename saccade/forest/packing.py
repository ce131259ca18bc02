"""Trajectories → token forests under a token budget, and back.

The members of a group share what they have in common: a trunk (the longest common prefix of ids and
media, computed, not assumed) and below it whatever some of them share again. A token is packed once
however many sequences pass through it; a read says at which token and for which sequence a target
is predicted. Knows nothing of tensors, models or algorithms.

    batches = pack(groups, positions=family.positions, micro_tokens=16_384)
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, compress
from typing import Any, NamedTuple

import numpy as np

from saccade.types import READ_COLUMNS, Batch, Group, MediaSpan, Trajectory

Positions = Callable[[int, tuple[MediaSpan, ...]], np.ndarray]

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
    groups: Sequence[Group],
    *,
    positions: Positions,
    micro_tokens: int,
    ends: bool = False,
    whole: bool = False,
    parts: int = 1,
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
        return [_batch(forest, positions, ends) for forest in _forests(trees, micro_tokens)]
    dealt = deal([tree.tokens for tree in trees], parts)
    return [
        replace(_batch(forest, positions, ends), part=part)
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
    wanted = np.zeros(len(batch.keys), dtype=bool)
    wanted[list(sequences)] = True
    reads = wanted[batch.sequence]
    sampled = None if batch.sampled is None else batch.sampled[reads]
    owner = _node_of(batch, batch.reads[reads] if sampled is None else sampled)
    needed = np.zeros(len(batch.parents), dtype=bool)
    for node in np.unique(owner).tolist():
        while node >= 0 and not needed[node]:
            needed[node] = True
            node = int(batch.parents[node])
    sizes = np.diff(batch.node_starts)
    tokens = np.repeat(needed, sizes)
    new_node = np.cumsum(needed) - 1
    new_token = np.cumsum(tokens) - 1
    new_sequence = np.cumsum(wanted) - 1
    parents = batch.parents[needed]

    def cut(names: Sequence[str], kept: np.ndarray) -> dict[str, Any]:
        return {name: column[kept] for name in names if (column := getattr(batch, name)) is not None}

    return replace(
        batch,
        ids=batch.ids[tokens],
        positions=batch.positions[:, tokens],
        node_starts=np.concatenate([[0], sizes[needed].cumsum()]).astype(np.int64),
        parents=np.where(parents >= 0, new_node[parents], -1),
        reads=new_token[batch.reads[reads]],
        sequence=new_sequence[batch.sequence[reads]],
        keys=tuple(compress(batch.keys, wanted)),
        media=tuple(replace(span, start=int(new_token[span.start])) for span in batch.media if tokens[span.start]),
        support=None if batch.support is None else tuple(compress(batch.support, reads)),
        sampled=None if sampled is None else new_token[sampled],
        **cut(("targets", *READ_COLUMNS), reads),
        **cut(("groups", "last_values", "ref_totals"), wanted),
    )


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
    nodes = np.zeros(len(batch.parents), dtype=bool)
    nodes[_node_of(batch, np.array([span.start for span in batch.media], dtype=np.int64))] = True
    for node, parent in enumerate(batch.parents.tolist()):
        nodes[node] |= parent >= 0 and nodes[parent]
    result = np.zeros(len(batch.keys), dtype=bool)
    result[batch.sequence[nodes[_node_of(batch, batch.reads)]]] = True
    return result


def _node_of(batch: Batch, tokens: np.ndarray) -> np.ndarray:
    return np.searchsorted(batch.node_starts, tokens, side="right") - 1


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
    ends = [int(t.policy[-1]) + with_ends for t in members]
    nodes: list[_Node] = []
    paths: list[tuple[int, ...]] = [()] * len(members)

    # In depth as they branch; a group may branch more often than Python calls may nest.
    growing: list[tuple[list[int], int, int, tuple[int, ...]]] = [(list(range(len(members))), 0, -1, ())]
    while growing:
        names, start, parent, path = growing.pop()
        end = _common_prefix([members[i] for i in names], start, min(ends[i] for i in names))
        if len(names) > 1 and parent >= 0 and end - start < MIN_BRANCH:
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
        end = start + int(different.argmax()) if different.any() else end
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


def _batch(trees: Sequence[_Tree], positions: Positions, with_ends: bool) -> Batch:
    ids, places, starts, media = [], [], [0], []
    parents: list[int] = []
    keys: list[tuple[str, int]] = []
    reads, targets, sequence, groups = [], [], [], []
    rollout, advantages, sampled = [], [], []
    support: list[tuple[np.ndarray, ...] | None] = []
    for tree in trees:
        first_node = len(parents)
        # Positions depend on length and media alone.
        longest = max(len(member.ids) for member in tree.members)
        of_media = {media: positions(longest, media) for media in {member.media for member in tree.members}}
        for node in tree.nodes:
            owner = tree.members[node.owner]
            offset = starts[-1] - node.start
            ids.append(owner.ids[node.start : node.end])
            places.append(of_media[owner.media][:, node.start : node.end])
            media += [s.moved(offset) for s in owner.media if node.start <= s.start < node.end]
            parents.append(node.parent + first_node if node.parent >= 0 else -1)
            starts.append(starts[-1] + node.end - node.start)
        for member, path in zip(tree.members, tree.paths, strict=True):
            where = np.concatenate([np.arange(starts[first_node + n], starts[first_node + n + 1]) for n in path])
            policy = member.policy
            reads.append(where[policy - 1])
            targets.append(member.ids[policy])
            sequence.append(np.full(len(policy), len(keys)))
            keys.append(member.key)
            groups.append(tree.group)
            rollout.append(member.logprobs[policy])
            advantages.append(member.advantages)
            support.append(member.support)
            if with_ends:
                sampled.append(where[policy])
    kept = [one or (EVERYTHING,) * len(part) for one, part in zip(support, reads, strict=True)] if any(support) else []
    return Batch(
        ids=np.concatenate(ids),
        positions=np.concatenate(places, axis=1),
        node_starts=np.array(starts, dtype=np.int64),
        parents=np.array(parents, dtype=np.int64),
        reads=np.concatenate(reads),
        targets=np.concatenate(targets),
        sequence=np.concatenate(sequence),
        keys=tuple(keys),
        groups=np.array(groups, dtype=np.int64),
        media=tuple(media),
        rollout_logprobs=np.concatenate(rollout),
        advantages=None if any(a is None for a in advantages) else np.concatenate(advantages),  # type: ignore[arg-type]
        support=tuple(chain(*kept)) if kept else None,
        sampled=np.concatenate(sampled) if with_ends else None,
    )
