"""Time series as references, and as what an encoder reads: numbers [leads, samples], all finite.

A source is nested lists, an array, or a file by its path or its bytes: NPY [leads, samples], or CSV
with a column for each lead and a line for each sample. Nothing is unpickled. Series are read whole
when they are opened, for one bad number spoils a row. Knows nothing of models.

    >>> open_series([[0.0, 1.0, 0.0], [2.0, 2.0, 2.0]]).width, decode(open_series([1, 2])).shape
    (3, (1, 2))
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from saccade.config import DataConfig
from saccade.images.files import ImageError
from saccade.images.sources import DEFAULT_LIMITS, Encoded, read
from saccade.types import Media

HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
EXPECTED = "a time series is numbers [leads, samples], such as [[0.1, 0.2], [0.0, 0.3]]"


def is_one(value: Any) -> bool:
    """Whether a list is one series, numbers or leads of numbers, and not several of them."""
    for _ in range(2):
        value = value[0] if isinstance(value, list | tuple) and value else value
    return isinstance(value, int | float) or value in ([], ())


def open_series(
    source: Any, *, base: Path | None = None, limits: DataConfig = DEFAULT_LIMITS
) -> Media:
    """A reference to the series in `source`; of a long one its beginning, if that is allowed."""
    name, data, path = _encoded(source, base, limits)
    leads, samples = _values(data, name).shape
    if samples > limits.max_series and limits.long_series == "reject":
        raise ImageError(
            f"{name}: {samples} samples, data.max_series is {limits.max_series}; "
            "data.long_series=truncate keeps the first ones"
        )
    kept = min(samples, limits.max_series)
    content = hashlib.sha256(data).hexdigest()
    return Media(
        kind="series",
        hash=hashlib.sha256(f"{content} {kept}".encode()).hexdigest(),
        width=kept,
        height=leads,
        path=path,
        data=data if path is None else None,
    )


def decode(media: Media) -> np.ndarray:
    """float32 [leads, samples]."""
    name = media.path or f"series {media.hash[:12]}"
    data = media.data
    if media.path is not None:
        data = read(Path(media.path), None, DEFAULT_LIMITS).data
    assert data is not None
    values = _values(data, name)
    if len(values) != media.height or values.shape[1] < media.width:
        raise ImageError(f"{name}: is {list(values.shape)} now, so it changed after it was read")
    return np.ascontiguousarray(values[:, : media.width])


def _encoded(source: Any, base: Path | None, limits: DataConfig) -> Encoded:
    if isinstance(source, Mapping) and source.get("array") is not None:
        source = source["array"]
    if not isinstance(source, list | tuple | np.ndarray):
        return read(source, base, limits)
    try:
        with np.errstate(over="ignore"):  # what float32 cannot hold is found later
            values = np.asarray(source, np.float32)
    except (ValueError, TypeError) as error:
        why = "leads of different lengths" if "inhomogeneous" in str(error) else str(error)
        raise ImageError(f"series: {why}; {EXPECTED}") from None
    file = io.BytesIO()
    np.save(file, values, allow_pickle=False)
    return Encoded("series", file.getvalue())


def _values(data: bytes, name: str) -> np.ndarray:
    """float32 [leads, samples] of a whole file."""
    try:
        made = _npy(data) if data.startswith(npy.MAGIC_PREFIX) else _csv(data)
    except ValueError as error:
        raise ImageError(f"{name}: {error}; {EXPECTED}") from None
    values = made[None] if made.ndim == 1 else made
    if values.ndim != 2 or not values.size:
        what = "empty" if not values.size else f"an array {list(values.shape)}"
        raise ImageError(f"{name}: {what}; {EXPECTED}")
    with np.errstate(over="ignore"):
        values = values.astype(np.float32)
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        lead, sample = bad[0].tolist()
        raise ImageError(
            f"{name}: lead {lead} is {values[lead, sample]} at sample {sample}, and {len(bad)} "
            "numbers are not finite; cut such samples away or fill them, such as with 0"
        )
    return values


def _npy(data: bytes) -> np.ndarray:
    """By its header: memory is taken for what is there, whatever a header promises."""
    file = io.BytesIO(data)
    version = npy.read_magic(file)
    if version not in HEADERS:
        raise ValueError(f"NPY version {version} cannot be read")
    shape, columns_first, kind = HEADERS[version](file)
    if kind.kind not in "fiu":
        raise ValueError(f"an NPY file of {kind}, which are no numbers")
    values = np.frombuffer(data, kind, offset=file.tell())
    return values.reshape(shape, order="F" if columns_first else "C")


def _csv(data: bytes) -> np.ndarray:
    lines = data.decode().strip().splitlines()
    if lines and not all(map(_is_number, lines[0].split(","))):
        lines = lines[1:]  # the names of the leads
    return np.loadtxt(lines, delimiter=",", ndmin=2, comments=None).T if lines else np.zeros(0)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
