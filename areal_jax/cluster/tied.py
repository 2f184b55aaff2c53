"""Child processes that end with their parent."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# Runs before exec: requests SIGTERM for the death of the parent, and exits if the parent is dead already.
_BEFORE = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def tied(words: Sequence[str]) -> list[str]:
    """Returns a command that runs the command `words` as a child process, which ends when this process ends.

    On Linux the kernel sends SIGTERM to the child when the thread that started the child ends. Other systems
    do not: there the child continues.
    """
    return [sys.executable, "-I", "-S", "-c", _BEFORE, str(os.getpid()), *words]
