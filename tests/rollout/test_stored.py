"""Groups on disk: they come back as they were, and no image is written twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saccade.contents import write_files
from saccade.engines.embedded import EmbeddedEngine
from saccade.environments import Step
from saccade.errors import DataError
from saccade.forest.packing import pack
from saccade.media import videos
from saccade.media.images import crop, decode
from saccade.rollout.collect import collect
from saccade.rollout.episode import Limits
from saccade.rollout.stored import ARRAYS, ROWS, group_files, load_groups
from saccade.types import Group, Media, Message, Sample, Sampling, Source, Trajectory

COLUMNS = {"ids", "sources", "logprobs", "versions", "advantages"}


def same_media(a: Media, b: Media) -> None:
    assert a == b and all(
        getattr(a, name) == getattr(b, name) for name in ("path", "data", "parent", "pictures")
    )


def same(a: Trajectory, b: Trajectory) -> None:
    """Every field, arrays bit by bit, media with where they come from."""
    for field in fields(Trajectory):
        one, other = getattr(a, field.name), getattr(b, field.name)
        if field.name in COLUMNS and one is not None:
            assert one.dtype == other.dtype and one.tobytes() == other.tobytes(), field.name
        elif field.name == "support" and one is not None:
            assert [x.tolist() for x in one] == [x.tolist() for x in other]
            assert all(x.dtype == y.dtype for x, y in zip(one, other, strict=True))
        else:
            assert one == other, field.name
    for one, other in zip(a.media, b.media, strict=True):
        same_media(one.media, other.media)
    for one, other in zip(a.messages, b.messages, strict=True):
        for medium, again in zip(one.media, other.media, strict=True):
            same_media(medium, again)


def same_groups(a: list[Group], b: list[Group]) -> None:
    assert [(g.uid, g.sample) for g in a] == [(g.uid, g.sample) for g in b]
    for one, other in zip(a, b, strict=True):
        assert (one.greedy is None) == (other.greedy is None)
        before = (*one.trajectories, *filter(None, [one.greedy]))
        after = (*other.trajectories, *filter(None, [other.greedy]))
        for member, again in zip(before, after, strict=True):
            same(member, again)


def finder(groups: list[Group]) -> Callable[[str], Sample]:
    return {group.sample.id: group.sample for group in groups}.__getitem__


TEXT = st.text(max_size=8)
NUMBERS = st.floats(allow_nan=False)
INFO = st.dictionaries(
    TEXT,
    st.recursive(
        st.none() | st.booleans() | st.integers() | NUMBERS | TEXT,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)


@st.composite
def members(draw, repeat: int, uid: str, pictures: list[Media]) -> Trajectory:
    sources = np.array(draw(st.lists(st.sampled_from([0, 1, 1, 2, 3]), max_size=9)), np.int8)
    n, policy = len(sources), int((sources == Source.POLICY).sum())
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    logprobs = rng.standard_normal(n).astype(np.float32)
    kept = st.lists(st.integers(0, 2**40), max_size=4).map(lambda ids: np.array(ids, np.int64))
    supports = st.lists(kept, min_size=policy, max_size=policy).map(tuple)
    shown = tuple(draw(st.lists(st.sampled_from(pictures), max_size=3)))
    return Trajectory(
        sample_id=uid,
        repeat=repeat,
        ids=rng.integers(0, 2**40, 2 * n)[::2],  # a view with steps
        sources=sources,
        logprobs=np.where(sources == Source.POLICY, logprobs, np.nan).astype(np.float32),
        versions=rng.integers(-1, 2**31, n).astype(np.int32),
        messages=(Message(role="tool", parts=(draw(TEXT), *shown)), Message(role="user", parts=())),
        context=draw(st.integers(0, 3)),
        end_reason=draw(TEXT),
        status=draw(st.sampled_from(["ok", "truncated", "error", "stale"])),
        turns=draw(st.integers(0, 5)),
        trained=repeat >= 0,
        support=draw(st.none() | supports),
        turn_rewards=tuple(draw(st.lists(NUMBERS, max_size=3))),
        reward=draw(st.none() | NUMBERS),
        outcome=draw(st.none() | NUMBERS),
        parts=draw(st.dictionaries(TEXT, NUMBERS, max_size=3)),
        extracted=draw(st.none() | TEXT),
        reason=draw(TEXT),
        advantages=rng.standard_normal(policy).astype(np.float32) if draw(st.booleans()) else None,
        info=draw(INFO),
    )


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_what_is_loaded_is_what_was_saved(tmp_path, image, data):
    known = [image(140, 84, 1), image(56, 56, 2)]
    small = crop(known[0], (0, 0, 84, 56))
    film = videos.open_video(np.arange(3 * 56 * 56 * 3, dtype=np.uint8).reshape(3, 56, 56, 3))
    pictures = [*known, small, crop(small, (28, 0, 84, 56)), image(84, 56, 3), film]
    groups = []
    for index in range(data.draw(st.integers(0, 3))):
        uid = f"s{index}~2"
        sample = Sample(id=f"s{index}", messages=(Message(role="user", parts=tuple(known)),))
        size = data.draw(st.integers(0, 3))
        trajectories = tuple(data.draw(members(r, uid, pictures)) for r in range(size))
        greedy = data.draw(st.none() | members(-1, uid, pictures))
        groups.append(Group(sample=sample, uid=uid, trajectories=trajectories, greedy=greedy))
    write_files(tmp_path / "kept", group_files(groups))
    same_groups(groups, load_groups(tmp_path / "kept", finder(groups)))


class Zooms:
    """Shows a part of the question's picture, then a picture of its own."""

    blocking = False

    def __init__(self, own: Media) -> None:
        self.own, self.turn = own, 0

    def reset(self, sample, seed):
        self.root = sample.media[0]
        return sample.messages

    def step(self, message):
        self.turn += 1
        shown = [crop(self.root, (0, 0, 84, 56)), self.own][self.turn - 1 : self.turn]
        info = {"calls": ("zoom",), "board": object(), "moves": np.int64(self.turn)}
        return Step((Message(role="user", parts=(*shown, "more")),), 0.5, self.turn == 3, info)

    def close(self):
        pass


@pytest.fixture
def collected(model, family, image, brief) -> list[Group]:
    """Three turns with a crop and an environment's picture, truncated sampling, a baseline."""
    samples = [
        Sample(id=f"q{n}", messages=(Message(role="user", parts=(image(140, 84, n), "Where?")),))
        for n in range(2)
    ]
    return collect(
        EmbeddedEngine(model, family),
        samples,
        repeats=2,
        environment=lambda: Zooms(image(56, 56, 9)),
        family=family,
        sampling=Sampling(max_tokens=40, top_k=60, support=True, first=(9, -1)),
        limits=Limits(max_turns=4),
        seed="3",
        greedy=True,
    )


def test_rollouts_train_as_before(tmp_path, family, collected):
    write_files(tmp_path, group_files(collected))
    loaded = load_groups(tmp_path, finder(collected))
    plain = [
        replace(t, info={k: v for k, v in t.info.items() if k != "board"} | _lists(t.info))
        for group in collected
        for t in group.trajectories
    ]
    for t, again in zip(plain, (t for group in loaded for t in group.trajectories), strict=True):
        same(t, again)
    assert [group.greedy.key for group in loaded] == [("q0", -1), ("q1", -1)]
    assert not any(group.greedy.trained or group.greedy.support for group in loaded)
    before, after = (
        pack(groups, positions=family.positions, micro_tokens=9999)
        for groups in (collected, loaded)
    )
    for one, other in zip(before, after, strict=True):
        for name in ("ids", "positions", "reads", "targets", "sequence", "rollout_logprobs"):
            assert getattr(one, name).tobytes() == getattr(other, name).tobytes()
        assert one.media == other.media
        for span, again in zip(one.media, other.media, strict=True):
            assert np.array_equal(decode(span.media), decode(again.media))


def _lists(info) -> dict:
    return {"calls": ["zoom"]} if "calls" in info else {}


def test_only_pictures_that_no_sample_has_are_written(tmp_path, collected):
    write_files(tmp_path, group_files(collected))
    assert {len(t.media) for g in collected for t in g.trajectories} == {3}
    own = {s.media.data for g in collected for t in g.trajectories for s in t.media}
    own -= {g.sample.media[0].data for g in collected}
    written = (tmp_path / ARRAYS).read_bytes()
    assert [written.count(data) for data in own] == [1]
    assert not any(group.sample.media[0].data in written for group in collected)


def test_what_lies_in_a_spill_file_is_written_as_the_same_bytes(tmp_path, collected, on_disk):
    """A file that goes with its process is of no use to the next one."""

    def moved(member: Trajectory) -> Trajectory:
        spans = tuple(replace(span, media=on_disk(span.media)) for span in member.media)
        turns = (
            replace(m, parts=tuple(p if isinstance(p, str) else on_disk(p) for p in m.parts))
            for m in member.messages
        )
        return replace(member, media=spans, messages=tuple(turns))

    spilled = [replace(g, trajectories=tuple(map(moved, g.trajectories))) for g in collected]
    assert not any(isinstance(s.media.data, bytes) for s in spilled[0].trajectories[0].media)
    write_files(tmp_path / "memory", group_files(collected))
    write_files(tmp_path / "disk", group_files(spilled))
    for name in (ROWS, ARRAYS):
        assert (tmp_path / "memory" / name).read_bytes() == (tmp_path / "disk" / name).read_bytes()


def test_media_get_their_file_from_the_sample(tmp_path, collected, image):
    """As when the data set has moved: the content is the same, the path is not."""
    write_files(tmp_path, group_files(collected))
    file = tmp_path / "moved.png"
    file.write_bytes(image(140, 84, 0).data)
    moved = replace(image(140, 84, 0), path=str(file), data=None)
    other = {"q1": collected[1].sample, "q0": replace(collected[0].sample, messages=())}
    other["q0"] = replace(other["q0"], messages=(Message(role="user", parts=(moved,)),))
    first = load_groups(tmp_path, other.__getitem__)[0]
    assert first.sample is other["q0"]
    media = [span.media for span in first.trajectories[0].media]
    assert [m.path for m in media[:2]] == [str(file)] * 2 and media[1].box == (0, 0, 84, 56)
    assert decode(media[1]).shape == (56, 84, 3)
    gone = {name: replace(sample, messages=()) for name, sample in other.items()}
    with pytest.raises(DataError, match=r"sample q0: its image [0-9a-f]{12} .*data\.train"):
        load_groups(tmp_path, gone.__getitem__)


def test_a_later_call_replaces_the_earlier_one(tmp_path: Path, collected):
    write_files(tmp_path, group_files(collected))
    write_files(tmp_path, group_files([]))
    assert load_groups(tmp_path, finder([])) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["groups.json", "groups.safetensors"]
    assert json.loads((tmp_path / "groups.json").read_text()) == {"version": 2, "groups": []}


def test_groups_of_an_earlier_version_are_refused(tmp_path: Path, collected):
    write_files(tmp_path, group_files(collected))
    (tmp_path / ROWS).write_text("[]")
    with pytest.raises(DataError, match="another version of saccade; resume with that version"):
        load_groups(tmp_path, finder(collected))
