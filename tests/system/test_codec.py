"""Every record comes back as it was, from bytes too, and anything else is refused by name."""

import struct
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest

from saccade.media.images import crop
from saccade.media.kinds import decode as pixels
from saccade.plugins.evaluation import rescoring
from saccade.plugins.media import videos
from saccade.rewards.reward_sample import image_records
from saccade.system.codec import MissingFile, decode, encode, files_of, pack, unpack
from saccade.types import Completion, Media, MediaSpan, Message, Request, Sample, Sampling, Score, Trajectory

IDS, LOGPROBS, VERSIONS = np.arange(6)[::2], np.float32([-1, np.nan, 0]), np.int32([4, -1, 4])
KEPT = (np.array([1, 5]), np.array([], np.int64), np.array([2]))


@pytest.fixture
def records(image, on_disk, tmp_path):
    whole, place = image(140, 84, 2), tmp_path / "a.png"
    place.write_bytes(whole.data)
    part = crop(crop(whole, (0, 0, 84, 84)), (0, 0, 56, 56))
    film = videos.open_video(np.arange(3 * 56 * 56 * 3, dtype=np.uint8).reshape(3, 56, 56, 3))
    spilled, file = (on_disk(image(56, 84, 3)), replace(whole, data=None, path=str(place)))
    message = Message(role="user", parts=("ä", whole, part, film, spilled, file))
    sampling = Sampling(temperature=0.7, top_k=5, stop=("</a>", "ä"), first=(2.0, 3), support=True)
    span = MediaSpan(media=part, start=1, length=2, grid=(1, 2, 3))
    columns = {"ids": IDS, "logprobs": LOGPROBS, "versions": VERSIONS}
    return {
        "message": message,
        "sample": Sample(
            id="s", messages=(message,), answer=("a", "b"), choices=("a", "b"), extra={"n": [3]},
            candidates=((message,), ()), desirable=False,
        ),
        "plain": Sample(id="s", messages=(), answer="a"),
        "request": Request(key="r", ids=IDS, media=(span,), sampling=sampling, noise=2**62 + 1),
        "completion": Completion(key="c", finish="stop", support=KEPT, **columns),
        "aborted": Completion(key="c", finish="aborted", support=(), **{name: a[:0] for name, a in columns.items()}),
        "score": Score(kind="value", value=0.5, parts={"a": 1.0}, info={"x": None}),
        "trajectory": Trajectory(
            sample_id="s", repeat=-1, sources=np.int8([0, 1, 2]), media=(span,), messages=(message,),
            reward=float("inf"), turn_rewards=(0.5, 1), support=(np.array([7]),), trained=False,
            info={"calls": [{"ok": True}]}, **columns,
        ),
    }  # fmt: skip


def same(a, b):
    """All fields, arrays bit by bit; what is in a file here may be in memory there."""
    assert type(a) is type(b)
    if isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()
    elif isinstance(a, Media):
        assert a == b and (a.path, a.parent) == (b.path, b.parent)
        assert a.path is not None or np.array_equal(pixels(a), pixels(b))
    elif is_dataclass(a):
        for field in fields(a):
            same(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            same(one, other)
    else:
        assert a == b


@pytest.mark.parametrize(
    "name", ["message", "sample", "plain", "request", "completion", "aborted", "score", "trajectory"]
)
def test_records_come_back_as_they_were(records, name):
    record, arrays = records[name], {}
    row, arrays = unpack(b"".join(pack([encode(record, arrays)], arrays)))
    same(decode(type(record), row[0], arrays), record)
    same(decode(tuple[type(record), ...], row, arrays), (record,))


def test_files_that_the_reader_has_are_only_named(records):
    sample, arrays = records["sample"], {}
    shared = files_of(sample)
    row = encode(sample, arrays, shared=shared)
    assert not arrays and "path" not in str(row)
    assert decode(Sample, row, shared=shared) == sample
    with pytest.raises(MissingFile) as missing:
        decode(Sample, row)
    assert missing.value.args[0] == sample.media[0].hash
    encode(sample, arrays)
    assert len(arrays) == 5  # each once: the whole picture, three frames, one that was spilled


@pytest.mark.parametrize(
    ("kind", "row", "said"),
    [
        (Message, {"role": "user"}, "Message: without parts"),
        (Message, {"role": "user", "parts": [], "name": 1}, "Message: unknown name"),
        (Message, {"role": "boss", "parts": []}, r"Message\.role: expected .*'tool'\], got 'boss'"),
        (Sampling, {"max_tokens": "9"}, r"Sampling\.max_tokens: expected int, got '9'"),
        (Request, {"key": "a", "ids": [1]}, r"Request\.ids: expected ndarray, got"),
        (Media, {"hash": "a", "width": 1, "height": 1, "data": "x"}, r"Media\.data"),
    ],
)
def test_other_data_is_refused_by_the_name_of_the_field(kind, row, said):
    with pytest.raises(ValueError, match=said):
        decode(kind, row)


@pytest.mark.parametrize("change", ["", "cut", "longer", "pickle", "objects"])
def test_bytes_that_are_no_block_are_refused(change):
    good = b"".join(pack([1], {"a": IDS}))
    blocks = {
        "": b"", "cut": good[:-3], "longer": good + b"12345678", "pickle": b"\x08\0\0\0\x80\x04N.    ",
        "objects": good.replace(b"<i8", b"|O8"),
    }  # fmt: skip
    assert unpack(good)[1]["a"].tolist() == IDS.tolist()
    with pytest.raises((ValueError, struct.error)):
        unpack(blocks[change])


def test_media_of_stored_answers_come_back_with_all_that_they_show(records, tmp_path):
    film = videos.open_video(np.zeros((3, 56, 56, 3), np.uint8))
    (tmp_path / "frame.png").write_bytes(film.pictures[0].data)
    frames = [replace(p, data=None, path=str(tmp_path / "frame.png")) for p in film.pictures]
    whole = records["message"].media[-1]  # at a path
    for media in (whole, crop(whole, (0, 0, 56, 56)), replace(film, pictures=tuple(frames))):
        (facts,) = image_records([media])
        same(rescoring._media(facts | encode(media)), media)
        assert rescoring._has_files(facts | encode(media))
    assert not rescoring._has_files(encode(film))
