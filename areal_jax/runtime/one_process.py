"""The local driver: trainer, generation hosts and reward pool as threads and processes of one command.

The main thread owns the driver. Every other thread puts its events into the main thread's inbox and reads
commands from its own inbox.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from areal_jax.assembly.parts import Parts
from areal_jax.config.tree import Config
from areal_jax.control import events as e
from areal_jax.control.events import Event
from areal_jax.control.orchestrator import PLACED_EVERY_S
from areal_jax.episodes.conversation import Conversation
from areal_jax.episodes.workflow_runner import Gateway
from areal_jax.generation.commands import Stop, command_of
from areal_jax.generation.engine import Engine
from areal_jax.generation.host import Host
from areal_jax.generation.reference_host import ReferenceHost
from areal_jax.observe.threads import reporting_thread
from areal_jax.observe.waits import REMEDY, WaitTimeout
from areal_jax.runtime.compute_choice import plan_new
from areal_jax.runtime.context import RunContext
from areal_jax.runtime.core import Incoming, Offer
from areal_jax.runtime.driver import Driver
from areal_jax.runtime.interrupts import interrupts_sent
from areal_jax.runtime.talking import HostEndpoint, training_host
from areal_jax.runtime.trainer_loop import Trainer, held_batch
from areal_jax.runtime.turns import OneDevice
from areal_jax.runtime.workflow_parts import make_runner
from areal_jax.tasks.pool import RewardPool
from areal_jax.trainer.checkpoint import Checkpointer
from areal_jax.trainer.state import TrainState
from areal_jax.types import ArealError, Completion, Group, PolicyVersion, Prompt, SampleId, Trajectory

STOP_S = 60.0
"""Seconds that the main thread waits for a thread to end after sending the thread a stop command."""

AWAITED = "an event from the trainer, a host or the reward pool"

Arrival = Incoming | BaseException
"""An event with its payload; or an exception that the main thread raises: a failed thread's, or Ctrl-C's."""


class Follows(Protocol):
    """Evaluates and exports the run's checkpoints beside it (`evaluation.follower.Follower`)."""

    def start(self) -> None: ...

    def finish(self, deadline_s: float) -> None: ...

    def stop(self, deadline_s: float) -> None: ...


class Services(NamedTuple):
    """What a run uses that its core does not contain; `areal_jax.jobs` composes them."""

    make_endpoint: Callable[[Config, int, Engine], HostEndpoint | None]
    """Called with the index of a host; None: clients cannot reach it."""
    make_gateway: Callable[[], Gateway]
    """Called in the event loop of workflows that agents with an address of their own belong to."""
    make_follower: Callable[[Callable[[str], None], Callable[[BaseException], None]], Follows | None]
    """Called with `note(text)` and `fail(error)`; None: the run neither evaluates nor exports checkpoints."""


class LocalRun:
    """One run in this process, new or resumed; training starts from `state`.

    `run()` returns when the run is complete. If an error ends the run earlier, `run()` raises that error, and
    `resume` can continue the run from its journal.
    """

    def __init__(
        self,
        parts: Parts,
        state: TrainState,
        context: RunContext,
        services: Services,
        restored: PolicyVersion | None = None,
    ) -> None:
        """`restored`: version of the checkpoint from which `state` was loaded; None without a checkpoint."""
        c, folder, view, timeline = parts.config, context.folder, context.view, context.timeline
        self._parts, self._view, self._timeline, self._services = parts, view, timeline, services
        self._inbox: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._deadline_s = c.runtime.deadline_s
        turns = None
        if parts.devices.placement == "shared":
            is_decoding = lambda: any(host.has_work for host in self._hosts.values())  # noqa: E731
            turns = OneDevice(c.runtime.decode_calls_per_micro_batch, is_decoding, self._deadline_s)
        engines = [parts.engine(i) for i in range(c.runtime.hosts)]
        self._store = parts.store(engines[0].canary, folder, self._inbox.put)
        hosts = [self._make_host(i, engine, turns) for i, engine in enumerate(engines)]
        self._hosts = {host.name: host for host, _ in hosts}
        checkpointer = Checkpointer(folder / "checkpoints", restored, self._inbox.put)
        clock = timeline.clock("trainer")
        self.trainer = Trainer(
            parts,
            state,
            self._store,
            checkpointer,
            self._deliver,
            turns=turns,
            clock=clock,
            note=view.note,
        )
        self._pool = RewardPool(
            {name: weighted.task for name, weighted in parts.tasks.items()},
            c.runtime.reward_workers,
            c.runtime.reward_timeout_s,
        )
        self._runner = None
        if parts.workflows:
            self._runner = make_runner(
                c,
                parts.workflows,
                parts.model.tokenizer,
                emit=self._deliver,
                fail=self._inbox.put,
                note=view.note,
                make_gateway=services.make_gateway,
            )
        self._driver = Driver(parts, context, self, list(self._hosts.values()), timeline.take_totals)
        self._follower = services.make_follower(view.note, self._inbox.put)
        bodies = {"trainer": self.trainer.run} | {host.name: body for host, body in hosts}
        self._threads = [reporting_thread(name, body, self._inbox.put) for name, body in bodies.items()]

    def _make_host(
        self, index: int, engine: Engine, turns: OneDevice | None
    ) -> tuple[Host | ReferenceHost, Callable[[], None]]:
        """Make host number `index`; return the host, and the function to run in its thread.

        `turns` decides when the host may use the device that it shares with the trainer; None: it shares no
        device. With algorithm.samples=reference the host does not decode, but returns the tasks' reference
        answers.
        """
        c, name = self._parts.config, f"host-{index}"
        clock = self._timeline.clock(name)
        if c.algorithm.samples == "reference":
            host = ReferenceHost(
                name,
                self._parts.reference,
                self._deliver,
                length=c.generation.length,
                clock=clock,
                deadline_s=self._deadline_s,
            )
            return host, host.run
        return training_host(
            c,
            index,
            engine,
            self._store,
            self._deliver,
            name=name,
            clock=clock,
            turns=turns,
            endpoint=self._services.make_endpoint(c, index, engine),
        )

    # --- from start to end ----------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            with interrupts_sent(self._inbox.put):
                self._begin()
                while not self._driver.control.state.is_finished:
                    self._driver.handle(self._messages())
        except BaseException:
            self._end()
            raise
        if crashed := self._end(is_complete=True):
            raise crashed[0]

    def _begin(self) -> None:
        """Publish the trainer's weights, record that the run started or resumed, and start all threads."""
        wire = self._store.publish(self._parts.learner.versioned(self.trainer.state))
        # Its event may only follow once the version is complete; no host runs yet.
        self._store.wait(self._deadline_s)
        self._driver.start(wire.version, wire.digest)
        slots = self._parts.config.generation.rollout_slots
        self._driver.handle([(e.HostJoined(name, slots), None) for name in self._hosts])
        for thread in self._threads:
            thread.start()
        if self._follower is not None:
            self._follower.start()

    def _end(self, is_complete: bool = False) -> list[BaseException]:
        """Stop all threads, record their last events and close the files.

        If the run `is_complete`, also finish the evaluation of the last checkpoint. Return the errors of
        threads that failed while stopping.
        """
        for host in self._hosts.values():
            host.inbox.put(Stop())
        self.trainer.inbox.put(None)
        self._pool.close()
        if self._runner is not None:
            self._runner.close()
        for thread in self._threads:
            wait_s = STOP_S + (self._deadline_s if thread.name == "trainer" else 0)
            if thread.is_alive():
                thread.join(wait_s)
            if thread.is_alive():
                self._view.note(
                    f"the thread {thread.name} did not end within {wait_s:g} s of its stop command; the run "
                    "ends without waiting any longer"
                )
        rest = self._waiting()
        crashed = [message for message in rest if isinstance(message, BaseException)]
        try:
            self._driver.record([message for message in rest if not isinstance(message, BaseException)])
            self._timeline.close()
        except ArealError as error:
            crashed.append(error)
        try:
            if self._follower is not None and is_complete and not crashed:
                self._follower.finish(self._deadline_s)
        finally:
            if self._follower is not None:
                self._follower.stop(STOP_S)
            for weighted in (*self._parts.tasks.values(), *(self._parts.held_out or {}).values()):
                weighted.task.close()
        return crashed + [message for message in self._waiting() if isinstance(message, BaseException)]

    def _waiting(self) -> list[Arrival]:
        found: list[Arrival] = []
        with suppress(queue.Empty):
            while True:
                found.append(self._inbox.get_nowait())
        return found

    # --- events ---------------------------------------------------------------------------------------------

    def _deliver(self, event: Event, payload: Trajectory | Offer | None = None) -> None:
        self._inbox.put((event, payload))

    def _messages(self) -> list[Incoming]:
        """Wait for an event, then return all events in the inbox; meanwhile, place samples when it is due.

        Raises the error of a thread that failed, KeyboardInterrupt after Ctrl-C, or WaitTimeout if no event
        arrives within runtime.deadline_s. Events that came before are recorded.
        """
        messages = [self._first_message(), *self._driver.placement_due(), *self._waiting()]
        for message in messages:
            if isinstance(message, BaseException):
                self._driver.record([m for m in messages if not isinstance(m, BaseException)])
                raise message
        return messages  # type: ignore[return-value]

    def _first_message(self) -> Arrival:
        driver = self._driver
        end_s = time.monotonic() + self._deadline_s
        while True:
            left_s = max(0.0, end_s - time.monotonic())
            is_placing = driver.control.orchestrator.is_due() and left_s > PLACED_EVERY_S
            try:
                with self._timeline.clock("control", "decide").doing(f"wait: {AWAITED}"):
                    return self._inbox.get(timeout=PLACED_EVERY_S if is_placing else left_s)
            except queue.Empty:
                if not is_placing:
                    raise WaitTimeout(
                        f"the control plane ends, because it waited {self._deadline_s:g} s for {AWAITED}; "
                        f"{REMEDY}. {'; '.join(driver.control.waits())}"
                    ) from None
            driver.handle(driver.placement_due())

    # --- actions --------------------------------------------------------------------------------------------

    def command(self, action: e.HostCommand, payload: Any = None) -> None:
        self._hosts[action.host].inbox.put(command_of(action, payload, self._deliver))

    def score(self, action: e.Score, prompt: Prompt, completions: Sequence[Completion]) -> None:
        self._pool.submit(action.ordinal, action.attempt, prompt, completions, self._deliver)

    def train(self, action: e.Train, groups: tuple[Group, ...]) -> None:
        plan = plan_new(self._parts.config, groups, self._parts.learner.takes_shared_prompts)
        self.trainer.inbox.put(held_batch(action.step, groups, plan))

    def hold(self, action: e.Hold) -> None:
        self.trainer.inbox.put(action)

    def begin(self, sample: SampleId, prompt: Prompt, conversation: Conversation) -> None:
        assert self._runner is not None
        self._runner.begin(sample, prompt, conversation)

    def answer(self, sample: SampleId, turn: int, conversation: Conversation) -> None:
        assert self._runner is not None
        self._runner.answer(sample, turn, conversation)

    def call(self, sample: SampleId, call: int) -> None:
        assert self._runner is not None
        self._runner.call(sample, call)

    def end(self, ordinal: int) -> None:
        if self._runner is not None:
            self._runner.end(ordinal)
