"""Measurements that fail as one on a GPU can; the processes of `bench gpu` load them by name."""

from __future__ import annotations

import atexit
import os
import signal
import time
from pathlib import Path
from typing import Any


def succeeds(*, value: int = 1) -> dict[str, Any]:
    return {"value": value, "pid": os.getpid(), "flag": os.environ.get("XLA_AS_TESTED")}


def raises() -> dict[str, Any]:
    raise ValueError("a first line\nand more")


def crashes() -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def hangs() -> dict[str, Any]:
    time.sleep(1000)
    return {}


def hangs_in_a_child(*, file: str) -> dict[str, Any]:
    if os.fork() == 0:
        Path(file).write_text(str(os.getpid()))
        time.sleep(1000)
    time.sleep(1000)
    return {}


def needs_memory(*, slots: int, most: int = 4) -> dict[str, Any]:
    if slots > most:
        raise RuntimeError(f"RESOURCE_EXHAUSTED: Out of memory while trying to allocate {slots} slots")
    return {"slots": slots}


def is_a_wrong_kernel() -> dict[str, Any]:
    return {"problem": "its output differs", "gap": 0.5, "pid": os.getpid()}


def is_refused() -> dict[str, Any]:
    return {"problem": "ValueError: no such device", "gap": None, "pid": os.getpid()}


def fails_at_its_end() -> dict[str, Any]:
    """Its process ends with status 3, after all of its measurements."""
    atexit.register(os._exit, 3)
    return {"pid": os.getpid()}
