"""Time series as references, and decoded to arrays [leads, samples] of finite numbers.

A source is nested lists, an array, or a file by its path or its bytes: NPY [leads, samples], or CSV
with a column for each lead and a line for each sample. Nothing is unpickled. Opening a series reads
all of it, to find numbers that are not finite. Knows nothing of models.

    >>> open_series([[0.0, 1.0, 0.0], [2.0, 2.0, 2.0]]).width, decode(open_series([1, 2])).shape
    (3, (1, 2))
"""

import io
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from saccade.config import DataConfig
from saccade.media.blob_file import encoded
from saccade.media.image_files import ImageError
from saccade.media.kinds import MediaKind
from saccade.media.media_files import DEFAULT_LIMITS, Encoded, make_media, read
from saccade.types import Media

# In Python 3.11, parsing literals (of an NPY header) is not thread-safe: it occasionally raises SystemError.
PARSING = threading.Lock()
FILES = (str, bytes, bytearray, Path, Mapping)
EXPECTED = "a time series is numbers [leads, samples], such as [[0.1, 0.2], [0.0, 0.3]]"


def is_one(value: Any) -> bool:
    """Whether a list is one series (numbers, or leads of numbers) rather than several. Leads of strings
    also count as one, which is refused when it is opened.
    """
    depth = 0
    while depth < 2 and isinstance(value, list | tuple) and value:
        value, depth = value[0], depth + 1
    leaf = isinstance(value, str) or value is None
    return isinstance(value, int | float) or value in ([], ()) or (leaf and depth == 2)


def open_series(source: Any, *, base: Path | None = None, limits: DataConfig = DEFAULT_LIMITS) -> Media:
    """A reference to the series in `source`; a long one is truncated or refused (data.long_series)."""
    file = _encoded(source, base, limits)
    leads, samples = _values(file.data, file.name).shape
    if samples > limits.max_series and limits.long_series == "reject":
        what = f"{samples} samples, data.max_series is {limits.max_series}"
        raise ImageError(f"{file.name}: {what}; data.long_series=truncate keeps the first ones")
    return make_media(file, "series", width=min(samples, limits.max_series), height=leads)


def decode(media: Media) -> np.ndarray:
    """float32 [leads, samples]."""
    values = _values(encoded(media), media.path or f"series {media.hash[:12]}")
    return np.ascontiguousarray(values[:, : media.width])


def _encoded(source: Any, base: Path | None, limits: DataConfig) -> Encoded:
    if isinstance(source, Mapping) and source.get("array") is not None:
        source = source["array"]
    if isinstance(source, FILES):
        return read(source, base, limits)
    if not isinstance(source, list | tuple | np.ndarray):
        raise ImageError(f"a time series cannot be made from {type(source).__name__}; {EXPECTED}")
    try:
        if np.asarray(source).dtype.kind in "SU":
            raise ValueError("text instead of numbers")
        with np.errstate(over="ignore"):  # overflow becomes infinite, which `_values` refuses
            values = np.asarray(source, np.float32)
    except (ValueError, TypeError) as error:
        why = "leads of different lengths" if "inhomogeneous" in str(error) else str(error)
        raise ImageError(f"series: {why}; {EXPECTED}") from None
    file = io.BytesIO()
    np.save(file, values, allow_pickle=False)
    return Encoded("series", file.getvalue())


def _values(data: bytes, name: str) -> np.ndarray:
    """float32 [leads, samples] of a whole file, checked to be finite."""
    try:
        made = _npy(data) if data.startswith(npy.MAGIC_PREFIX) else _csv(data)
        values = made[None] if made.ndim == 1 else made
        if values.ndim != 2 or not values.size:
            raise ValueError("empty" if not values.size else f"an array {list(values.shape)}")
    except UnicodeDecodeError:
        raise ImageError(f"{name}: neither NPY nor CSV, which is text; {EXPECTED}") from None
    except (ValueError, MemoryError) as error:  # a header may declare more than fits into memory
        raise ImageError(f"{name}: {error}; {EXPECTED}") from None
    with np.errstate(over="ignore"):
        values = values.astype(np.float32)
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        lead, sample = bad[0].tolist()
        what = f"lead {lead} is {values[lead, sample]} at sample {sample}, and {len(bad)} numbers are not finite"
        raise ImageError(f"{name}: {what}; cut such samples away or fill them, such as with 0")
    return values


def _npy(data: bytes) -> np.ndarray:
    with PARSING:
        values = np.load(io.BytesIO(data), allow_pickle=False)
    if values.dtype.kind not in "fiu":
        raise ValueError(f"an NPY file of {values.dtype}, which are no numbers")
    return values


def _csv(data: bytes) -> np.ndarray:
    lines = [line for line in data.decode("utf-8-sig").splitlines() if line.strip()]
    if lines and not any(_is_number(cell) or not cell.strip() for cell in lines[0].split(",")):
        del lines[0]  # the names of the leads
    return np.loadtxt(lines, delimiter=",", ndmin=2, comments=None).T if lines else np.zeros(0)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


KIND = MediaKind(
    article="a time series",
    open=open_series,
    decode=decode,
    columns=("series", "time_series", "time-series"),
    keys=("series", "time_series", "time-series"),
    is_one=is_one,
)
