"""Containers: files, folders and hub data sets as streams of rows.

An address is PATH[:CONFIG][@SPLIT][#DATA_DIR]. Rows are yielded as stored (images undecoded); a
row that the container cannot read is yielded as a `RowError` in its place. Row formats are handled elsewhere.

    >>> parse_address("org/set:clean@train#en")
    Address(path='org/set', config='clean', split='train', data_dir='en')
"""

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from saccade.config import DataSource
from saccade.data.chats import RowError
from saccade.errors import DataError
from saccade.registry import Table

Row = Mapping[str, Any] | RowError


class Address(NamedTuple):
    path: str
    config: str | None = None
    split: str | None = None
    data_dir: str | None = None


class Container(NamedTuple):
    """Rows, the folder that their relative paths start from, and a name."""

    rows: Iterator[Row]
    folder: Path | None
    stem: str


def parse_address(text: str) -> Address:
    """Parse an address. Text that is an existing path is taken as a whole, whatever characters it contains."""
    if Path(text).exists():
        return Address(text)
    found = re.fullmatch(r"(.+?)(?::([^:@#/\\]+))?(?:@([^:@#/\\]+))?(?:#(.+))?", text)
    return Address(*found.groups()) if found else Address(text)


def open_source(source: DataSource, *, allow_network: bool = False) -> Container:
    address = parse_address(source.path)
    if source.split not in (None, address.split):
        if address.split is not None:
            raise DataError(f"{source.path}: the path names split {address.split}, the option {source.split}")
        address = address._replace(split=source.split)
    path = Path(address.path)
    kind = "folder" if path.is_dir() else "hub" if not path.is_file() else "python" if path.suffix == ".py" else "file"
    if kind == "hub":
        is_file_name = suffix_of(path) in (*FILES, ".py")
        named = not is_file_name and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", address.path)
        if not named or not allow_network:
            hint = "; a hub id needs data.allow_network=true" if named else ""
            raise DataError(f"data file {source.path} does not exist{hint}")
    rows, folder = CONTAINERS[kind](address)
    if source.image_dir is not None:
        folder = Path(source.image_dir)
        if not folder.is_dir():
            raise DataError(f"{source.path}: image_dir {folder} does not exist")
    return Container(rows, folder, stem_of(path))


def set_names(sources: Sequence[DataSource]) -> list[str]:
    """A unique name for each source, without opening it."""
    names: list[str] = []
    for source in sources:
        name = source.name or stem_of(Path(parse_address(source.path).path))
        others = (f"{name}-{n}" for n in count(len(names)))
        names.append(next(n for n in chain([name], others) if n not in names))
    return names


def stem_of(path: Path) -> str:
    name, suffix = path.name or path.resolve().name, suffix_of(path)
    return name.removesuffix(suffix) if suffix in (*FILES, ".py") else name


def suffix_of(path: Path) -> str:
    return "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix


# -- files -----------------------------------------------------------------------------------------


def _file_rows(address: Address) -> tuple[Iterator[Row], Path | None]:
    path, suffix = Path(address.path), suffix_of(Path(address.path))
    if suffix not in FILES:
        readable = f"{', '.join(FILES)}, and a .py whose load(split) returns rows, as in examples/boxoban.py"
        raise DataError(f"{path}: unknown kind of file {suffix!r}; readable are {readable}")
    for name, value in zip(Address._fields[1:], address[1:], strict=True):
        if value is not None:
            raise DataError(f"{path} is a single file and has no {name} {value!r}")
    return FILES[suffix](path), path.parent


def _open(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _json_rows(path: Path) -> Iterator[Row]:
    try:
        with _open(path) as file:
            rows = json.load(file)
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: not a JSON file: {error}") from None
    if isinstance(rows, dict) and rows and all(isinstance(row, dict) for row in rows.values()):
        rows = [{"id": name, **row} for name, row in rows.items()]
    if not isinstance(rows, list):
        raise DataError(f"{path}: a JSON file must hold a list of rows, not {type(rows).__name__}")
    yield from map(record, rows)


def _jsonl_rows(path: Path) -> Iterator[Row]:
    try:
        with _open(path) as file:
            for line in file:
                if text := line.removeprefix(b"\xef\xbb\xbf").strip():
                    try:
                        yield record(json.loads(text))
                    except ValueError as error:
                        yield RowError(f"not valid JSON: {error}")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None


def record(value: Any) -> Row:
    return value if isinstance(value, dict) else RowError(f"a row must be a record, not {type(value).__name__}")


_JSON = {".json": _json_rows, ".jsonl": _jsonl_rows, ".json.gz": _json_rows, ".jsonl.gz": _jsonl_rows}
FILES: Table[Callable[[Path], Iterator[Row]]] = Table("file_kinds", _JSON)  # by suffix of the file name
CONTAINERS: Table[Callable[[Address], tuple[Iterator[Row], Path | None]]] = Table("containers", {"file": _file_rows})
