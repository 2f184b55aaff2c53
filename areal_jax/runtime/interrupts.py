"""Ctrl-C that cannot get lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def kept_interrupts() -> Iterator[Callable[[], bool]]:
    """Whether an interrupt came, for a loop to ask; it still raises where it arrives.

    Python drops what is raised inside a finaliser or a collector's callback, and jax has one of those: an
    interrupt that arrives there would be gone. Handlers that are not Python's own stay as they are, as do all
    of them outside the main thread.
    """
    came: list[int] = []
    former: dict[int, Any] = {}

    def note(number: int, frame: Any) -> None:
        came.append(number)
        former[number](number, frame)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if callable(handler := signal.getsignal(number)):
                former[number] = handler
                signal.signal(number, note)
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
