"""Processes that a test ends or stops, and when they have ended or stopped."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.hangs import HANG_S

PROC = Path("/proc/self/stat")


def state(stat: Path) -> str:
    """The state of a process or a thread, by its `stat` file in /proc: R, S, T, Z, ...; X: it is gone."""
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        require_proc()
        return "X"


def require_proc() -> None:
    """Fails where there is no /proc: no process is found there, and so every process would count as gone."""
    assert PROC.is_file(), f"{PROC} does not exist; tests that look for processes need Linux's /proc"


def is_gone(pid: int) -> bool:
    """Whether a process has ended, and its parent has waited for it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie: one killed with its parent stays until the system's first
    process has waited for it, which in some containers never happens.
    """
    return is_gone(pid) or state(Path(f"/proc/{pid}/stat")) in "XZ"


def assert_ends(pid: int, what: str = "process", within_s: float = HANG_S) -> None:
    """Waits until a process has ended, at most `within_s` seconds."""
    end_s = time.monotonic() + within_s
    while not has_ended(pid):
        assert time.monotonic() < end_s, f"{what} {pid} did not end within {within_s} s"
        time.sleep(0.02)


def stop(pid: int, within_s: float = HANG_S) -> None:
    """Sends SIGSTOP and waits until all threads stand still: on busy cores they run on for milliseconds."""
    os.kill(pid, signal.SIGSTOP)
    end_s = time.monotonic() + within_s
    while not all(state(stat) in "TXZ" for stat in Path(f"/proc/{pid}/task").glob("*/stat")):
        assert time.monotonic() < end_s, f"process {pid} did not stop within {within_s} s"
        time.sleep(0.001)
