"""Containers: files, folders and hub data sets as streams of rows.

An address is PATH[:CONFIG][@SPLIT][#DATA_DIR]. Rows come out as they are stored (images
undecoded); a row that the container itself cannot read comes out as a `RowError` in its place.
Knows nothing of formats.

    >>> parse_address("org/set:clean@train#en")
    Address(path='org/set', config='clean', split='train', data_dir='en')
"""

from __future__ import annotations

import csv
import gzip
import importlib.util
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from saccade.config import DataSource
from saccade.data.chats import RowError
from saccade.errors import DataError, EnvironmentProblem, SaccadeError
from saccade.user_code import own_module, raised_at

Row = Mapping[str, Any] | RowError
BATCH = 256  # rows of a table that are in memory at once, or as many as BATCH_BYTES hold
BATCH_BYTES = 8 << 20
METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")


class Address(NamedTuple):
    path: str
    config: str | None = None
    split: str | None = None
    data_dir: str | None = None


@dataclass(frozen=True, kw_only=True)
class Container:
    """Rows, the folder that their relative paths start from, and a name."""

    rows: Iterator[Row]
    folder: Path | None
    stem: str


def parse_address(text: str) -> Address:
    """A text that names a file or folder as a whole is only that, whatever signs it holds."""
    if Path(text).exists():
        return Address(text)
    found = re.fullmatch(r"(.+?)(?::([^:@#/\\]+))?(?:@([^:@#/\\]+))?(?:#(.+))?", text)
    return Address(*found.groups()) if found else Address(text)


def open_source(source: DataSource, *, allow_network: bool = False) -> Container:
    address = parse_address(source.path)
    if source.split is not None:
        if address.split not in (None, source.split):
            raise DataError(f"{source.path}: the path names split {address.split}, the option {source.split}")
        address = address._replace(split=source.split)
    path = Path(address.path)
    if path.is_file():
        rows, folder = _file_rows(path, address), path.parent
    elif path.is_dir():
        rows, folder = _folder_rows(path, address)
    else:
        rows, folder = _hub_rows(address, source.path, allow_network), None
    if source.image_dir is not None:
        folder = Path(source.image_dir)
        if not folder.is_dir():
            raise DataError(f"{source.path}: image_dir {folder} does not exist")
    return Container(rows=rows, folder=folder, stem=_stem(path))


def set_names(sources: Sequence[DataSource]) -> list[str]:
    """What each is called where it is a set of its own; nothing is opened for it."""
    names: list[str] = []
    for source in sources:
        name = source.name or _stem(Path(parse_address(source.path).path))
        others = (f"{name}-{n}" for n in count(len(names)))
        names.append(next(n for n in chain([name], others) if n not in names))
    return names


def _stem(path: Path) -> str:
    name = path.name or path.resolve().name
    suffix = _suffix(path)
    return name.removesuffix(suffix) if suffix in FILES else name


def _suffix(path: Path) -> str:
    return "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix


# -- files -----------------------------------------------------------------------------------------


def _file_rows(path: Path, address: Address) -> Iterator[Row]:
    suffix = _suffix(path)
    if suffix == ".py":
        return _python_rows(path, address.split)
    if suffix not in FILES:
        raise DataError(
            f"{path}: unknown kind of file {suffix!r}; readable are {', '.join(FILES)}, and a .py "
            "whose load(split) returns rows, as examples/boxoban.py does for levels of Sokoban"
        )
    for name, value in zip(Address._fields[1:], address[1:], strict=True):
        if value is not None:
            raise DataError(f"{path} is a single file and has no {name} {value!r}")
    return FILES[suffix](path)


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
    yield from map(_record, rows)


def _jsonl_rows(path: Path) -> Iterator[Row]:
    try:
        with _open(path) as file:
            for line in file:
                if text := line.removeprefix(b"\xef\xbb\xbf").strip():
                    yield _json_line(text)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None


def _json_line(text: bytes) -> Row:
    try:
        return _record(json.loads(text))
    except ValueError as error:
        return RowError(f"not valid JSON: {error}")


def _record(value: Any) -> Row:
    return value if isinstance(value, dict) else RowError(f"a row must be a record, not {type(value).__name__}")


def _csv_rows(path: Path) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # an image as base64 is longer than the default
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            for row in csv.DictReader(chain([header], file), delimiter=_separator(header)):
                if None in row or None in row.values():
                    yield RowError("the number of cells differs from the header")
                else:
                    yield {name: value if value != "" else None for name, value in row.items()}
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: not UTF-8 (byte {error.object[error.start]:#04x}); save it as CSV UTF-8, or "
            "where it is latin-1: iconv -f latin1 -t utf-8 OLD.csv > NEW.csv"
        ) from None
    except (ValueError, csv.Error) as error:
        raise DataError(f"{path}: not a CSV file: {error}") from None


def _separator(header: str) -> str:
    """A comma, unless only another cuts the header: spreadsheets write what their country does."""
    cells = {sign: next(csv.reader([header], delimiter=sign), []) for sign in (",", ";", "\t")}
    return next((sign for sign, found in cells.items() if len(found) > 1), ",")


def _parquet_rows(path: Path) -> Iterator[Row]:
    from pyarrow import ArrowException, parquet

    try:
        # Reading ahead would hold the whole file, and reading without a buffer a whole row group.
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            facts = file.metadata
            groups = map(facts.row_group, range(facts.num_row_groups))
            size = sum(group.total_byte_size for group in groups)
            for batch in file.iter_batches(batch_size=_at_once(facts.num_rows, size)):
                yield from batch.to_pylist()
    except (ArrowException, OSError) as error:
        raise DataError(f"{path}: not a parquet file: {error}") from None


def _arrow_rows(path: Path) -> Iterator[Row]:
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as file:
            random_access = file.read(6) == b"ARROW1"
            file.seek(0)
            if random_access:
                reader = pyarrow.ipc.open_file(file)
                batches = map(reader.get_batch, range(reader.num_record_batches))
            else:
                batches = iter(pyarrow.ipc.open_stream(file))
            for batch in batches:  # what is compressed is not in memory as a whole
                yield from _in_parts(batch)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not an arrow file: {error}") from None


def _in_parts(table: Any) -> Iterator[Row]:
    step = _at_once(table.num_rows, table.nbytes)
    for start in range(0, table.num_rows, step):
        yield from table.slice(start, step).to_pylist()


def _at_once(rows: int, size: int) -> int:
    """How many rows of a table that has so many in so many bytes."""
    return max(1, min(BATCH, rows * BATCH_BYTES // max(1, size)))


def _python_rows(path: Path, split: str | None) -> Iterator[Row]:
    try:
        load = getattr(own_module(path), "load", None)
        if not callable(load):
            raise DataError(f"{path}: needs a function load(split) that returns rows")
        yield from map(_record, load(split or "train"))
    except SaccadeError:
        raise
    except Exception as error:
        raise DataError(f"{path}: raised {raised_at(error, path)}") from error


FILES: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".json": _json_rows,
    ".jsonl": _jsonl_rows,
    ".json.gz": _json_rows,
    ".jsonl.gz": _jsonl_rows,
    ".csv": _csv_rows,
    ".parquet": _parquet_rows,
    ".arrow": _arrow_rows,
}


# -- folders and hub -------------------------------------------------------------------------------


def _folder_rows(path: Path, address: Address) -> tuple[Iterator[Row], Path]:
    """A `save_to_disk` folder, an image folder with metadata, or data files named by split."""
    if address.config is not None:
        raise DataError(f"{path} is a folder and has no config {address.config!r}; name a subfolder with #DIR")
    folder = path / address.data_dir if address.data_dir else path
    if not folder.is_dir():
        raise DataError(f"folder {folder} does not exist")
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        loaded = _datasets().load_from_disk(str(folder))
        return _table_rows(_one_split(loaded, address.split, str(folder))), folder
    home = folder / address.split if address.split else folder
    for metadata in (home / name for name in METADATA):
        if metadata.is_file():
            return _image_rows(FILES[metadata.suffix](metadata)), home
    files = _split_files(folder, address.split)
    return (row for file in files for row in FILES[_suffix(file)](file)), folder


def _image_rows(rows: Iterator[Row]) -> Iterator[Row]:
    for row in rows:
        if isinstance(row, RowError) or "file_name" not in row:
            yield row
        else:
            yield {"image" if name == "file_name" else name: value for name, value in row.items()}


def _split_files(folder: Path, split: str | None) -> list[Path]:
    files = sorted(
        file
        for place in (folder, folder / "data")
        if place.is_dir()
        for file in place.iterdir()
        if _suffix(file) in FILES
    )
    parts: dict[str, list[Path]] = {}
    for file in files:
        parts.setdefault(re.sub(r"-\d+-of-\d+$", "", _stem(file)), []).append(file)
    if not parts:
        raise DataError(f"folder {folder} holds no data file; readable are {', '.join(FILES)}")
    if split is None and len(parts) == 1:
        return files
    names = [name for name in parts if split and split in re.split(r"[-_.]", name)]
    if len(names) != 1:
        asked = f"split {split!r}" if split else "a split (write PATH@SPLIT)"
        raise DataError(f"folder {folder} needs {asked} that fits exactly one of: {', '.join(sorted(parts))}")
    return parts[names[0]]


def _hub_rows(address: Address, text: str, allow_network: bool) -> Iterator[Row]:
    is_file_name = _suffix(Path(address.path)) in (*FILES, ".py")
    if is_file_name or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", address.path):
        raise DataError(f"data file {text} does not exist")
    if not allow_network:
        raise DataError(f"data file {text} does not exist; a hub id needs data.allow_network=true")
    loaded = _datasets().load_dataset(address.path, address.config, data_dir=address.data_dir)
    return _table_rows(_one_split(loaded, address.split, address.path))


def _one_split(loaded: Any, split: str | None, name: str) -> Any:
    if not isinstance(loaded, dict):  # a single set
        if split is not None:
            raise DataError(f"{name} has no splits, so no {split!r}")
        return loaded
    if split is None and len(loaded) == 1:
        return next(iter(loaded.values()))
    if split not in loaded:
        asked = f"no split {split!r}" if split else "several splits"
        raise DataError(f"{name} has {asked}; write PATH@SPLIT with one of {', '.join(loaded)}")
    return loaded[split]


def _table_rows(dataset: Any) -> Iterator[Row]:
    # The arrow view hands out images as they are stored: nothing is decoded.
    for table in dataset.with_format("arrow").iter(batch_size=BATCH):
        yield from _in_parts(table)


def _datasets() -> Any:
    if importlib.util.find_spec("datasets") is None:
        raise EnvironmentProblem("this data set needs the package datasets: pip install datasets")
    import datasets

    return datasets
