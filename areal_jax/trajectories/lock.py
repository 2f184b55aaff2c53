"""One writer a journal: an OS lock on a file beside it, which the kernel drops however its holder dies."""

from __future__ import annotations

import fcntl
import os
import re
import socket
from pathlib import Path


class WriterLock:
    """The right to write `path`. The lock file stays behind; only the lock on it counts."""

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(path.name + ".lock")
        self._file: int | None = None

    def acquire(self) -> str | None:
        """None when the lock is ours now, else a description of who has it."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(file, 200).decode(errors="replace").strip()
            os.close(file)
            return holder or "another process"
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        self._file = file
        return None

    def release(self) -> None:
        """Let the next writer in. Releasing twice does nothing."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def holder(path: Path) -> str | None:
    """Who writes `path`, as far as its lock file says: nobody, or a process that lives; takes no lock.

    A process on another host counts as living: it cannot be asked.
    """
    try:
        said = path.with_name(path.name + ".lock").read_text(errors="replace").strip()
    except OSError:
        return None
    match = re.fullmatch(r"process (\d+) on (.+)", said)
    if match is None:
        return None
    if match[2] == socket.gethostname():
        try:
            os.kill(int(match[1]), 0)
        except ProcessLookupError:
            return None
        except PermissionError:  # it lives, and is another user's
            pass
    return said
