"""Errors of files for people: what is wrong, with the file, the space left and the remedy."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from areal_jax.types import ArealError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PATHS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)
"""Errors of a path that the user gave, or of its permissions."""


class DiskFullError(ArealError):
    """A file could not be written, because its disk is full or a quota or limit is reached."""


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns the error of a full disk in the `with` block, which writes to `path`, into a DiskFullError."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise disk_full(path, error.strerror) from error


@contextmanager
def unless_full() -> Iterator[None]:
    """Passes over the error of a full disk in the `with` block, which writes what is also shown elsewhere."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise


def disk_full(path: str | os.PathLike[str], why: str | None) -> DiskFullError:
    """Returns the error of the file `path`, which could not be written; `why`: what the system said."""
    return DiskFullError(
        f"{path} could not be written ({why}): {space_left(path)}. Free some space there, then repeat the "
        "command; a run goes on with `areal-jax resume RUN` or by launching it again, and loses nothing that "
        "it has recorded"
    )


def require_space(path: str | os.PathLike[str], size: int) -> None:
    """Raises DiskFullError if the disk of `path` has less than `size` bytes left."""
    disk = shutil.disk_usage(_folder_of(path))
    if disk.free < size and disk.total:  # some network file systems say 0 of both
        raise disk_full(path, f"it takes {size / 1e6:,.1f} MB")


def space_left(path: str | os.PathLike[str]) -> str:
    """Returns how much space is left on the disk of `path`, as in "0.2 MB are free in /shared/runs"."""
    there = _folder_of(path)
    return f"{shutil.disk_usage(there).free / 1e6:,.1f} MB are free in {there}"


def _folder_of(path: str | os.PathLike[str]) -> Path:
    return next(folder for folder in Path(path).absolute().parents if folder.is_dir())


def is_full(error: BaseException) -> bool:
    return isinstance(error, DiskFullError) or (isinstance(error, OSError) and error.errno in FULL)


def first_error(error: BaseException) -> BaseException:
    """Returns the error that came first: once the disk is full, closing the other files fails, too."""
    first = error
    while is_full(error):
        # A DiskFullError knows the file, and the error that it explains does not.
        if isinstance(error, DiskFullError) or not isinstance(first, DiskFullError):
            first = error
        earlier = (error.__cause__ or error).__context__
        if earlier is None:
            return first
        error = earlier
    return error


def explained(error: BaseException) -> ArealError | None:
    """Returns the error to show without a traceback for an error that ends a command; None: there is none."""
    first = first_error(error)
    if isinstance(first, OSError) and is_full(first):
        return disk_full(first.filename or _output(), first.strerror)
    if isinstance(first, OSError) and first.errno in PATHS and first.filename is not None:
        return ArealError(
            f"{first.filename}: {first.strerror}; give another path, or correct its permissions"
        )
    return first if isinstance(first, ArealError) else None


def _output() -> str:
    """Returns the file of standard output: what is printed is all that is written without a file's name."""
    return os.path.realpath("/proc/self/fd/1")
