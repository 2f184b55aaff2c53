"""Processes that a test ends or stops, and when they have ended or stopped."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def state(stat: Path) -> str:
    """The state of a process or a thread, by its `stat` file in /proc: R, S, T, Z, ...; X: it is gone."""
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie: one killed with its parent stays until the system's first
    process has waited for it, which in some containers never happens.
    """
    return state(Path(f"/proc/{pid}/stat")) in "XZ"


def assert_ends(pid: int, within_s: float, what: str = "process") -> None:
    """Waits until a process has ended, at most `within_s` seconds."""
    end_s = time.monotonic() + within_s
    while not has_ended(pid):
        assert time.monotonic() < end_s, f"{what} {pid} did not end within {within_s} s"
        time.sleep(0.02)


def stop(pid: int, within_s: float = 10.0) -> None:
    """Sends SIGSTOP and waits until all threads stand still: on busy cores they run on for milliseconds."""
    os.kill(pid, signal.SIGSTOP)
    end_s = time.monotonic() + within_s
    while not all(state(stat) in "TXZ" for stat in Path(f"/proc/{pid}/task").glob("*/stat")):
        assert time.monotonic() < end_s, f"process {pid} did not stop within {within_s} s"
        time.sleep(0.001)
