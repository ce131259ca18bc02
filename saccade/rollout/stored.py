"""Saves groups on disk, for a checkpoint that carries them over to the next step.

JSON plus safetensors, so arrays are restored bit by bit. Samples and their media are not copied: a sample is found
again by its id, a medium by the hash of its file. Only media that an environment added are stored, as path or bytes. Of
`info`, the entries that JSON can hold are stored, tuples as lists.

    write_files(state / "surplus", group_files(groups))
    groups = load_groups(state / "surplus", samples_by_id.__getitem__)
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from saccade.errors import DataError
from saccade.system.codec import VERSION, Arrays, MissingFile, decode, encode, files_of, jsonable
from saccade.system.contents import File, text_file
from saccade.types import Group, Sample, Trajectory


def group_files(groups: Sequence[Group]) -> list[File]:
    arrays: Arrays = {}
    rows = []
    for index, group in enumerate(groups):
        stored = tuple(replace(m, info=_without_objects(m.info)) for m in group.everyone)
        shared = files_of(group.sample)
        row = {"sample": group.sample.id, "uid": group.uid, "greedy": group.greedy is not None}
        rows.append(row | {"members": encode(stored, arrays, shared=shared, name=str(index))})
    return record_files("groups", rows, arrays)


def load_groups(folder: Path, sample_of: Callable[[str], Sample]) -> list[Group]:
    """`sample_of` returns the sample of an id, or raises if there is none."""
    rows, arrays = load_records(folder, "groups")
    groups = []
    for row in rows:
        sample = sample_of(row["sample"])
        try:
            members = list(decode(tuple[Trajectory, ...], row["members"], arrays, shared=files_of(sample)))
        except MissingFile as missing:
            raise DataError(f"sample {sample.id}: its image {missing.args[0][:12]} is gone from data.train") from None
        greedy = members.pop() if row["greedy"] else None
        groups.append(Group(sample=sample, uid=row["uid"], trajectories=tuple(members), greedy=greedy))
    return groups


def record_files(name: str, rows: Sequence[Mapping[str, Any]], arrays: Arrays) -> list[File]:
    """The files of encoded records and of the arrays that they name."""
    # safetensors writes the raw memory of an array, so a view has to be made contiguous.
    dense = {key: np.array(array, order="C") for key, array in arrays.items()}
    text = json.dumps({"version": VERSION, name: rows}, default=jsonable)
    return [(f"{name}.safetensors", partial(save_file, dense)), (f"{name}.json", text_file(text))]


def load_records(folder: Path, name: str) -> tuple[list[Any], Mapping[str, np.ndarray]]:
    file = folder / f"{name}.json"
    stored = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(stored, dict) or stored["version"] != VERSION:
        raise DataError(f"{file} was written by another version of saccade; resume with that version")
    return stored[name], load_file(folder / f"{name}.safetensors")


def _without_objects(info: Mapping[str, Any]) -> dict[str, Any]:
    kept = {}
    for name, value in info.items():
        with suppress(TypeError, ValueError):
            json.dumps(value, default=lambda number: number.item() if isinstance(number, np.generic) else number)
            kept[name] = value
    return kept
