"""The clock of a simulated run: calls at virtual times, by processes that can be paused."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

DRIVER, TRAINER, REWARD = "driver", "trainer", "reward"
"""The processes that can be paused, in addition to the hosts."""


class VirtualClock:
    """Makes scheduled calls in the order of their times; those of a paused process wait until it goes on."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._pending: list[tuple[float, int, str, Callable[..., object], tuple[Any, ...]]] = []
        self._calls = 0
        self._paused: dict[str, float] = {}
        """Process -> time at which its pause ends."""

    def later(self, seconds: float, call: Callable[..., object], *arguments: Any, of: str = "") -> None:
        """Schedule a call, by the process `of`; "": by none that can be paused."""
        self._calls += 1  # calls at equal times run in the order in which they were scheduled
        heapq.heappush(self._pending, (self.now_s + seconds, self._calls, of, call, arguments))

    def with_driver(self, process: str, call: Callable[..., object], *arguments: Any) -> None:
        """Make a call for which a process and the driver exchange messages, once neither is paused."""
        for paused in (process, DRIVER):
            if self.is_paused(paused):
                return self.later(0.0, self.with_driver, process, call, *arguments, of=paused)
        call(*arguments)

    def advance(self) -> bool:
        """Make the next call, or put it off if its process is paused; return False if there is none."""
        if not self._pending:
            return False
        self.now_s, number, of, call, arguments = heapq.heappop(self._pending)
        if self.is_paused(of):
            heapq.heappush(self._pending, (self._paused[of], number, of, call, arguments))
        else:
            call(*arguments)
        return True

    def clear(self) -> None:
        """Forget all scheduled calls and pauses: every process has ended."""
        self._pending.clear()
        self._paused.clear()

    # --- pauses ---------------------------------------------------------------------------------------------

    def is_paused(self, process: str) -> bool:
        return self._paused.get(process, 0.0) > self.now_s

    def pause(self, process: str, down_s: float) -> None:
        """Pause a process for `down_s` seconds, unless it is paused for longer already."""
        self._paused[process] = max(self._paused.get(process, 0.0), self.now_s + down_s)

    def end_pause(self, process: str) -> None:
        """End a pause with its process: what takes the process's place is not paused."""
        self._paused.pop(process, None)
