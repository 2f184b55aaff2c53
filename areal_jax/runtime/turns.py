"""The order in which trainer and hosts use a device that they share: by turns.

A host's turn is one decode call. The trainer's turn is one update, interrupted after each micro-batch for
`decode_calls` decode calls of the hosts. A thread ends its turn only when the device has finished the
thread's program. So the device's queue has one program at a time, and a thread's measured time is its own.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax

from areal_jax.observe.waits import REMEDY, Clock, WaitTimeout

POLL_S = 0.005


class OneDevice:
    """Shared placement: trainer and hosts use one device, one thread at a time.

    `decode_calls`: number of decode calls that hosts get after each micro-batch of an update;
    `is_decoding()`: whether a host has samples to decode; `deadline_s`: seconds after which a wait raises
    WaitTimeout.
    """

    def __init__(self, decode_calls: int, is_decoding: Callable[[], bool], deadline_s: float) -> None:
        self._decode_calls, self._is_decoding, self._deadline_s = decode_calls, is_decoding, deadline_s
        self._changed = threading.Condition()
        self._holder: str | None = None
        self._lines: dict[str, deque[object]] = {"trainer": deque(), "host": deque()}
        self._calls = 0
        self._calls_allowed: int | None = None  # hosts wait once they made as many; None: no limit

    @contextmanager
    def turn(self, role: str, clock: Clock) -> Iterator[None]:
        """Context manager: waits for the turn of `role` (trainer or host), and ends the turn at exit.

        `clock` records the wait.
        """
        self._take(role, clock)
        try:
            yield
        finally:
            self._calls += role == "host"
            self._give_back(role)

    def between(self, clock: Clock, result: jax.Array) -> None:
        """Called in the trainer's turn: wait for `result`, give the device to the hosts, and take it back.

        `result`: array from the trainer's last program. The hosts get `decode_calls` calls, or fewer if they
        run out of samples. Raises WaitTimeout after deadline_s.
        """
        result.block_until_ready()
        goal = self._calls_allowed = self._calls + self._decode_calls
        try:
            self._give_back("trainer")
            with clock.doing(f"wait: {self._decode_calls} decode calls"), self._changed:
                end_s = time.monotonic() + self._deadline_s
                while self._calls < goal and self._is_decoding():
                    # Polled: a host that runs out of samples notifies no one.
                    self._changed.wait(timeout=POLL_S)
                    if time.monotonic() > end_s:
                        raise WaitTimeout(
                            f"the trainer ends, because it waited {self._deadline_s:g} s for its turn on the "
                            f"shared devices: the hosts have samples to decode, but have not made "
                            f"{goal - self._calls} of their {self._decode_calls} decode calls; {REMEDY}"
                        )
            self._take("trainer", clock)
        finally:
            self._calls_allowed = None

    def _take(self, role: str, clock: Clock) -> None:
        """Wait for the turn of `role`; raises WaitTimeout after deadline_s.

        The trainer goes before all hosts; hosts go in the order of their calls, so that no host starves.
        """
        line, ticket = self._lines[role], object()

        def is_next() -> bool:
            if self._holder is not None or line[0] is not ticket:
                return False
            has_call = self._calls_allowed is None or self._calls < self._calls_allowed
            return role == "trainer" or (has_call and not self._lines["trainer"])

        with self._changed:
            line.append(ticket)
            try:
                if not is_next():
                    what = f"its turn on the device, which the {self._holder or 'trainer'} has"
                    with clock.doing(f"wait: {what}"):
                        if not self._changed.wait_for(is_next, self._deadline_s):
                            raise WaitTimeout(
                                f"the {role} ends, because it waited {self._deadline_s:g} s for {what}; "
                                f"{REMEDY}"
                            )
                self._holder = role
            finally:
                line.remove(ticket)
                self._changed.notify_all()

    def _give_back(self, role: str) -> None:
        """End the turn of `role`; does nothing if `role` does not have the device.

        The trainer does not have it if `between` ended its turn and timed out before taking the device back.
        """
        with self._changed:
            if self._holder != role:
                return
            self._holder = None
            self._changed.notify_all()
