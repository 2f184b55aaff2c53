"""One writer per journal: an OS lock on a file beside it, released by the kernel if the writer dies."""

from __future__ import annotations

import fcntl
import os
import re
import socket
from pathlib import Path

from areal_jax.file_errors import writing

_HOLDER = r"process (\d+) on (.+)"


class WriterLock:
    """The right to write `path`: of one process alone, or shared by those that agree in another way.

    The lock file stays on disk after `release`; its existence means nothing, only the OS lock on it counts.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(path.name + ".lock")
        self._file: int | None = None

    def acquire(self, is_shared: bool = False) -> str | None:
        """Takes the lock and returns None; if another process holds the lock, returns that process.

        A shared lock can be held by several processes, and by none beside an exclusive one. The process is
        returned as "process P on HOST", or as "another process" if its id is not known.
        """
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(file, 200).decode(errors="replace").strip()
            os.close(file)
            return holder or "another process"
        # The holder's name is for messages only: the kernel's lock decides.
        with writing(self._path):
            os.ftruncate(file, 0)
            os.write(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        self._file = file
        return None

    def release(self) -> None:
        """Releases the lock for the next writer. Releasing twice does nothing."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def holder(path: Path) -> str | None:
    """Returns the process that took the lock of `path` last, as "process P on HOST"; takes no lock itself.

    Returns None if the lock file is missing or names no process, or if that process is known to be dead.
    """
    try:
        text = path.with_name(path.name + ".lock").read_text(errors="replace").strip()
    except OSError:
        return None
    return text if re.fullmatch(_HOLDER, text) and not is_gone(text) else None


def is_gone(holder: str) -> bool:
    """Whether the process in `holder`, "process P on HOST", is known to be dead; False for another host."""
    match = re.fullmatch(_HOLDER, holder)
    if match is None or match[2] != socket.gethostname():
        return False
    try:
        os.kill(int(match[1]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it is alive and belongs to another user
        pass
    return False
