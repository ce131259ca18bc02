"""Readers of data sets that are folders, `.py` files, or data sets of the package datasets.

Each function takes an address and returns its rows and the folder that relative media paths refer to.

    >>> rows, folder = folder_rows(Address("images", split="train"))
"""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from saccade.data.chats import RowError
from saccade.data.sources import FILES, Address, Row, record, stem_of, suffix_of
from saccade.errors import DataError, EnvironmentProblem, SaccadeError
from saccade.plugins.containers.table_files import BATCH, in_parts
from saccade.user_code import raised_at, user_module

METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
SAVED = ("dataset_dict.json", "state.json")  # a folder written by `save_to_disk` has one of these


def python_rows(address: Address) -> tuple[Iterator[Row], Path]:
    """The rows that the file's function load(split) returns."""
    path = Path(address.path)
    return _loaded(path, address.split or "train"), path.parent


def _loaded(path: Path, split: str) -> Iterator[Row]:
    try:
        load = getattr(user_module(path), "load", None)
        if not callable(load):
            raise DataError(f"{path}: needs a function load(split) that returns rows")
        yield from map(record, load(split))
    except SaccadeError:
        raise
    except Exception as error:
        raise DataError(f"{path}: raised {raised_at(error, path)}") from error


def folder_rows(address: Address) -> tuple[Iterator[Row], Path]:
    """The rows of a `save_to_disk` folder, an image folder with metadata, or data files named by split."""
    path = Path(address.path)
    if address.config is not None:
        raise DataError(f"{path} is a folder and has no config {address.config!r}; name a subfolder with #DIR")
    folder = path / address.data_dir if address.data_dir else path
    if not folder.is_dir():
        raise DataError(f"folder {folder} does not exist")
    if any((folder / name).is_file() for name in SAVED):
        return _set_rows(address, folder), folder
    home = folder / address.split if address.split else folder
    for metadata in (home / name for name in METADATA):
        if metadata.is_file():
            return map(_image_row, FILES[metadata.suffix](metadata)), home
    return (row for file in _split_files(folder, address.split) for row in FILES[suffix_of(file)](file)), folder


def _image_row(row: Row) -> Row:
    if isinstance(row, RowError):
        return row
    return {"image" if name == "file_name" else name: value for name, value in row.items()}


def _split_files(folder: Path, split: str | None) -> list[Path]:
    places = [place for place in (folder, folder / "data") if place.is_dir()]
    files = sorted(file for place in places for file in place.iterdir() if suffix_of(file) in FILES)
    parts: dict[str, list[Path]] = {}
    for file in files:
        parts.setdefault(re.sub(r"-\d+-of-\d+$", "", stem_of(file)), []).append(file)
    if not parts:
        pictures = 'pictures need a metadata.jsonl with rows such as {"file_name": "3/7.png", "question": …}'
        raise DataError(f"folder {folder} holds no data file; readable are {', '.join(FILES)}; {pictures}")
    if split is None and len(parts) == 1:
        return files
    names = [name for name in parts if split and split in re.split(r"[-_.]", name)]
    if len(names) != 1:
        asked = f"split {split!r}" if split else "a split (write PATH@SPLIT)"
        raise DataError(f"folder {folder} needs {asked} that fits exactly one of: {', '.join(sorted(parts))}")
    return parts[names[0]]


def hub_rows(address: Address) -> tuple[Iterator[Row], None]:
    return _set_rows(address, None), None


def _set_rows(address: Address, folder: Path | None) -> Iterator[Row]:
    """The rows of a folder written by `save_to_disk`, or of a data set on the Hugging Face Hub."""
    if importlib.util.find_spec("datasets") is None:
        raise EnvironmentProblem("this data set needs the package datasets: pip install datasets")
    import datasets

    if folder is not None:
        loaded = datasets.load_from_disk(str(folder))
    else:
        loaded = datasets.load_dataset(address.path, address.config, data_dir=address.data_dir)
    for table in _one_split(loaded, address.split, address.path).with_format("arrow").iter(batch_size=BATCH):
        yield from in_parts(table)


def _one_split(loaded: Any, split: str | None, name: str) -> Any:
    if not isinstance(loaded, dict):  # a Dataset, not a DatasetDict
        if split is not None:
            raise DataError(f"{name} has no splits, so no {split!r}")
        return loaded
    if split is None and len(loaded) == 1:
        return next(iter(loaded.values()))
    if split not in loaded:
        asked = f"no split {split!r}" if split else "several splits"
        raise DataError(f"{name} has {asked}; write PATH@SPLIT with one of {', '.join(loaded)}")
    return loaded[split]
