"""Tables as streams of rows: CSV, parquet, arrow.

Images come out as they are stored: nothing is decoded, and never a whole table is in memory.

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

BATCH = 256  # rows of a table that are in memory at once, or as many as BATCH_BYTES hold
BATCH_BYTES = 8 << 20


def csv_rows(path: Path) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # an image as base64 is longer than the default
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            # A comma, unless only another sign cuts the header: spreadsheets write what their country does.
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
        # Reading ahead would hold the whole file, and reading without a buffer a whole row group.
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
            for batch in batches:  # what is compressed is not in memory as a whole
                yield from in_parts(batch)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not an arrow file: {error}") from None


def in_parts(table: Any) -> Iterator[Row]:
    step = _at_once(table.num_rows, table.nbytes)
    for start in range(0, table.num_rows, step):
        yield from table.slice(start, step).to_pylist()


def _at_once(rows: int, size: int) -> int:
    """How many rows of a table that has so many in so many bytes."""
    return max(1, min(BATCH, rows * BATCH_BYTES // max(1, size)))
