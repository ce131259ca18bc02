"""Groups as plain data: what a checkpoint carries over to the step after it.

JSON beside safetensors: nothing is unpickled, and arrays come back bit by bit. Samples and their
images are not copied: a sample is found again by its id, an image by the hash of its file. Only
what an environment has shown besides is kept here, as its path or its bytes. Of `info` those
entries remain that JSON can hold, tuples as lists.

    write_files(state / "surplus", group_files(groups))
    groups = load_groups(state / "surplus", samples_by_id.__getitem__)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from saccade.contents import File, text_file
from saccade.errors import DataError
from saccade.media.blob_file import encoded
from saccade.types import Group, Media, MediaSpan, Message, Sample, Trajectory

ROWS, ARRAYS = "groups.json", "groups.safetensors"

COLUMNS = ("ids", "sources", "logprobs", "versions", "advantages")
SHAPED = ("media", "messages", "support", "info", "parts", "turn_rewards")
PLAIN = tuple(f.name for f in fields(Trajectory) if f.name not in (*COLUMNS, *SHAPED))
OF_MEDIA = ("hash", "width", "height", "kind", "min_pixels", "max_pixels", "box", "parent")

Arrays = dict[str, np.ndarray]


def group_files(groups: Sequence[Group]) -> list[File]:
    arrays: Arrays = {}
    rows = [_group_row(f"{index}", group, arrays) for index, group in enumerate(groups)]
    # A view is written as the bytes that it looks at, so it has to be made contiguous.
    dense = {name: np.array(array, order="C") for name, array in arrays.items()}
    text = json.dumps(rows, default=_number)
    return [(ARRAYS, partial(save_file, dense)), (ROWS, text_file(text))]


def load_groups(folder: Path, sample_of: Callable[[str], Sample]) -> list[Group]:
    """`sample_of` gives the sample of an id, or says why there is none."""
    rows = json.loads((folder / ROWS).read_text())
    arrays = load_file(folder / ARRAYS)
    return [
        _group(f"{index}", row, arrays, sample_of(row["sample"])) for index, row in enumerate(rows)
    ]


# -- writing ---------------------------------------------------------------------------------------


def _group_row(place: str, group: Group, arrays: Arrays) -> dict[str, Any]:
    shown: dict[tuple[Media, str | None], int] = {}  # each medium once, told apart by all it says

    def number(media: Media) -> int:
        return shown.setdefault((media, media.parent), len(shown))

    members = [*group.trajectories, *([group.greedy] if group.greedy else [])]
    rows = []
    for index, member in enumerate(members):
        rows.append(_row(member, number))
        arrays |= {f"{place}/{index}/{name}": a for name, a in _columns(member).items()}
    known = {_root(media.hash, media.box) for media in group.sample.media}
    return {
        "sample": group.sample.id,
        "uid": group.uid,
        "greedy": group.greedy is not None,
        "members": rows,
        "media": [_media_row(media, known, arrays) for media, _ in shown],
    }


def _row(member: Trajectory, number: Callable[[Media], int]) -> dict[str, Any]:
    return {
        **{name: getattr(member, name) for name in PLAIN},
        "parts": dict(member.parts),
        "info": {name: value for name, value in member.info.items() if _is_plain({name: value})},
        "turn_rewards": member.turn_rewards,
        "media": [[number(s.media), s.start, s.length, s.grid] for s in member.media],
        "messages": [
            [m.role, [part if isinstance(part, str) else number(part) for part in m.parts]]
            for m in member.messages
        ],
    }


def _columns(member: Trajectory) -> Arrays:
    columns = {name: getattr(member, name) for name in COLUMNS}
    if member.support is not None:
        columns["kept"] = np.array([len(ids) for ids in member.support], np.int64)
        columns["support"] = np.concatenate([np.empty(0, np.int64), *member.support])
    return {name: column for name, column in columns.items() if column is not None}


def _media_row(media: Media, known: set[str], arrays: Arrays) -> dict[str, Any]:
    row = {name: getattr(media, name) for name in OF_MEDIA}
    root = _root(media.hash, media.box)
    if root in known:
        return row
    if media.data is not None:
        arrays[f"media/{root}"] = np.frombuffer(encoded(media), np.uint8)
    return row | {"path": media.path}


def _root(name: str, box: Any) -> str:
    """The hash of the file: a crop is called by the hash of its root and its box."""
    return name.rpartition("-")[0] if box else name


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, int, float, np.integer, np.floating, np.bool_))


def _number(value: Any) -> Any:
    assert isinstance(value, (np.integer, np.floating, np.bool_)), f"{type(value)} is no plain data"
    return value.item()


# -- reading ---------------------------------------------------------------------------------------


def _group(place: str, row: dict[str, Any], arrays: Arrays, sample: Sample) -> Group:
    files = {_root(media.hash, media.box): media for media in sample.media}
    media = [_media(entry, files, arrays, sample.id) for entry in row["media"]]
    members = [
        _trajectory(f"{place}/{index}/", entry, arrays, media)
        for index, entry in enumerate(row["members"])
    ]
    greedy = members.pop() if row["greedy"] else None
    return Group(sample=sample, uid=row["uid"], trajectories=tuple(members), greedy=greedy)


def _media(
    row: Mapping[str, Any], files: Mapping[str, Media], arrays: Arrays, sample: str
) -> Media:
    root = _root(row["hash"], row["box"])
    data = arrays.get(f"media/{root}")
    source: dict[str, Any] = {"path": row.get("path")}
    if root in files:
        source = {"path": files[root].path, "data": files[root].data}
    elif data is not None:
        source = {"data": data.tobytes()}
    elif source["path"] is None:
        raise DataError(
            f"sample {sample}: its image {root[:12]} is not in the data any more, so its stored "
            "rollouts cannot be used; restore data.train, or start again under another run.name"
        )
    box = tuple(row["box"]) if row["box"] else None
    return Media(**{name: row[name] for name in OF_MEDIA} | {"box": box}, **source)


def _trajectory(
    place: str, row: dict[str, Any], arrays: Arrays, media: Sequence[Media]
) -> Trajectory:
    columns = {name: arrays.get(place + name) for name in (*COLUMNS, "kept", "support")}
    kept, flat = columns.pop("kept"), columns.pop("support")
    support = None
    if kept is not None and flat is not None:
        ends = kept.cumsum()
        support = tuple(flat[end - n : end] for end, n in zip(ends, kept, strict=True))
    spans = [
        MediaSpan(media=media[index], start=start, length=length, grid=tuple(grid))
        for index, start, length, grid in row["media"]
    ]
    messages = [
        Message(role=role, parts=tuple(p if isinstance(p, str) else media[p] for p in parts))
        for role, parts in row["messages"]
    ]
    own = {
        "media": tuple(spans),
        "messages": tuple(messages),
        "support": support,
        "turn_rewards": tuple(row["turn_rewards"]),
    }
    return Trajectory(**(row | columns | own))
