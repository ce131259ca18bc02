"""Requests and completions as bytes: a JSON header, then the arrays that it names, raw and
little-endian. Nothing that arrives is ever executed, and what does not fit raises here.

The file of an image travels apart and once, under the hash of its content; where it lies on disk
only its path travels. The texts of a prompt stay behind: an engine in a process of its own reads
ids.

    decode_requests(encode_requests([Request(key="a", ids=ids)]), files={}, vocabulary=512)
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from saccade.types import Completion, Media, MediaSpan, Request, Sampling

LENGTH = struct.Struct("<I")  # of the header
IDS, LOGPROBS, VERSIONS = "<i8", "<f4", "<i4"


class MissingFiles(LookupError):
    """Images that have to be sent first; `args` are their names."""


def pack(header: Any, *arrays: np.ndarray) -> bytes:
    head = json.dumps([header, [[array.dtype.str, len(array)] for array in arrays]]).encode()
    return b"".join((LENGTH.pack(len(head)), head, *(array.tobytes() for array in arrays)))


def unpack(body: bytes, *kinds: str) -> tuple[Any, list[np.ndarray]]:
    """The header and arrays of exactly these kinds."""
    (size,) = LENGTH.unpack_from(body)
    start = LENGTH.size + size
    header, listed = json.loads(body[LENGTH.size : start])
    counts = [int(count) for _, count in listed]
    if tuple(kind for kind, _ in listed) != kinds or min(counts, default=0) < 0:
        raise ValueError(f"arrays of {kinds} are expected, {listed} came")
    arrays = []
    for kind, count in zip(kinds, counts, strict=True):
        arrays.append(np.frombuffer(body, kind, count, start).astype(kind[1:]))
        start += count * np.dtype(kind).itemsize
    if start != len(body):
        raise ValueError(f"{len(body) - start} bytes too many")
    return header, arrays


def joined(arrays: Iterable[np.ndarray], kind: str) -> np.ndarray:
    return np.concatenate([np.zeros(0, kind), *arrays]).astype(kind)


def split(array: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    if min(lengths, default=0) < 0 or sum(lengths) != len(array):
        raise ValueError(f"{len(array)} numbers do not make parts of {lengths}")
    return np.split(array, np.cumsum(lengths)[:-1]) if lengths else []


# -- requests --------------------------------------------------------------------------------------


def encode_requests(requests: Sequence[Request]) -> bytes:
    rows = [
        {
            "key": request.key,
            "length": len(request.ids),
            "media": [_span_row(span) for span in request.media],
            "sampling": vars(request.sampling),
            "noise": request.noise,
            "first_index": request.first_index,
            "episode": request.episode,
        }
        for request in requests
    ]
    return pack(rows, joined((request.ids for request in requests), IDS))


def decode_requests(body: bytes, *, files: Mapping[str, bytes], vocabulary: int) -> list[Request]:
    """`files`: contents of images by name. Raises `MissingFiles` when some are not there."""
    rows, (ids,) = unpack(body, IDS)
    shown = [span["media"] for row in rows for span in row["media"]]
    shown += [picture for media in shown for picture in media["pictures"]]
    missing = {m["file"] for m in shown if m["file"] is not None and m["file"] not in files}
    if missing:
        raise MissingFiles(*sorted(missing))
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary:
        raise ValueError(f"ids outside of the vocabulary of {vocabulary}")
    parts = split(ids, [int(row["length"]) for row in rows])
    return [_request(row, part, files) for row, part in zip(rows, parts, strict=True)]


def _request(row: Mapping[str, Any], ids: np.ndarray, files: Mapping[str, bytes]) -> Request:
    media = tuple(_span(span, files) for span in row["media"])
    if not len(ids) or any(span.start < 0 or span.end > len(ids) for span in media):
        raise ValueError(f"request {row['key']}: no ids, or media outside of them")
    return Request(
        key=_text(row["key"]),
        ids=ids,
        media=media,
        sampling=_sampling(row["sampling"]),
        noise=int(row["noise"]),
        first_index=int(row["first_index"]),
        episode=None if row["episode"] is None else _text(row["episode"]),
    )


def _sampling(row: Mapping[str, Any]) -> Sampling:
    first = row["first"]
    sampling = Sampling(
        temperature=float(row["temperature"]),
        top_p=float(row["top_p"]),
        top_k=int(row["top_k"]),
        max_tokens=int(row["max_tokens"]),
        stop=tuple(_text(stop) for stop in row["stop"]),
        ignore_eos=bool(row["ignore_eos"]),
        support=bool(row["support"]),
        first=None if first is None else (float(first[0]), int(first[1])),
    )
    if sampling.max_tokens < 1 or not sampling.temperature >= 0 or not 0 < sampling.top_p <= 1:
        raise ValueError(f"no sampling: {row}")
    return sampling


def file_name(media: Media) -> str:
    """Of the encoded file: a crop has the one of its root."""
    return media.hash.rpartition("-")[0] if media.box else media.hash


def _span_row(span: MediaSpan) -> dict[str, Any]:
    place = {"start": span.start, "length": span.length, "grid": span.grid}
    return {"media": _media_row(span.media), **place}


def _media_row(media: Media) -> dict[str, Any]:
    """`file` names what has to be sent beside it."""
    row = {name: value for name, value in vars(media).items() if name != "data"}
    row["path"] = None if media.path is None else os.path.abspath(media.path)
    row["pictures"] = [_media_row(picture) for picture in media.pictures]
    return row | {"file": None if media.data is None else file_name(media)}


def _span(row: Mapping[str, Any], files: Mapping[str, bytes]) -> MediaSpan:
    frames, rows, columns = map(int, row["grid"])
    return MediaSpan(
        media=_media(row["media"], files),
        start=int(row["start"]),
        length=int(row["length"]),
        grid=(frames, rows, columns),
    )


def _media(row: Mapping[str, Any], files: Mapping[str, bytes]) -> Media:
    return Media(
        hash=_text(row["hash"]),
        width=int(row["width"]),
        height=int(row["height"]),
        kind=row["kind"],
        path=None if row["path"] is None else _text(row["path"]),
        data=None if row["file"] is None else files[row["file"]],
        min_pixels=int(row["min_pixels"]),
        max_pixels=int(row["max_pixels"]),
        box=None if row["box"] is None else tuple(map(int, row["box"])),  # type: ignore[arg-type]
        parent=row["parent"],
        frames=tuple(map(int, row["frames"])),
        fps=float(row["fps"]),
        pictures=tuple(_media(picture, files) for picture in row["pictures"]),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


# -- completions -----------------------------------------------------------------------------------


def encode_completions(completions: Sequence[Completion], health: Mapping[str, Any]) -> bytes:
    """With how the server is doing: to ask for completions is also to look after it."""
    rows = [
        {
            "key": completion.key,
            "length": len(completion.ids),
            "finish": completion.finish,
            "support": None
            if completion.support is None
            else [len(kept) for kept in completion.support],
        }
        for completion in completions
    ]
    return pack(
        [rows, health],
        joined((c.ids for c in completions), IDS),
        joined((c.logprobs for c in completions), LOGPROBS),
        joined((c.versions for c in completions), VERSIONS),
        joined(chain.from_iterable(c.support or () for c in completions), IDS),
    )


def decode_completions(body: bytes) -> tuple[list[Completion], Mapping[str, Any]]:
    (rows, health), (ids, logprobs, versions, kept) = unpack(body, IDS, LOGPROBS, VERSIONS, IDS)
    lengths = [row["length"] for row in rows]
    columns = [split(column, lengths) for column in (ids, logprobs, versions)]
    supports = iter(split(kept, [n for row in rows for n in row["support"] or ()]))
    completions = [
        Completion(
            key=row["key"],
            ids=ids,
            logprobs=logprobs,
            versions=versions,
            finish=row["finish"],
            support=None
            if row["support"] is None
            else tuple(next(supports) for _ in row["support"]),
        )
        for row, ids, logprobs, versions in zip(rows, *columns, strict=True)
    ]
    return completions, health
