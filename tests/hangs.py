"""Calls and conditions that take for ever when the code is wrong."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

HANG_S = 300
"""Longer than any call takes on a slow and busy machine: it ends a test that hangs, and times nothing."""


def ends(call: Callable[[], T], within_s: float = HANG_S) -> T:
    """Returns what `call()` returns, or raises what it raises; fails if it still runs after `within_s`.

    The call runs in a thread of its own, which then stays behind.
    """
    ended: queue.SimpleQueue[tuple[bool, object]] = queue.SimpleQueue()

    def run() -> None:
        try:
            ended.put((True, call()))
        except BaseException as error:  # noqa: BLE001 - raised in the test's thread
            ended.put((False, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        is_well, found = ended.get(timeout=within_s)
    except queue.Empty:
        raise AssertionError(f"the call still runs after {within_s:g} s") from None
    if isinstance(found, BaseException) and not is_well:
        raise found
    return found  # type: ignore[return-value]


def wait_for(holds: Callable[[], bool], within_s: float = HANG_S) -> None:
    """Returns once `holds()`; fails if it does not after `within_s`."""
    end_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end_s, f"not within {within_s:g} s"
        time.sleep(0.01)
