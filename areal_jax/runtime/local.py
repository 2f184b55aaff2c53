"""The local driver: trainer, generation hosts and reward pool as threads and processes of one command.

One thread owns the control plane. Everybody else only puts events into its inbox; it takes all that wait,
lets the control plane answer, writes events, payloads and answers into the journal in one transaction, and
only then acts.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from areal_jax.control import events as e
from areal_jax.control.events import Action, Event
from areal_jax.control.machine import ControlPlane
from areal_jax.generation.engine import Engine
from areal_jax.generation.host import Host, Start, Stop
from areal_jax.generation.reference import ReferenceHost
from areal_jax.generation.rollout import completion_of, with_rewards
from areal_jax.observe.live import View
from areal_jax.observe.metrics import MetricsWriter
from areal_jax.observe.waits import Timeline, WaitTimeout, get
from areal_jax.runtime.assembly import Parts
from areal_jax.runtime.devices import overwrites_serving
from areal_jax.runtime.interrupts import kept_interrupts
from areal_jax.runtime.rows import RowMaker
from areal_jax.runtime.trainer import TrainBatch, Trainer
from areal_jax.runtime.turns import OneDevice, OwnDevices, Turns
from areal_jax.tasks.pool import RewardPool
from areal_jax.trainer.checkpoint import Checkpointer
from areal_jax.trainer.state import TrainState
from areal_jax.trajectories.sqlite import Entry, SqliteQueue
from areal_jax.types import ArealError, Group, Trajectory
from areal_jax.weights.memory import MemoryStore
from areal_jax.weights.orbax import OrbaxStore
from areal_jax.weights.store import ParamStore

MOST_DROPS = 50
"""Batches' worth of groups that may be dropped between two trained batches before the run gives up."""

DURABLE = (e.CheckpointCommitted, e.VersionCommitted)
"""Events that also have to outlive a power cut."""

STOP_S = 60.0
"""How long a thread may take to end once told to, beyond the work it is in."""


@dataclass(frozen=True)
class Crash:
    """A thread ended by an error; the run ends with it."""

    who: str
    error: BaseException


Message = tuple[Event, Trajectory | None] | Crash


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
        self._parts, self._control, self._journal = parts, control, journal
        self._view, self._metrics, self._timeline = view, metrics, timeline
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
        self._checkpointer = Checkpointer(
            folder / "checkpoints", c.trainer.keep_checkpoints, restored, self._fails("the checkpoints")
        )
        clock = timeline.actor("trainer")
        self.trainer = Trainer(
            parts, state, self._store, self._checkpointer, self._tell, turns, clock, view.note
        )
        self._pool = RewardPool(
            {name: weighted.task for name, weighted in parts.tasks.items()},
            c.runtime.reward_workers,
            c.runtime.reward_timeout_s,
        )
        self._rows = RowMaker(
            timeline, self._hosts, start_s, tuple(parts.tasks), lambda o: parts.prompts.place(o)[0]
        )
        self._members: dict[tuple[int, int], dict[int, Trajectory]] = {}
        self._groups: dict[int, Group] = {}
        self._trained = deque(trained)
        self._threads: list[threading.Thread] = []
        self._drops = 0

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
        if c.weights.backend == "memory":
            return MemoryStore(engine.canary, dtype, overwrites_serving(c, self._parts.devices.placement))
        keep, on_failure = c.weights.keep_versions, self._fails("the weights")
        return OrbaxStore(folder / "weights", engine.canary, dtype, keep, self._deadline_s, on_failure)

    # --- from start to end ----------------------------------------------------------------------------------

    def run(self) -> None:
        with kept_interrupts() as is_interrupted:
            try:
                self._begin()
                while not self._control.is_finished:
                    self._handle(self._messages())
                    if is_interrupted():
                        raise KeyboardInterrupt
            except BaseException:
                self._end()
                raise
        if crashed := self._end():
            raise crashed[0].error

    def _begin(self) -> None:
        """Publish the version at hand, tell that the run started or resumed, start the threads."""
        c = self._parts.config
        wire = self._store.publish(self._parts.learner.versioned(self.trainer.state))
        self._store.wait(self._deadline_s)  # a version is told once it is whole, and no host has started
        if self._control.version < 0:
            first: list[Event] = [e.RunStarted(wire.digest, c.run.steps)]
        else:
            first = [e.RunResumed(c.run.steps), e.VersionCommitted(wire.version, wire.digest)]
        joined = [e.HostJoined(host.name, c.generation.slots) for host in self._hosts]
        self._handle([(event, None) for event in [*first, *joined]])
        for name, body in [("trainer", self.trainer.run), *((host.name, host.run) for host in self._hosts)]:
            thread = threading.Thread(target=self._guarded(name, body), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _end(self) -> list[Crash]:
        """Stop everybody, journal what they still said, close; who ended by an error meanwhile."""
        for host in self._hosts:
            host.inbox.put(Stop())
        self.trainer.inbox.put(None)
        self._pool.close()
        for thread in self._threads:
            thread.join(STOP_S + (self._deadline_s if thread.name == "trainer" else 0))
            if thread.is_alive():
                self._view.note(f"{thread.name} did not end within {STOP_S:g} s and is left behind")
        rest: list[Message] = []
        with suppress(queue.Empty):
            while True:
                rest.append(self._inbox.get_nowait())
        crashed = [message for message in rest if isinstance(message, Crash)]
        try:
            self._record([message for message in rest if not isinstance(message, Crash)])
        except ArealError as error:
            crashed.append(Crash("control", error))
        self._timeline.close()
        return crashed

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

    def _messages(self) -> list[tuple[Event, Trajectory | None]]:
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
            raise WaitTimeout(f"{error}. {'; '.join(self._control.waits())}") from None
        messages = [first]
        with suppress(queue.Empty):
            while True:
                messages.append(self._inbox.get_nowait())
        for message in messages:
            if isinstance(message, Crash):
                self._record([m for m in messages if not isinstance(m, Crash)])
                raise message.error
        return messages  # type: ignore[return-value]

    def _handle(self, messages: Sequence[tuple[Event, Trajectory | None]]) -> None:
        """Decide, write down, act: in this order."""
        for action in self._record(messages):
            self._act(action)
        self._require_progress()

    def _record(self, messages: Sequence[tuple[Event, Trajectory | None]]) -> list[Action]:
        """Let the control plane answer, and write down what it was told with its answers.

        Where it refuses an event, those before it are still written: its state and the journal stay one.
        """
        entries: list[Entry] = []
        try:
            for event, trajectory in messages:
                entries.append(self._decide(event, trajectory))
        finally:
            if entries:
                is_durable = any(isinstance(entry.event, DURABLE) for entry in entries)
                self._journal.append(entries, durable=is_durable)
        for entry in entries:
            self._note(entry.event)
        return [action for entry in entries for action in entry.actions]

    def _decide(self, event: Event, trajectory: Trajectory | None) -> Entry:
        if isinstance(event, e.SampleFinished) and not self._control.awaits(event.sample, event.host):
            trajectory = None  # too late: its payload must not stand in for the one that counts
        if trajectory is not None:
            sample = trajectory.sample
            members = self._members.setdefault((sample.ordinal, sample.attempt), {})
            members.setdefault(sample.member, trajectory)
        if isinstance(event, e.RewardScored):
            self._reward(event)
        if isinstance(event, e.BatchTrained):
            event = self._with_row(event)
        actions = self._control.handle(event)
        self._rows.see(event, actions)
        self._drops += sum(isinstance(action, e.Drop) for action in actions)
        return Entry(event, actions, trajectory)

    def _with_row(self, event: e.BatchTrained) -> e.BatchTrained:
        groups = [self._groups[ordinal] for ordinal in event.ordinals]
        return replace(event, metrics=self._rows.make(event.step, groups, event.metrics, event.digest))

    def _note(self, event: Event) -> None:
        """What follows once an event is written: rows, snapshots, payloads that may go."""
        if isinstance(event, e.BatchTrained):
            self._metrics.write(event.metrics)
            self._view.show(event.metrics)
            self._timeline.flush()
            for ordinal in event.ordinals:
                del self._groups[ordinal]
            self._trained.append((event.step + 1, event.ordinals))
            self._drops = 0
        elif isinstance(event, e.CheckpointCommitted):
            self._journal.snapshot(self._journal.last_seq, self._control.snapshot())
            self._checkpointer.prune(event.version)
            self._forget_trained()
        elif isinstance(event, e.SampleFailed):
            self._view.note(f"sample {event.sample.ordinal}/{event.sample.member} failed: {event.reason}")
        elif isinstance(event, e.RewardFailed):
            self._view.note(
                f"group {event.ordinal}: reward {event.outcome.replace('_', ' ')}: {event.message}"
            )

    def _forget_trained(self) -> None:
        """Payloads stay from the oldest checkpoint on, and those of the newest observe.keep_groups groups."""
        kept = self._checkpointer.kept()
        is_needed_from = kept[0] if len(kept) >= self._parts.config.trainer.keep_checkpoints else 0
        count = sum(len(ordinals) for _, ordinals in self._trained)
        while self._trained and self._trained[0][0] <= is_needed_from:
            ordinals = self._trained[0][1]
            if count - len(ordinals) < self._parts.config.observe.keep_groups:
                break
            self._journal.forget(ordinals)
            self._trained.popleft()
            count -= len(ordinals)

    def _require_progress(self) -> None:
        """Replacements of dropped groups are admitted for ever: a run that only drops has to stop."""
        if self._drops > MOST_DROPS * self._parts.config.trainer.batch_size:
            reasons = ", ".join(f"{n} {reason}" for reason, n in self._control.dropped.items())
            raise ArealError(
                f"{self._drops} groups were dropped since the last trained batch ({reasons} in all): "
                "nothing is left to "
                "learn from. Look at the rewards in logs/ and with `areal-jax inspect`; no_signal: use an "
                "easier task or algorithm.group_filter=none; failed_reward: mend the task's score"
            )

    # --- groups ---------------------------------------------------------------------------------------------

    def _trajectories(self, ordinal: int, attempt: int) -> tuple[Trajectory, ...]:
        """A group's members, from memory or, after a resume, from the journal."""
        size = self._parts.config.algorithm.group_size
        members = self._members.get((ordinal, attempt), {})
        if len(members) == size:
            return tuple(members[i] for i in range(size))
        return self._journal.group(ordinal, attempt, size)

    def _reward(self, event: e.RewardScored) -> None:
        members = self._trajectories(event.ordinal, event.attempt)
        self._members.pop((event.ordinal, event.attempt), None)
        prompt = self._parts.prompts.prompt(event.ordinal)
        self._groups[event.ordinal] = Group(event.ordinal, prompt, with_rewards(members, event))

    def _group(self, ordinal: int, attempt: int) -> Group:
        if ordinal not in self._groups:
            prompt = self._parts.prompts.prompt(ordinal)
            self._groups[ordinal] = Group(ordinal, prompt, self._trajectories(ordinal, attempt))
        return self._groups[ordinal]

    # --- actions --------------------------------------------------------------------------------------------

    def _act(self, action: Action) -> None:
        match action:
            case e.Dispatch(samples, host, min_version):
                prompt = self._parts.prompt_tokens(samples[0].ordinal)
                self._by_name[host].inbox.put(Start(samples, prompt, min_version))
            case e.Cancel(samples, host):
                self._by_name[host].inbox.put(Stop(samples))
            case e.Score(ordinal, attempt):
                tokenizer = self._parts.model.tokenizer
                completions = [completion_of(t, tokenizer) for t in self._trajectories(ordinal, attempt)]
                self._pool.submit(
                    ordinal, attempt, self._parts.prompts.prompt(ordinal), completions, self._tell
                )
            case e.Train(step, ordinals, attempts):
                groups = [self._group(o, a) for o, a in zip(ordinals, attempts, strict=True)]
                self.trainer.inbox.put(TrainBatch(step, tuple(groups)))
            case e.Drop(ordinal) | e.Reissue(ordinal):
                self._groups.pop(ordinal, None)
                for key in [key for key in self._members if key[0] == ordinal]:
                    del self._members[key]
            case e.Finish():
                pass
