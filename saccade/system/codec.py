"""The codec of records: JSON data plus named arrays, for files and for other processes.

`encode` puts the arrays of a record, and the files of its media by their hash, into `arrays` and returns JSON data.
Fields with their default are left out. `decode` checks every field against the annotation of its record. Nothing is
pickled. `pack` makes one block of bytes of both.

    >>> arrays: Arrays = {}
    >>> row = encode(Message(role="user", parts=("Hi",)), arrays)
    >>> row, decode(Message, row, arrays)
    ({'role': 'user', 'parts': ['Hi']}, Message(role='user', parts=('Hi',)))
"""

import json
import os
import struct
from collections.abc import Container, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from itertools import repeat
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from saccade.types import Media, Sample, root_hash

VERSION = 2  # of files that hold encoded records
FILES = "media/"  # name prefix of arrays that hold the files of media
LENGTH = struct.Struct("<I")  # length of the JSON in a block of bytes

Arrays = dict[str, np.ndarray]
NO_ARRAYS: Mapping[str, np.ndarray] = MappingProxyType({})
NO_MEDIA: Mapping[str, Media] = MappingProxyType({})


class MissingFile(LookupError):
    """A medium whose file is neither in the arrays, nor shared, nor at a path. The message is its hash."""


def jsonable(value: Any) -> Any:
    """For `json.dumps`: arrays and sets as lists, anything else that JSON cannot hold as text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, set | frozenset) else str(value)


# -- writing ---------------------------------------------------------------------------------------


def encode(value: Any, arrays: Arrays | None = None, *, shared: Container[str] = (), name: str = "0") -> Any:
    """Encode a record, or a tuple of them, as JSON data; `name` prefixes the names of its arrays. Media files whose
    hash is in `shared` are not added, as the reader has them; without `arrays` none is added.
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, np.ndarray):
        assert arrays is not None, f"{name}: no place for an array"
        arrays[name] = value
        return name
    if isinstance(value, tuple | list):
        if value and all(isinstance(item, np.ndarray) for item in value):
            assert arrays is not None, f"{name}: no place for arrays"
            arrays |= {name: np.concatenate(value), f"{name}/lengths": np.array(list(map(len, value)), np.int64)}
            return name
        return [encode(item, arrays, shared=shared, name=f"{name}/{n}") for n, item in enumerate(value)]
    if isinstance(value, Mapping):
        return dict(value)
    if not is_dataclass(value):
        return value
    left_out = _add_file(value, arrays, shared) if isinstance(value, Media) else ()
    row: dict[str, Any] = {}
    for field, default in _defaults(value.__class__):
        item = getattr(value, field)
        if field not in left_out and not (type(item) is type(default) and item == default):
            row[field] = encode(item, arrays, shared=shared, name=f"{name}/{field}")
    if "path" in row:
        row["path"] = os.path.abspath(row["path"])
    return row


def _add_file(media: Media, arrays: Arrays | None, shared: Container[str]) -> tuple[str, ...]:
    """Add the medium's file to `arrays` if needed. Returns the fields to leave out of its row."""
    from saccade.media.blob_file import encoded  # imports libraries that few callers need

    root = root_hash(media.hash, media.box)
    if root in shared:
        return ("data", "path", "pictures")
    if arrays is not None and media.data is not None and FILES + root not in arrays:
        arrays[FILES + root] = np.frombuffer(encoded(media), np.uint8)
    return ("data",)


@cache
def _defaults(kind: type) -> tuple[tuple[str, Any], ...]:
    return tuple((field.name, field.default) for field in fields(kind))


def files_of(sample: Sample) -> dict[str, Media]:
    """The media of a question by the hash of their file, to be `shared` on both sides."""
    return {root_hash(media.hash, media.box): media for media in sample.media}


# -- reading ---------------------------------------------------------------------------------------


def decode(
    kind: Any, row: Any, arrays: Mapping[str, np.ndarray] = NO_ARRAYS, *, shared: Mapping[str, Media] = NO_MEDIA
) -> Any:
    """Decode a record of this type, or a tuple of records. Raises ValueError for other data, and `MissingFile`."""
    if not _fits(kind, row):
        raise ValueError(f"expected {kind.__name__ if isinstance(kind, type) else kind}, got {row!r:.80}")
    origin, options = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return decode(next(option for option in options if _fits(option, row)), row, arrays, shared=shared)
    if is_dataclass(kind):
        return _record(kind, row, arrays, shared)
    if kind is np.ndarray:
        return arrays[row]
    if options == (np.ndarray, ...):
        return tuple(np.split(arrays[row], arrays[f"{row}/lengths"].cumsum()[:-1])) if row else ()
    if origin is tuple:
        kinds = repeat(options[0], len(row)) if options[-1] is ... else options
        return tuple(decode(option, item, arrays, shared=shared) for option, item in zip(kinds, row, strict=True))
    return row


def _fits(kind: Any, value: Any) -> bool:
    """Whether JSON data can stand for a value of this type."""
    origin, options = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(option, value) for option in options)
    if origin is Literal:
        return value in options
    if origin is tuple:
        return isinstance(value, list) or (options == (np.ndarray, ...) and isinstance(value, str))
    if is_dataclass(kind) or origin is not None:
        return isinstance(value, dict)
    if kind is np.ndarray:
        return isinstance(value, str)
    if kind is float:
        return isinstance(value, float | int)
    return kind is Any or isinstance(value, NoneType if kind is None else kind)


def _record(kind: Any, row: Mapping[str, Any], arrays: Mapping[str, np.ndarray], shared: Mapping[str, Media]) -> Any:
    hints, required = _hints(kind)
    strange, missing = row.keys() - hints.keys(), required - row.keys()
    if strange or missing:
        listed = ", ".join(sorted(missing or strange))
        raise ValueError(f"{kind.__name__}: {'without' if missing else 'unknown'} {listed}")
    values = {}
    for name, value in row.items():
        try:
            values[name] = decode(hints[name], value, arrays, shared=shared)
        except ValueError as error:
            raise ValueError(f"{kind.__name__}.{name}: {error}") from None
    return kind(**(values | _file(values, arrays, shared) if kind is Media else values))


@cache
def _hints(kind: Any) -> tuple[dict[str, Any], set[str]]:
    """Types of the fields of a record, and those that it must have."""
    required = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
    return get_type_hints(kind), required


def _file(values: Mapping[str, Any], arrays: Mapping[str, np.ndarray], shared: Mapping[str, Media]) -> dict[str, Any]:
    """The fields that say where a medium has its content."""
    root = root_hash(values["hash"], values.get("box"))
    if root in shared:
        return {name: getattr(shared[root], name) for name in ("path", "data", "pictures")}
    if values.get("path") or values.get("pictures"):
        return {}
    if FILES + root not in arrays:
        raise MissingFile(root)
    return {"data": arrays[FILES + root].tobytes()}


# -- bytes -----------------------------------------------------------------------------------------


def pack(row: Any, arrays: Mapping[str, np.ndarray] = NO_ARRAYS) -> list[memoryview]:
    """The bytes of a block, in pieces, so that arrays are not copied."""
    listed = [[name, array.dtype.str, array.shape] for name, array in arrays.items()]
    head = json.dumps([row, listed], default=jsonable).encode()
    data = [array.ravel().view(np.uint8).data for array in arrays.values()]
    return [memoryview(LENGTH.pack(len(head)) + head), *data]


def unpack(block: bytes | bytearray) -> tuple[Any, Arrays]:
    start = LENGTH.size + LENGTH.unpack_from(block)[0]
    row, listed = json.loads(block[LENGTH.size : start])
    arrays = {}
    for name, kind, shape in listed:
        count = int(np.prod(shape))
        arrays[name] = np.frombuffer(block, kind, count, start).reshape(shape).copy()
        start += arrays[name].nbytes
    if start != len(block):
        raise ValueError(f"{len(block) - start} bytes too many")
    return row, arrays
