"""Places to write to: whether they take anything, and how much. Knows nothing of what is written.

Asked before the work whose results go there; what fails later all the same is told by `refusal`.

    require_writable(config.run.out, "run.out")
    require_room(folder, 3_200_000, "a checkpoint", "lower save.keep")
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

from saccade.errors import EnvironmentProblem

# What a file system may have against a path, and what helps.
FULL, BARRED = "free some space, or write to a larger disk", "give a path that this user may write"
REFUSALS = dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), FULL) | dict.fromkeys(
    (
        *(errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.EISDIR),
        errno.ENAMETOOLONG,
    ),
    BARRED,
)


def require_writable(path: str | Path, option: str, *, file: bool = False) -> None:
    """Refuse a folder, or a file, that cannot be made or written. Nothing is left behind."""
    whole = Path(path).absolute()
    try:
        if file and whole.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        there = next(place for place in (whole, *whole.parents) if place.exists())
        if file and there == whole:
            if not os.access(whole, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        else:
            with tempfile.TemporaryFile(dir=there):
                pass
    except OSError as error:
        given = f"{option}=" if "." in option else f"{option} "
        raise EnvironmentProblem(
            f"{given}{path} cannot be written: {error.strerror}; use "
            f"{given}{'FILE' if file else 'FOLDER'} where this user may write"
        ) from None


def require_room(folder: Path, needed: int, what: str, remedy: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise EnvironmentProblem(
            f"{folder}: {what} needs up to {size(needed)}, {size(free)} are free; free some "
            f"space, or {remedy}"
        )


def refusal(error: OSError) -> str | None:
    """What a file system said and what helps; None where it was something else."""
    if error.errno not in REFUSALS:
        return None
    where = f"{error.filename}: " if error.filename is not None else ""
    return f"{where}{error.strerror}; {REFUSALS[error.errno]}"


def size(count: float) -> str:
    """Bytes as people read them: 12 B, 4.1 kB, 3.2 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.1f} {unit}"
