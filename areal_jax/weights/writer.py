"""A thread that writes versions or checkpoints one after another, off the caller's path."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from areal_jax.weights.store import StagedError

OnFailure = Callable[[BaseException], None]


class Writer:
    """Runs one write at a time in its thread, in order, with at most `waiting` more in its queue. `what`
    names these writes in errors.

    If a write fails, `on_failure` is called at once, in that thread, with the error; the next method call
    raises the same error.
    """

    def __init__(self, what: str, waiting: int = 0, on_failure: OnFailure | None = None) -> None:
        self._what, self._waiting, self._on_failure = what, waiting, on_failure
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=what)
        self._pending: deque[Future[None]] = deque()
        """The writes that have not ended, and those that failed with an error that was not raised yet."""

    def submit(self, write: Callable[[], None], deadline_s: float) -> None:
        """Queue a write, after a wait of up to `deadline_s` seconds for space in the queue.

        Raises the error of an earlier write, and StagedError if there is no space by the deadline.
        """
        self.wait(deadline_s, self._waiting)
        self._pending.append(self._thread.submit(self._run, write))

    def wait(self, deadline_s: float, leave: int = 0) -> None:
        """Wait until at most `leave` writes are pending.

        Raises the error of the first failed write, while later writes continue, and StagedError if too many
        writes are pending after `deadline_s` seconds; they continue too. Ended writes are checked even if no
        wait is needed, so that the next method call raises their error.
        """
        end_s = time.monotonic() + deadline_s
        while self._pending and (len(self._pending) > leave or self._pending[0].done()):
            first = self._pending[0]
            if not wait([first], max(0.0, end_s - time.monotonic())).done:
                raise StagedError(
                    f"{self._what} took longer than {deadline_s:g} s (runtime.deadline_s): check that the "
                    "disk works and has space, or raise the limit if it was only slow"
                )
            self._pending.popleft()
            first.result()

    def close(self, deadline_s: float) -> None:
        self.wait(deadline_s)
        self._thread.shutdown()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            if self._on_failure is not None:
                self._on_failure(error)
            raise
