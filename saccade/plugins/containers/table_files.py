"""Reads tables as streams of rows: CSV, parquet, arrow.

Images stay encoded, and a table is never in memory as a whole.

    >>> next(csv_rows(Path("rows.csv")))
    {'question': '1+1?', 'answer': '2'}
"""

import csv
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from saccade.data.chats import RowError
from saccade.data.sources import Row
from saccade.errors import DataError

BATCH = 256  # most rows in memory at once
BATCH_BYTES = 8 << 20  # most bytes of rows in memory at once (at least one row)


def csv_rows(path: Path) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # an image as base64 is longer than the default
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            # Comma first; some locales' spreadsheets write semicolons or tabs.
            cells = {sign: next(csv.reader([header], delimiter=sign), []) for sign in (",", ";", "\t")}
            separator = next((sign for sign, found in cells.items() if len(found) > 1), ",")
            for row in csv.DictReader(chain([header], file), delimiter=separator):
                if None in row or None in row.values():
                    yield RowError("the number of cells differs from the header")
                else:
                    yield {name: value if value != "" else None for name, value in row.items()}
    except UnicodeDecodeError as error:
        hint = "save it as CSV UTF-8, or where it is latin-1: iconv -f latin1 -t utf-8 OLD.csv > NEW.csv"
        raise DataError(f"{path}: not UTF-8 (byte {error.object[error.start]:#04x}); {hint}") from None
    except (ValueError, csv.Error) as error:
        raise DataError(f"{path}: not a CSV file: {error}") from None


def parquet_rows(path: Path) -> Iterator[Row]:
    from pyarrow import ArrowException, parquet

    try:
        # With pre_buffer the whole file would be in memory, without buffer_size a whole row group.
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            facts = file.metadata
            size = sum(facts.row_group(n).total_byte_size for n in range(facts.num_row_groups))
            for batch in file.iter_batches(batch_size=_at_once(facts.num_rows, size)):
                yield from batch.to_pylist()
    except (ArrowException, OSError) as error:
        raise DataError(f"{path}: not a parquet file: {error}") from None


def arrow_rows(path: Path) -> Iterator[Row]:
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
            for batch in batches:  # lazily, as compressed batches are decompressed into memory
                yield from in_parts(batch)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not an arrow file: {error}") from None


def in_parts(table: Any) -> Iterator[Row]:
    step = _at_once(table.num_rows, table.nbytes)
    for start in range(0, table.num_rows, step):
        yield from table.slice(start, step).to_pylist()


def _at_once(rows: int, size: int) -> int:
    """Number of rows to read at once from a table with `rows` rows in `size` bytes."""
    return max(1, min(BATCH, rows * BATCH_BYTES // max(1, size)))
