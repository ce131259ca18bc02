"""What travels comes out as it went in, and anything else raises."""

import json
from dataclasses import replace

import numpy as np
import pytest

from saccade.engines.remote import wire
from saccade.media.images import crop
from saccade.types import Completion, Request, Sampling


def test_requests_come_out_as_they_went_in(ask, image, family):
    sampling = Sampling(
        temperature=0.7, top_p=0.9, top_k=5, max_tokens=9, stop=("</a>", "ä"), support=True
    )
    requests = ask(replace(sampling, first=(2.0, 3)), repeats=1)
    part = crop(image(140, 84, 2), (0, 0, 56, 56))
    span = replace(requests[1].media[0], media=part)
    last = replace(
        requests[1], key="crop", media=(span,), noise=2**62 + 1, first_index=7, episode="e"
    )
    requests.append(last)
    body = wire.encode_requests(requests)
    with pytest.raises(wire.MissingFiles) as missing:
        wire.decode_requests(body, files={}, vocabulary=family.vocabulary)
    media = [span.media for request in requests for span in request.media]
    files = {m.hash: m.data for m in (*media, image(140, 84, 2)) if m.data and not m.box}
    assert sorted(missing.value.args) == sorted(files)  # the crop travels as its root
    found = wire.decode_requests(body, files=files, vocabulary=family.vocabulary)
    for one, other in zip(requests, found, strict=True):
        assert np.array_equal(one.ids, other.ids) and other.ids.dtype == np.int64
        plain = {"ids": None, "messages": ()}
        assert vars(one) | plain == vars(other) | plain
        for a, b in zip(one.media, other.media, strict=True):
            assert (a.media.path, a.media.data, a.media.parent) == (
                b.media.path,
                b.media.data,
                b.media.parent,
            )


def test_completions_come_out_as_they_went_in():
    def completion(key: str, n: int, finish, support=None) -> Completion:
        return Completion(
            key=key,
            ids=np.arange(n),
            logprobs=-np.arange(n, dtype=np.float32) / 3,
            versions=np.full(n, 4, np.int32),
            finish=finish,
            support=support,
        )

    sent = [
        completion("a", 3, "stop", (np.array([1, 5]), np.array([], np.int64), np.array([2]))),
        completion("b", 0, "aborted"),
        completion("c", 2, "length"),
    ]
    found, health = wire.decode_completions(wire.encode_completions(sent, {"version": 4}))
    assert health == {"version": 4} and wire.decode_completions(
        wire.encode_completions([], {})
    ) == ([], {})
    for one, other in zip(sent, found, strict=True):
        assert (one.key, one.finish) == (other.key, other.finish)
        for name in ("ids", "logprobs", "versions"):
            a, b = getattr(one, name), getattr(other, name)
            assert np.array_equal(a, b) and a.dtype == b.dtype
    assert [kept.tolist() for kept in found[0].support] == [[1, 5], [], [2]]
    assert found[1].support is None


def test_bytes_that_mean_nothing_raise(ask):
    good = wire.encode_requests(ask(repeats=1)[:1])
    size = wire.LENGTH.unpack_from(good)[0]
    header, _ = json.loads(good[4 : 4 + size])

    def with_row(**changes) -> bytes:
        return wire.pack([header[0] | changes], np.frombuffer(good[4 + size :], "<i8"))

    sampling = header[0]["sampling"]
    bad = {
        "empty": b"",
        "no header": b"\xff\xff\xff\xff1234",
        "cut": good[:-3],
        "longer": good + b"12345678",
        "pickle": wire.LENGTH.pack(8) + b"\x80\x04N.    ",
        "objects": wire.LENGTH.pack(14) + b'[[],[["O", 1]]]'[:14] + b"x" * 8,
        "negative": wire.pack([header[0] | {"length": -1}], np.zeros(0, np.int64)),
        "another count": with_row(length=1),
        "no key": with_row(key=None),
        "no tokens": with_row(sampling=sampling | {"max_tokens": 0}),
        "not a number": with_row(sampling=sampling | {"temperature": float("nan")}),
        "outside": with_row(media=[{"media": {"path": "/x"}, "start": 10**6}]),
    }
    for name, body in bad.items():
        with pytest.raises((ValueError, TypeError, LookupError, wire.struct.error)):
            wire.decode_requests(body, files={}, vocabulary=10**6)
            pytest.fail(name)
    with pytest.raises(ValueError, match="vocabulary"):
        wire.decode_requests(good, files={}, vocabulary=3)
    assert isinstance(wire.decode_requests(good, files={}, vocabulary=10**6)[0], Request)
