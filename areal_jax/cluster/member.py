"""The connection of a host, trainer, reward or evaluation process to the controller, through Redis.

The connection sends messages in order, receives commands and posts heartbeats; every wait has a deadline.
"""

from __future__ import annotations

import itertools
import os
import queue
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from areal_jax.cluster import messages as m
from areal_jax.cluster.meeting import connect
from areal_jax.cluster.membership import HEARTBEAT_S, LOST_S, mailbox_of
from areal_jax.cluster.owner import look
from areal_jax.cluster.payloads import Payloads, Posted
from areal_jax.config.tree import Config
from areal_jax.control.events import Event
from areal_jax.observe.threads import reporting_thread
from areal_jax.observe.waits import WaitTimeout
from areal_jax.trajectories.codec import encode
from areal_jax.types import ArealError, Trajectory

MOST = 64
"""Maximum number of messages that a process takes, or posts, in one request to Redis."""
POLL_S = 0.2


class ControllerLink:
    """The connection of process `name` to the controller; a `with` block registers the process under `role`.

    One thread posts the queued messages, another thread posts heartbeats. If a thread fails, `commands`
    raises the thread's error.
    """

    def __init__(self, config: Config, role: str, name: str) -> None:
        self.name, self.incarnation = name, secrets.token_hex(4)
        self.epoch = ""
        self.figures: Callable[[], dict[str, Any]] = dict
        """Returns the content of the next heartbeat."""
        self._broker, self._role, self._deadline_s = connect(config), role, config.runtime.deadline_s
        self._mailbox = mailbox_of(name, self.incarnation)
        self.payloads = Payloads(self._broker)
        self._out: queue.Queue[tuple[m.AnyMessage, Trajectory | None] | None] = queue.Queue()
        self._numbers = itertools.count()
        self._unconfirmed: deque[m.EventReport] = deque()
        """Events that the controller has not confirmed as journaled, without those that have a trajectory.

        They are sent again after the controller has restarted or Redis has lost its data.
        """
        self._guard = threading.Lock()
        self._controller = ""
        """The epoch of the live controller that Redis showed last."""
        self._missing_s: float | None = time.monotonic()
        """The time (monotonic) since which Redis has shown no live controller; None if it shows one. Not the
        time since one was seen last: in a pause of this process that grows, too."""
        self._error: BaseException | None = None
        self._is_closed = threading.Event()
        self._threads = [
            reporting_thread(f"{name}: {what}", body, self.fail)
            for what, body in (("messages", self._post_all), ("heartbeat", self._keep_alive))
        ]

    def __enter__(self) -> ControllerLink:
        for thread in self._threads:
            thread.start()
        self._register()
        return self

    def _register(self) -> None:
        self.send(m.Hello(self._role, self.name, self.incarnation, socket.gethostname(), os.getpid()))

    def __exit__(self, kind: Any, error: BaseException | None, *_: Any) -> None:
        """Queues the message Ended, with `error` if there is one, and waits until all messages are posted.

        Waits at most runtime.deadline_s, then closes the connection to Redis.
        """
        text = "" if error is None else f"{type(error).__name__}: {error}"
        self.send(m.Ended(self.name, self.incarnation, text, isinstance(error, ArealError)))
        self._out.put(None)
        self._threads[0].join(self._deadline_s)
        self._is_closed.set()
        self._broker.close()

    def ready(self, **fields: Any) -> None:
        """Sends the message Ready, with the given `fields`: the answer to the controller's message Begin."""
        self.send(m.Ready(self.name, self.incarnation, self.epoch, **fields))

    def send(self, message: m.AnyMessage) -> None:
        """Queues a message to the controller and returns at once."""
        self._out.put((message, None))

    def report(
        self,
        event: Event,
        trajectory: Trajectory | None = None,
        ticket: bytes = b"",
        is_repeated: bool = True,
    ) -> None:
        """Queues an event for the control plane.

        A SampleFinished or TurnFinished comes with its `trajectory`, a SamplesOffered with a `ticket`.

        If the controller restarts, or Redis loses its data, before an event is journaled, the event is sent
        again, unless `is_repeated` is False. A finished sample or turn is not sent again: a host then decodes
        it again with the same random keys.
        """
        # Numbers go out in order: the controller ignores an event with a number below the newest.
        with self._guard:
            number = next(self._numbers)
            message = m.EventReport(self.name, self.incarnation, self.epoch, number, event, ticket)
            if trajectory is None and is_repeated:
                self._unconfirmed.append(message)
            self._out.put((message, trajectory))

    def note(self, text: str) -> None:
        self.send(m.LogLine(self.name, text))

    def fail(self, error: BaseException) -> None:
        """Makes `commands` raise this error at its next poll of the mailbox."""
        self._error = error

    def commands(self) -> Iterator[m.AnyMessage]:
        """Yields the controller's messages Begin, WeightsAddress and Envelope; returns at the message End.

        Skips messages from before the last Begin. A message is deleted from the mailbox when the caller asks
        for the next message. Raises the error given to `fail`, ArealError if the message End has a reason,
        and WaitTimeout after runtime.deadline_s seconds without a live controller.
        """
        registered_s = time.monotonic()
        while True:
            for message in self._broker.take(self._mailbox, POLL_S, MOST):
                command = m.from_plain(message.body)
                if isinstance(command, m.Begin):
                    self._enter(command.epoch)
                if isinstance(command, m.End):
                    self._broker.done(self._mailbox, [message])
                    if command.reason:
                        raise ArealError(command.reason)
                    return
                if command.epoch == self.epoch:  # type: ignore[union-attr]
                    yield command
                self._broker.done(self._mailbox, [message])
            if self._error is not None:
                raise self._error
            registered_s = self._require_controller(registered_s)

    def _enter(self, epoch: str) -> None:
        """If `epoch` is new, enters it and queues all events again that are not confirmed as journaled."""
        with self._guard:
            if epoch != self.epoch:
                self.epoch = epoch
                self._unconfirmed = deque(replace(message, epoch=epoch) for message in self._unconfirmed)
                for message in self._unconfirmed:
                    self._out.put((message, None))

    def _require_controller(self, registered_s: float) -> float:
        """Registers this process again if the controller has started an epoch, but sent no Begin for it.

        Registers at most every LOST_S / 2 seconds. `registered_s`: the time of the last registration. Returns
        this time or, after a registration, the current time. Raises WaitTimeout after `deadline_s` seconds
        without a live controller.
        """
        now = time.monotonic()
        epoch, missing_s = self._controller, self._missing_s
        if missing_s is not None and now - missing_s > self._deadline_s:
            raise WaitTimeout(
                f"{self.name} ends, because it has seen no heartbeat of the controller for "
                f"{self._deadline_s:g} s (runtime.deadline_s); see logs/controller.log in the run's "
                "folder, or start the controller with `areal-jax role controller`"
            )
        if epoch in ("", self.epoch) or now - registered_s < LOST_S / 2:
            return registered_s
        self._register()
        return now

    # --- threads --------------------------------------------------------------------------------------------

    def _post_all(self) -> None:
        """Runs in a thread: posts queued messages until the link closes, up to MOST in one request."""
        is_open = True
        while is_open:
            queued = [self._out.get()]
            while len(queued) < MOST and not self._out.empty():
                queued.append(self._out.get())
            sent = [one for one in queued if one is not None]
            is_open = len(sent) == len(queued)  # `__exit__` queues None, after all messages
            # Payloads go before the events that announce them, so that the controller finds them.
            self.payloads.post(
                {
                    Posted(t.sample, self._mailbox, message.number): encode(t)
                    for message, t in sent
                    if isinstance(message, m.EventReport) and t is not None
                }
            )
            self._broker.post(m.CONTROL, *(m.to_plain(message) for message, _ in sent))

    def _keep_alive(self) -> None:
        while not self._is_closed.is_set():
            self._broker.heartbeat(self._mailbox, self.figures(), LOST_S)
            if (controller := look(self._broker)) is None:
                self._missing_s = self._missing_s or time.monotonic()
            else:
                self._controller, self._missing_s = controller.epoch, None
                newest = controller.confirmed.get(self._mailbox, -1)
                # Events are in the order of their numbers, so the journaled ones are at the front.
                with self._guard:
                    while self._unconfirmed and self._unconfirmed[0].number <= newest:
                        self._unconfirmed.popleft()
            self._is_closed.wait(HEARTBEAT_S)
