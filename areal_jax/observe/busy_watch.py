"""Reports where a thread is that works on one thing for long, such as in users' code that blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from areal_jax.observe.threads import line_of

NOTED_S = 5.0
"""A piece of work that takes this many seconds is reported, and again after twice as many, and so on."""

TICK_S = 1.0


class BusyWatch:
    """Watches one thread, from another one."""

    def __init__(self, what: str, note: Callable[[str], None]) -> None:
        """`what`: begins the lines that `note` gets, such as "the control plane"."""
        self._what, self._note = what, note
        self._piece: tuple[threading.Thread] | None = None
        """The watched thread, in a tuple of its own for each piece of work; None between two of them."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="busy-watch", daemon=True)
        self._thread.start()

    @contextmanager
    def piece(self) -> Iterator[None]:
        """The calling thread works on one thing in this block."""
        self._piece = (threading.current_thread(),)
        try:
            yield
        finally:
            self._piece = None

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        seen, spent_s, noted_s = None, 0.0, NOTED_S
        # In ticks of this thread: while the process is stopped, no time is counted.
        while not self._closed.wait(TICK_S):
            piece = self._piece
            if piece is None or piece is not seen:
                seen, spent_s, noted_s = piece, 0.0, NOTED_S
                continue
            spent_s += TICK_S
            if spent_s >= noted_s:
                noted_s *= 2
                self._note(
                    f"{self._what} has been busy for {spent_s:.0f} s, and all else waits for it; it is at "
                    f"{line_of(piece[0])}. If that is code of a task or a tokenizer, make it faster, or give "
                    "it a time limit"
                )
