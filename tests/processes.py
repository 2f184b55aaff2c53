"""Whether processes that a test did not start itself have ended."""

from __future__ import annotations

import time
from pathlib import Path


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie: one killed with its parent stays until the system's first
    process has waited for it, which in some containers never happens.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def assert_ends(pid: int, within_s: float, what: str = "process") -> None:
    """Waits until a process has ended, at most `within_s` seconds."""
    end_s = time.monotonic() + within_s
    while not has_ended(pid):
        assert time.monotonic() < end_s, f"{what} {pid} did not end within {within_s} s"
        time.sleep(0.02)
