"""A thread that writes versions or checkpoints one after another, while the caller continues."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from areal_jax.weights.errors import StagedError

OnFailure = Callable[[BaseException], None]


class Writer:
    """Runs one write at a time in a thread, in order; at most `waiting` further writes wait in a queue.

    `what`: what the thread does, for error messages. If a write fails, the thread calls `on_failure` with
    the error at once, and the next method call raises the same error.
    """

    def __init__(self, what: str, waiting: int = 0, on_failure: OnFailure | None = None) -> None:
        self._what, self._waiting, self._on_failure = what, waiting, on_failure
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=what)
        self._pending: deque[Future[None]] = deque()
        """The writes that have not ended, and ended writes with an error that was not raised yet."""

    def submit(self, write: Callable[[], None], deadline_s: float) -> None:
        """Queues a write; waits at most `deadline_s` seconds for space in the queue.

        Raises the error of an earlier failed write, and StagedError if the queue is still full at the
        deadline.
        """
        self.wait(deadline_s, self._waiting)
        self._pending.append(self._thread.submit(self._run, write))

    def wait(self, deadline_s: float, leave: int = 0) -> None:
        """Waits until at most `leave` writes are running or queued.

        Raises the error of the first write that failed, even if no wait is needed. Raises StagedError if more
        than `leave` writes remain after `deadline_s` seconds. In both cases the remaining writes continue.
        """
        end_s = time.monotonic() + deadline_s
        while self._pending and (len(self._pending) > leave or self._pending[0].done()):
            first = self._pending[0]
            if not wait([first], max(0.0, end_s - time.monotonic())).done:
                raise StagedError(
                    f"{self._what} took longer than {deadline_s:g} s (runtime.deadline_s): check that the "
                    "disk works and has space; if it is only slow, raise runtime.deadline_s"
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
