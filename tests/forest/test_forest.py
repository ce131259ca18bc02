"""A packed forest says of every member what the member itself says."""

import json
from dataclasses import fields, replace

import numpy as np
import pytest

from saccade.forest.batch import Batch, Forest
from saccade.forest.packing import pack
from saccade.forest.trees import MIN_BRANCH
from saccade.system.codec import decode, encode
from saccade.types import Group, MediaSpan, Sample, Trajectory, cache_sampled
from tests.algorithms.by_member import sampled


def path_tokens(batch: Batch, sequence: int) -> np.ndarray:
    """The packed tokens that one sequence passes through, root first."""
    last = batch.predictors[batch.sequence == sequence].max()
    last = last if batch.ends is None else batch.ends[sequence]
    node = int(np.searchsorted(batch.node_starts, last, side="right")) - 1
    spans = []
    while node >= 0:
        spans.append(np.arange(batch.node_starts[node], batch.node_starts[node + 1]))
        node = int(batch.parents[node])
    return np.concatenate(spans[::-1])


def member(groups: list[Group], batch: Batch, sequence: int) -> Trajectory:
    uid, repeat = batch.keys[sequence]
    group = groups[int(batch.groups[sequence])]
    assert group.uid == uid
    return next(t for t in group.trajectories if t.repeat == repeat)


def check(groups: list[Group], batches: list[Batch], family) -> list[tuple[str, int]]:
    """Ids, positions, reads, targets and media of every packed sequence are those of its member; their keys."""
    seen = []
    for batch in batches:
        assert (batch.parents < np.arange(len(batch.parents))).all()
        assert (np.diff(batch.node_starts) > 0).all()
        assert (np.diff(batch.sequence) >= 0).all()
        starts = set(batch.node_starts.tolist())
        assert len({(s.start, s.length) for s in batch.media}) == len(batch.media)
        for span in batch.media:
            assert not starts & set(range(span.start + 1, span.end))
        for sequence, key in enumerate(batch.keys):
            t = member(groups, batch, sequence)
            policy = np.flatnonzero(t.policy_mask)
            tokens = path_tokens(batch, sequence)
            end = policy[-1]  # the last target is packed only where the end is asked for
            mine = batch.sequence == sequence
            if batch.ends is not None:
                assert batch.ends[sequence] == tokens[end]
                assert batch.sampled[mine].tolist() == tokens[policy].tolist()
                end += 1
            assert batch.ids[tokens].tolist() == t.ids[:end].tolist()
            whole = family.positions(t.ids, t.media)[:, :end]
            assert batch.positions(family.positions)[:, tokens].tolist() == whole.tolist()
            assert batch.predictors[mine].tolist() == tokens[policy - 1].tolist()
            assert batch.targets[mine].tolist() == t.ids[policy].tolist()
            assert batch.advantages[mine].tolist() == t.advantages.tolist()
            assert batch.rollout_logprobs[mine].tolist() == t.logprobs[policy].tolist()
            place = {int(token): i for i, token in enumerate(tokens)}
            shown = [replace(s, start=place[s.start]) for s in batch.media if s.start in place]
            assert shown == [s for s in t.media if s.start < end]
            seen.append(key)
    return seen


@pytest.fixture(scope="module")
def family(family_of):
    return family_of("qwen2_5_vl")


def random_groups(grow, family, seed: int) -> list[Group]:
    rng = np.random.default_rng(seed)

    def sizes():
        return {"size": int(rng.integers(1, 7)), "images": int(rng.choice([0, 1, 3])), "depth": int(rng.integers(0, 4))}

    return [grow(rng, family, uid=f"g{i}", **sizes()) for i in range(3)]


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_a_forest_reproduces_every_member(grow, family, seed, ends):
    groups = random_groups(grow, family, seed)
    padded = sum(len(t.ids) for g in groups for t in g.trajectories)
    for budget in (10_000, 120, 40, 1):
        batches = pack(groups, micro_tokens=budget, ends=ends)
        assert all((batch.ends is not None) == ends for batch in batches)
        for batch in batches:
            seen = [bool(member(groups, batch, i).media) for i in range(len(batch.keys))]
            assert batch.has_media.tolist() == seen
        assert check(groups, batches, family) == [t.key for g in groups for t in g.trajectories]
        assert sum(batch.tokens for batch in batches) <= padded
        assert all(batch.tokens <= budget or len(batch.keys) == 1 for batch in batches)


@pytest.mark.parametrize("budget", [10_000, 120, 40])
def test_who_computes_a_part_grows_and_cuts_its_forest(grow, family, budget):
    groups = [replace(g, uid=f"{seed}/{g.uid}") for seed in range(4) for g in random_groups(grow, family, seed)]
    groups = [g.each(lambda t, uid=g.uid: replace(t, sample_id=uid)) for g in groups]
    alone, parts = (pack(groups, micro_tokens=budget, dp_size=size) for size in (1, 3))
    assert [batch.dp_rank for batch in parts] == [0, 1, 2] and pack([], micro_tokens=budget, dp_size=3) == []
    pieces = []
    for batch in parts:
        arrays: dict[str, np.ndarray] = {}
        row = json.loads(json.dumps(encode(batch.forest, arrays)))  # as it travels
        pieces += replace(batch, forest=decode(Forest, row, arrays)).pieces()
    assert sorted(check(groups, pieces, family)) == sorted(t.key for g in groups for t in g.trajectories)
    assert all(piece.tokens <= budget or len(piece.keys) == 1 for piece in pieces)
    tokens = [sum(batch.tokens for batch in batches) for batches in (pieces, parts, alone)]
    assert tokens[0] == tokens[1] == tokens[2]
    assert max(batch.tokens for batch in parts) < tokens[0] / 2


def test_every_column_of_reads_is_cut_and_checked(grow, family):
    optional = tuple(f.name for f in fields(Batch) if f.type == "np.ndarray | None")
    groups = random_groups(grow, family, 0)
    (batch,) = pack(groups, micro_tokens=10_000)
    marks = np.arange(batch.target_count, dtype=np.float32)
    batch = replace(batch, **dict.fromkeys(optional, marks))
    part = batch.cut(slice(1, 2))
    for name in optional:
        assert getattr(part, name).tolist() == part.per_target(name).tolist() == marks[batch.sequence == 1].tolist()
        numbered = replace(batch, **{name: marks[: len(batch.keys)]})  # one for each sequence
        assert numbered.per_target(name).tolist() == batch.sequence.tolist()
        assert numbered.cut(slice(1, 2)).per_target(name).tolist() == [1.0] * part.target_count
        with pytest.raises(AssertionError, match=name):
            replace(batch, **{name: marks[1:]})


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_any_stretch_of_sequences_keeps_its_reads(grow, family, seed, ends):
    groups = random_groups(grow, family, seed)
    rng = np.random.default_rng(seed)
    (batch,) = pack(groups, micro_tokens=10_000, ends=ends)
    kept = replace(batch.forest, support=tuple(np.array([t]) for t in batch.targets))
    batch = replace(batch, forest=kept, last_values=np.arange(len(batch.keys)))
    everything = batch.cut(slice(0, len(batch.keys)))
    assert everything.ids.tolist() == batch.ids.tolist()
    assert everything.parents.tolist() == batch.parents.tolist()
    for first, last in np.sort(rng.integers(0, len(batch.keys), (5, 2))).tolist():
        part, chosen = batch.cut(slice(first, last + 1)), np.arange(first, last + 1)
        assert check(groups, [part], family) == [batch.keys[i] for i in chosen]
        assert part.tokens <= batch.tokens and part.last_values.tolist() == chosen.tolist()
        assert [int(kept[0]) for kept in part.support] == part.targets.tolist()


def group(*members: Trajectory) -> Group:
    return Group(sample=Sample(id="g", messages=()), uid="g", trajectories=members)


PROMPT = list(range(10))
SHORT, LONG = [30] * (MIN_BRANCH - 1), [31] * MIN_BRANCH


@pytest.mark.parametrize(("sides", "lengths", "parents"), [
    # A trunk and its leaves; the last target is not read.
    ([(PROMPT, [20 + r, 1, 2, 3]) for r in range(3)], [10, 3, 3, 3], [-1, 0, 0, 0]),
    # A branch below the trunk that is too short is not shared.
    (
        [(PROMPT, [*branch, i, i]) for branch in (SHORT, LONG) for i in (1, 2)],
        [10, 4, 4, MIN_BRANCH, 1, 1],
        [-1, 0, 0, 0, 3, 3],
    ),
    # Members without a common token are trees of their own.
    ([([1, 2], [3]), ([4, 5], [3])], [2, 2], [-1, -1]),
])  # fmt: skip
def test_the_nodes_of_a_group(sides, lengths, parents):
    members = [sampled("g", r, prompt, answer) for r, (prompt, answer) in enumerate(sides)]
    (batch,) = pack([group(*members)], micro_tokens=100)
    assert np.diff(batch.node_starts).tolist() == lengths and batch.parents.tolist() == parents
    if len(parents) == 4:
        assert batch.predictors.tolist() == [9, 10, 11, 12, 9, 13, 14, 15, 9, 16, 17, 18]
        positions = batch.positions(lambda ids, media: np.arange(len(ids))[None])
        assert positions.tolist() == [[*range(10), *[10, 11, 12] * 3]]


def test_other_pictures_at_the_very_first_token_are_trees_of_their_own(family, image):
    members = []
    for repeat, seed in enumerate((0, 1, 0)):
        grid, tokens = family.measure(image(56, 56, seed))
        span = MediaSpan(media=image(56, 56, seed), start=0, length=tokens, grid=grid)
        members.append(sampled("g", repeat, [family.chat.placeholder] * tokens, [3, 4], media=(span,)))
    (batch,) = pack([group(*members)], micro_tokens=100)
    assert batch.parents.tolist() == [-1, -1] and len(batch.media) == 2
    assert [batch.keys[s][1] for s in batch.sequence[::2]] == [0, 1, 2]


def test_a_group_over_the_budget_repeats_its_trunk_and_a_long_sequence_is_alone():
    members = [sampled("g", r, PROMPT, [20 + r, 1, 2, 3]) for r in range(4)]
    batches = pack([group(*members)], micro_tokens=17)
    assert [batch.tokens for batch in batches] == [16, 16]
    assert [batch.keys for batch in batches] == [(("g", 0), ("g", 1)), (("g", 2), ("g", 3))]
    batches = pack([group(*members)], micro_tokens=5)
    assert [batch.tokens for batch in batches] == [13] * 4
    # Cut where the next member does not fit: 2 for the trunk and n - 1 for each answer, up to 17.
    lengths = [5, 9, 2, 14, 3, 3, 3, 20, 1, 1, 1, 30, 6]
    members = [sampled("g", r, [1, 2], [20 + r] * n) for r, n in enumerate(lengths)]
    batches = pack([group(*members)], micro_tokens=17)
    assert [len(batch.keys) for batch in batches] == [3, 2, 2, 1, 3, 1, 1]


def test_members_that_do_not_train_or_said_nothing_are_left_out():
    members = [sampled("g", 0, [1, 2], [3]), sampled("g", 1, [1, 2], [4], trained=False), sampled("g", 2, [1, 2], [])]
    (batch,) = pack([group(*members)], micro_tokens=100)
    assert batch.keys == (("g", 0),) and batch.advantages is None
    assert pack([group(*members[1:])], micro_tokens=100) == []


def test_support_of_some_members_is_empty_for_the_others():
    kept = (np.array([3, 5]), np.array([4]))
    members = [sampled("g", 0, [1, 2], [3, 4], support=kept), sampled("g", 1, [1, 2], [6])]
    (batch,) = pack([group(*members)], micro_tokens=100)
    assert [ids.tolist() for ids in batch.support] == [[3, 5], [4], []]


def test_where_tokens_were_sampled_is_found_for_all_at_once(grow, family):
    own = [t for seed in range(5) for group in random_groups(grow, family, seed) for t in group.trajectories]
    own.append(replace(own[0], sources=np.zeros_like(own[0].sources), support=None))
    together = [replace(t) for t in own]
    cache_sampled(together)
    for one, other in zip(together, own, strict=True):
        for name in ("response_length", "prompt_length", *["end"] * bool(other.response_length)):
            assert getattr(one, name) == getattr(other, name)
        assert one.policy_mask.tolist() == other.policy_mask.tolist()
    cache_sampled([])


def test_positions_are_told_the_ids_of_their_own_row(image):
    """Of rows with the same picture in the same place, and of a trunk that ends where its pictures begin."""

    def before(ids, media):
        return np.where(np.isin(np.arange(len(ids)) + 1, [span.start for span in media]), ids, 0)[None]

    def shows(uid, repeat, first, seed):
        span = MediaSpan(media=image(56, 56, seed), start=12, length=4, grid=(1, 4, 4))
        row = sampled(uid, repeat, [first] * 11 + [7] + [9] * 4 + [first] * 3, [repeat, 1, 2])
        return replace(row, media=(span,))

    groups = [group(shows("g", 0, 3, 0), shows("g", 1, 3, 1)), group(shows("g", 0, 4, 0))]
    (batch,) = pack(groups, micro_tokens=1000)
    assert len(batch.parents) == 4 and batch.positions(before).sum() == 2 * 7
    assert (batch.ids[batch.positions(before)[0] > 0] == 7).all()
    whole = batch.positions(lambda ids, media: ids[None])[0]
    assert (whole == batch.ids)[np.isin(batch.ids, (3, 4))].all()
