"""Makes sure that no Ctrl-C or SIGTERM is lost, at whatever point of the program it arrives."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def kept_interrupts() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether SIGINT or SIGTERM has arrived since the block began.

    The signal's former handler runs as well. Python ignores an exception raised inside a finaliser or a
    garbage collector's callback, and jax registers such a callback: an interrupt that arrives there would be
    lost. Only signals with a handler in Python are noticed; outside the main thread, none is noticed.
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
