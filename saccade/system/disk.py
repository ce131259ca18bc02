"""Checks of folders to write to: whether they are writable, and how much space is free.

Called before the work whose results go there; `refusal` explains errors that happen later anyway.

    require_writable(config.run.out, "run.out")
    if free_disk_bytes(folder) < needed: print(f"{needed} bytes do not fit")
"""

import errno
import os
import re
import shutil
import tempfile
from pathlib import Path

from saccade.errors import ConfigError, EnvironmentProblem

# Errors of a file system when a path is read or written, and what helps.
FULL = "free some space, or write to a larger disk"
REFUSALS = dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), FULL) | {
    errno.EACCES: "change its permissions, or give another path",
    errno.EPERM: "change its permissions, or give another path",
    errno.EROFS: "write to another disk",
    errno.EISDIR: "give a file",
    errno.ENOTDIR: "give a path that goes through folders only",
    errno.EEXIST: "give another path",
    errno.ENAMETOOLONG: "give a shorter path",
}


def require_writable(path: str | Path, option: str, *, file: bool = False) -> None:
    """Refuse a folder, or a file, that cannot be made or written. Nothing is left behind."""
    if found := unwritable(path, option, file=file):
        raise EnvironmentProblem("; ".join(found))


def require_new(path: Path, option: str, *, file: bool = True, inside: str = "", other: str = "name") -> None:
    """As `require_writable`; refuses also what exists: commands that make data or configs overwrite nothing. With
    `inside`, the path is a folder, and a file of that name in it is what must not exist. `other`: what else to give.
    """
    if inside and path.suffix == Path(inside).suffix and not path.exists():
        raise ConfigError(f"{option} {path} is a folder, which gets a {inside}; try {path.with_suffix('')}")
    if (new := path / inside).exists():
        raise ConfigError(f"{option} {new} exists and is not overwritten; give another {other}")
    require_writable(path, option, file=file and not inside)


def unwritable(path: str | Path, option: str, *, file: bool = False) -> tuple[str, str] | None:
    """Why the path cannot be written, and what to do; None if it can."""
    whole = Path(path).absolute()
    try:
        if file and whole.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        there = nearest(whole)
        if file and there == whole:
            if not os.access(whole, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        else:
            with tempfile.TemporaryFile(dir=there):
                pass
    except OSError as error:
        given = f"{option}=" if "." in option else f"{option} "
        kind = "FILE" if file else "FOLDER"
        reason = f"{given}{path} cannot be written: {error.strerror}"
        return reason, f"use {given}{kind} where this user may write"
    return None


def free_disk_bytes(folder: str | Path) -> int:
    """Free bytes on the disk of a folder that exists or will be made."""
    return shutil.disk_usage(nearest(Path(folder).absolute())).free


def nearest(path: Path) -> Path:
    """The path itself, or its nearest parent that exists."""
    return next(place for place in (path, *path.parents) if place.exists())


def refusal(error: BaseException) -> str | None:
    """The file system's error and what helps; None for other errors. Libraries in Rust, such as safetensors, give the
    error number in their message only.
    """
    named = re.search(r"\(os error (\d+)\)", str(error))
    number = error.errno if isinstance(error, OSError) else int(named[1]) if named else None
    if number is None or number not in REFUSALS:
        return None
    where = getattr(error, "filename", None)
    return f"{where}: " * (where is not None) + f"{os.strerror(number)}; {REFUSALS[number]}"
