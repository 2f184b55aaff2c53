"""Who uses a device when trainer and hosts share one: decode calls and micro-batches take turns.

A host takes a turn a decode call; the trainer takes one a program of its update, and between two of them lets
the hosts have `decode_calls`. Everybody waits for the result of its own call before giving the turn back, so
the device's queue holds one program and a wait is blamed on its owner.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import jax

from areal_jax.observe.waits import REMEDY, Clock, WaitTimeout, wait_for

POLL_S = 0.005


class Turns(Protocol):
    are_taken: bool
    """Whether anybody waits for `between`."""

    def host(self, clock: Clock) -> AbstractContextManager[Any]: ...
    def trainer(self, clock: Clock) -> AbstractContextManager[Any]: ...
    def between(self, clock: Clock, result: jax.Array) -> None: ...


class OwnDevices:
    """Split placement: nobody waits for anybody."""

    are_taken = False

    def host(self, clock: Clock) -> AbstractContextManager[Any]:
        return nullcontext()

    def trainer(self, clock: Clock) -> AbstractContextManager[Any]:
        return nullcontext()

    def between(self, clock: Clock, result: jax.Array) -> None:
        return None


class OneDevice:
    """Shared placement. `is_decoding` says whether any host has samples to go on with."""

    are_taken = True

    def __init__(self, decode_calls: int, is_decoding: Callable[[], bool], deadline_s: float) -> None:
        self._decode_calls, self._is_decoding, self._deadline_s = decode_calls, is_decoding, deadline_s
        self._changed = threading.Condition()
        self._holder: str | None = None
        self._lines: dict[str, deque[object]] = {"trainer": deque(), "host": deque()}
        self._calls = 0

    @contextmanager
    def host(self, clock: Clock) -> Iterator[None]:
        self._take("host", clock)
        try:
            yield
        finally:
            self._calls += 1
            self._give_back("host")

    @contextmanager
    def trainer(self, clock: Clock) -> Iterator[None]:
        self._take("trainer", clock)
        try:
            yield
        finally:
            self._give_back("trainer")

    def between(self, clock: Clock, result: jax.Array) -> None:
        """Inside the trainer's turn: finish `result`, then let the hosts have their decode calls."""
        result.block_until_ready()
        goal = self._calls + self._decode_calls
        self._give_back("trainer")
        with clock.doing(f"wait: {self._decode_calls} decode calls"), self._changed:
            end_s = time.monotonic() + self._deadline_s
            while self._calls < goal and self._is_decoding():
                self._changed.wait(timeout=POLL_S)  # a host that runs out of samples gives no signal
                if time.monotonic() > end_s:
                    raise WaitTimeout(
                        f"the trainer waited {self._deadline_s:g} s for {goal - self._calls} decode calls of "
                        f"the hosts, which have work; {REMEDY}"
                    )
        self._take("trainer", clock)

    def _take(self, who: str, clock: Clock) -> None:
        """The trainer before any host, hosts in the order in which they came: nobody starves."""
        line, ticket = self._lines[who], object()

        def is_mine() -> bool:
            is_first = line[0] is ticket and (who == "trainer" or not self._lines["trainer"])
            return self._holder is None and is_first

        with self._changed:
            line.append(ticket)
            try:
                if not is_mine():
                    wait_for(
                        self._changed,
                        is_mine,
                        who=f"the {who}",
                        what=f"its turn on the device, which the {self._holder or 'trainer'} has",
                        deadline_s=self._deadline_s,
                        clock=clock,
                    )
                self._holder = who
            finally:
                line.remove(ticket)
                self._changed.notify_all()

    def _give_back(self, who: str) -> None:
        """Nothing where `who` gave it back already, and failed to get it again."""
        with self._changed:
            if self._holder != who:
                return
            self._holder = None
            self._changed.notify_all()
