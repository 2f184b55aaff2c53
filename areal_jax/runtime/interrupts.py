"""Ctrl-C and SIGTERM as messages, so that neither of them, nor an event being handled, is lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_sent(send: Callable[[BaseException], None]) -> Iterator[None]:
    """In this block, `send` the exception of the first SIGINT or SIGTERM instead of raising it.

    An exception that a signal raises between two statements would lose the events that were taken from an
    inbox and not yet recorded; raised inside a finaliser or a garbage collector's callback, as jax registers
    one, it would be ignored by Python. `send` may run between any two statements of the main thread, also in
    itself: `queue.SimpleQueue.put` allows that, `queue.Queue.put` does not. A second signal raises at once.
    Only signals with a handler in Python are sent; outside the main thread, none is.
    """
    former: dict[int, Any] = {}
    is_first = True

    def handle(number: int, frame: Any) -> None:
        nonlocal is_first
        if not is_first:
            former[number](number, frame)
            return
        is_first = False
        try:
            former[number](number, frame)
        except BaseException as error:  # noqa: BLE001 - whatever the former handler raises, sent on
            send(error)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if callable(handler := signal.getsignal(number)):
                former[number] = handler
                signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
