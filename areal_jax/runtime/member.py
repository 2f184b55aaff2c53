"""A process's side of a cluster: what it says goes out in order, what it is told comes in, with deadlines."""

from __future__ import annotations

import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from areal_jax.control.events import Event
from areal_jax.observe.waits import WaitTimeout
from areal_jax.runtime.broker import Broker
from areal_jax.runtime.membership import BEAT_S, SILENT_S, box_of
from areal_jax.runtime.messages import (
    CONTROL,
    Begin,
    End,
    Ended,
    Hello,
    Message,
    Noted,
    Told,
    from_plain,
    to_plain,
)
from areal_jax.types import ArealError, Trajectory

MOST = 64
"""Commands of its own that a process takes at once; of those for any of several, one."""
POLL_S = 0.2


class Post:
    """`beat()` gives what its signs of life say. Whatever a thread of it ends by, `commands` raises."""

    def __init__(
        self, broker: Broker, role: str, name: str, deadline_s: float, beat: Callable[[], dict[str, Any]]
    ) -> None:
        self.name, self.incarnation = name, secrets.token_hex(4)
        self.epoch = ""
        self._broker, self._role, self._deadline_s, self._beat = broker, role, deadline_s, beat
        self._box = box_of(name, self.incarnation)
        self._out: queue.Queue[Message | None] = queue.Queue()
        self._error: BaseException | None = None
        self._is_closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._guarded(body), name=f"{name}: {what}", daemon=True)
            for what, body in (("says", self._send), ("beats", self._live))
        ]

    def __enter__(self) -> Post:
        for thread in self._threads:
            thread.start()
        self._say_hello()
        return self

    def _say_hello(self) -> None:
        self.say(Hello(self._role, self.name, self.incarnation, socket.gethostname(), os.getpid()))

    def __exit__(self, kind: Any, error: BaseException | None, *_: Any) -> None:
        """Say how it ended, once all before is said."""
        text = "" if error is None else f"{type(error).__name__}: {error}"
        self.say(Ended(self.name, self.incarnation, text, isinstance(error, ArealError)))
        self._out.put(None)
        self._threads[0].join(self._deadline_s)
        self._is_closed.set()

    def say(self, message: Message) -> None:
        """Waits for nobody."""
        self._out.put(message)

    def tell(self, event: Event, trajectory: Trajectory | None = None) -> None:
        self.say(Told(self.name, self.incarnation, self.epoch, event, trajectory))

    def note(self, text: str) -> None:
        self.say(Noted(self.name, text))

    def fail(self, error: BaseException) -> None:
        """`commands` raises it."""
        self._error = error

    def commands(self, *boxes: str) -> Iterator[Message]:
        """Commands of the epoch that began last, and every Begin; until End. `boxes`: shared with others, for
        work that is the same whoever asks for it.

        A command counts as done once the next one is asked for. Raises what `fail` heard, ArealError for an
        End with a reason, WaitTimeout where no controller gives a sign of life.
        """
        seen_s = time.monotonic()
        while True:
            for place in (self._box, *boxes):
                wait_s = POLL_S if place == (self._box, *boxes)[-1] else 0.0
                for message in self._broker.take(place, self._box, wait_s, 1 if place in boxes else MOST):
                    command = from_plain(message.body)
                    if isinstance(command, Begin):
                        self.epoch = command.epoch
                    if isinstance(command, End):
                        self._broker.done(place, [message])
                        if command.reason:
                            raise ArealError(command.reason)
                        return
                    if place in boxes or command.epoch == self.epoch:  # type: ignore[union-attr]
                        yield command
                    self._broker.done(place, [message])
            if self._error is not None:
                raise self._error
            seen_s = self._require_controller(seen_s)

    def _require_controller(self, seen_s: float) -> float:
        now = time.monotonic()
        if now - seen_s < SILENT_S / 2:
            return seen_s
        controller = self._broker.beats().get(CONTROL)
        if controller is not None:
            if controller["epoch"] != self.epoch:  # another one than told it to begin
                self._say_hello()
            return now
        if now - seen_s > self._deadline_s:
            raise WaitTimeout(
                f"{self.name} had no sign of life from the controller for {self._deadline_s:g} s; see its "
                "log, or start it: `areal-jax role controller`"
            )
        return seen_s

    # --- threads --------------------------------------------------------------------------------------------

    def _send(self) -> None:
        """All that waits to be said at once: each round trip costs Redis a write to its disk."""
        is_open = True
        while is_open:
            said = [self._out.get()]
            while len(said) < MOST and not self._out.empty():
                said.append(self._out.get())
            messages = [to_plain(message) for message in said if message is not None]
            is_open = len(messages) == len(said)  # nothing is said after None
            self._broker.post(CONTROL, *messages)

    def _live(self) -> None:
        while not self._is_closed.is_set():
            self._broker.beat(self._box, self._beat(), SILENT_S)
            self._is_closed.wait(BEAT_S)

    def _guarded(self, body: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                body()
            except Exception as error:  # noqa: BLE001 - handed to the main thread, which raises it
                self._error = error

        return run
