"""The local driver: trainer, generation hosts and reward pool as threads and processes of one command.

One thread owns the loop of `runtime.driver`. Everybody else only puts events into its inbox, and finds what
it is to do in an inbox of its own.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from areal_jax.control import events as e
from areal_jax.control.events import Event
from areal_jax.control.machine import ControlPlane
from areal_jax.generation.engine import Engine
from areal_jax.generation.host import Host, Start, Stop
from areal_jax.generation.reference import ReferenceHost
from areal_jax.observe.live import View
from areal_jax.observe.metrics import MetricsWriter
from areal_jax.observe.waits import Timeline, WaitTimeout, get
from areal_jax.runtime.assembly import Parts
from areal_jax.runtime.devices import overwrites_serving
from areal_jax.runtime.driver import Driver, Told
from areal_jax.runtime.follower import Follower
from areal_jax.runtime.interrupts import kept_interrupts
from areal_jax.runtime.rows import RowMaker
from areal_jax.runtime.trainer import Trainer, held_batch
from areal_jax.runtime.turns import OneDevice, OwnDevices, Turns
from areal_jax.tasks.pool import RewardPool
from areal_jax.trainer.checkpoint import Checkpointer
from areal_jax.trainer.state import TrainState
from areal_jax.trajectories.sqlite import SqliteQueue
from areal_jax.types import ArealError, Completion, Group, Prompt, Trajectory
from areal_jax.weights.memory import MemoryStore
from areal_jax.weights.orbax import OrbaxStore
from areal_jax.weights.store import ParamStore

STOP_S = 60.0
"""How long a thread may take to end once told to, beyond the work it is in."""


@dataclass(frozen=True)
class Crash:
    """A thread ended by an error; the run ends with it."""

    who: str
    error: BaseException


Message = Told | Crash


class LocalRun:
    """A run from the given state on: `run()` returns when it is complete, and raises what ended it otherwise.

    Whatever ends it, the journal holds every event that had an effect, so `resume` goes on from there.
    """

    def __init__(
        self,
        parts: Parts,
        state: TrainState,
        control: ControlPlane,
        journal: SqliteQueue,
        folder: Path,
        view: View,
        metrics: MetricsWriter,
        timeline: Timeline,
        start_s: float = 0.0,
        trained: Iterable[tuple[int, tuple[int, ...]]] = (),
        restored: int | None = None,
    ) -> None:
        """`trained`: (version, ordinals) of the batches before this process; `start_s`: seconds they took;
        `restored`: version of the checkpoint that the state is from.
        """
        c = parts.config
        self._parts, self._view, self._timeline = parts, view, timeline
        self._inbox: queue.Queue[Message] = queue.Queue()
        self._deadline_s = c.runtime.deadline_s
        is_shared = parts.devices.placement == "shared"
        is_decoding = lambda: any(host.has_work for host in self._hosts)  # noqa: E731
        turns: Turns = (
            OneDevice(c.runtime.decode_calls_per_micro_batch, is_decoding, self._deadline_s)
            if is_shared
            else OwnDevices()
        )
        engines = [parts.engine(i) for i in range(c.runtime.hosts)]
        self._store = self._make_store(engines[0], folder)
        self._hosts = [self._make_host(f"host-{i}", engine, turns) for i, engine in enumerate(engines)]
        self._by_name = {host.name: host for host in self._hosts}
        checkpointer = Checkpointer(folder / "checkpoints", restored, self._fails("the checkpoints"))
        clock = timeline.actor("trainer")
        self.trainer = Trainer(parts, state, self._store, checkpointer, self._tell, turns, clock, view.note)
        self._pool = RewardPool(
            {name: weighted.task for name, weighted in parts.tasks.items()},
            c.runtime.reward_workers,
            c.runtime.reward_timeout_s,
        )
        rows = RowMaker(
            timeline.take_totals,
            self._hosts,
            start_s,
            tuple(parts.tasks),
            lambda o: parts.prompts.place(o)[0],
        )
        self._driver = Driver(parts, control, journal, folder, view, metrics, timeline, rows, self, trained)
        self._follower = None
        if c.observe.evaluate or c.observe.exports:
            on, fail = parts.devices.evaluation, self._fails("the evaluation")
            self._follower = Follower(parts, folder, on, view.note, fail)
        self._threads: list[threading.Thread] = []

    def _make_host(self, name: str, engine: Engine, turns: Turns) -> Host | ReferenceHost:
        """Samples from the policy, or answers with the tasks' references."""
        c, clock = self._parts.config, self._timeline.actor(name)
        if c.algorithm.samples == "reference":
            return ReferenceHost(
                name,
                self._parts.reference,
                self._tell,
                length=c.generation.length,
                clock=clock,
                deadline_s=self._deadline_s,
            )
        return Host(
            name,
            engine,
            self._store,
            self._tell,
            seed=c.run.seed,
            sampling=c.generation.sampling,
            on_update=c.on_update,
            versions=c.parameter_sets,
            turn=partial(turns.host, clock),
            clock=clock,
            deadline_s=self._deadline_s,
        )

    def _make_store(self, engine: Engine, folder: Path) -> ParamStore:
        c = self._parts.config
        dtype = c.weights.wire_dtype
        if c.weights_backend == "memory":
            return MemoryStore(engine.canary, dtype, overwrites_serving(c, self._parts.devices.placement))
        keep, on_failure = c.weights.keep_versions, self._fails("the weights")
        return OrbaxStore(folder / "weights", engine.canary, dtype, keep, self._deadline_s, on_failure)

    # --- from start to end ----------------------------------------------------------------------------------

    def run(self) -> None:
        with kept_interrupts() as is_interrupted:
            try:
                self._begin()
                while not self._driver.control.is_finished:
                    self._driver.handle(self._messages())
                    if is_interrupted():
                        raise KeyboardInterrupt
            except BaseException:
                self._end()
                raise
        if crashed := self._end(is_complete=True):
            raise crashed[0].error

    def _begin(self) -> None:
        """Publish the version at hand, tell that the run started or resumed, start the threads."""
        c = self._parts.config
        wire = self._store.publish(self._parts.learner.versioned(self.trainer.state))
        self._store.wait(self._deadline_s)  # a version is told once it is whole, and no host has started
        if self._driver.control.version < 0:
            first: list[Event] = [e.RunStarted(wire.digest, c.run.steps)]
        else:
            first = [e.RunResumed(c.run.steps), e.VersionCommitted(wire.version, wire.digest)]
        joined = [e.HostJoined(host.name, c.generation.slots) for host in self._hosts]
        self._driver.handle([(event, None) for event in [*first, *joined]])
        for name, body in [("trainer", self.trainer.run), *((host.name, host.run) for host in self._hosts)]:
            thread = threading.Thread(target=self._guarded(name, body), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        if self._follower is not None:
            self._follower.start()

    def _end(self, is_complete: bool = False) -> list[Crash]:
        """Stop everybody, journal what they still said, close; who ended by an error meanwhile. A run that is
        complete has its last checkpoint evaluated.
        """
        for host in self._hosts:
            host.inbox.put(Stop())
        self.trainer.inbox.put(None)
        self._pool.close()
        for thread in self._threads:
            thread.join(STOP_S + (self._deadline_s if thread.name == "trainer" else 0))
            if thread.is_alive():
                self._view.note(f"{thread.name} did not end within {STOP_S:g} s and is left behind")
        rest = self._waiting()
        crashed = [message for message in rest if isinstance(message, Crash)]
        try:
            self._driver.record([message for message in rest if not isinstance(message, Crash)])
        except ArealError as error:
            crashed.append(Crash("control", error))
        self._timeline.close()
        if self._follower is not None:
            try:
                if is_complete and not crashed:
                    self._follower.finish(self._deadline_s)
            finally:
                self._follower.stop(STOP_S)
        return crashed + [message for message in self._waiting() if isinstance(message, Crash)]

    def _waiting(self) -> list[Message]:
        found: list[Message] = []
        with suppress(queue.Empty):
            while True:
                found.append(self._inbox.get_nowait())
        return found

    def _fails(self, who: str) -> Callable[[BaseException], None]:
        return lambda error: self._inbox.put(Crash(who, error))

    def _guarded(self, who: str, body: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                body()
            except BaseException as error:  # noqa: BLE001 - handed to the control thread, which raises it
                self._inbox.put(Crash(who, error))

        return run

    # --- events ---------------------------------------------------------------------------------------------

    def _tell(self, event: Event, trajectory: Trajectory | None = None) -> None:
        self._inbox.put((event, trajectory))

    def _messages(self) -> list[Told]:
        """All that wait, at least one. Raises what a thread ended by, WaitTimeout when nobody says a word."""
        try:
            first = get(
                self._inbox,
                who="the control plane",
                what="any word from trainer, hosts and reward pool",
                deadline_s=self._deadline_s,
                clock=self._timeline.actor("control", "decide"),
            )
        except WaitTimeout as error:
            raise WaitTimeout(f"{error}. {'; '.join(self._driver.control.waits())}") from None
        messages = [first, *self._waiting()]
        for message in messages:
            if isinstance(message, Crash):
                self._driver.record([m for m in messages if not isinstance(m, Crash)])
                raise message.error
        return messages  # type: ignore[return-value]

    # --- actions --------------------------------------------------------------------------------------------

    def dispatch(self, action: e.Dispatch, prompt: tuple[int, ...]) -> None:
        self._by_name[action.host].inbox.put(Start(action.samples, prompt, action.min_version))

    def cancel(self, action: e.Cancel) -> None:
        self._by_name[action.host].inbox.put(Stop(action.samples))

    def score(self, action: e.Score, prompt: Prompt, completions: Sequence[Completion]) -> None:
        self._pool.submit(action.ordinal, action.attempt, prompt, completions, self._tell)

    def train(self, action: e.Train, groups: tuple[Group, ...]) -> None:
        self.trainer.inbox.put(held_batch(self._parts, action.step, groups))
