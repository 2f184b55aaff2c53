"""A run under a virtual clock: the same control plane, and machines whose time a schedule says.

`simulate(config, schedule)` takes sizes and rules from the config. What hosts, trainer and rewards do in
their time is drawn from the schedule's seed, or done by the machines that are given: those of
`runtime.real_machines` decode and train. Equal arguments give equal rows. A run that cannot go on is an error
that names who waited for whom and the seed that shows it again.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np

from areal_jax.config import Config
from areal_jax.control import events as e
from areal_jax.control.audit import AuditResult, Row, audit
from areal_jax.control.events import Action, Event
from areal_jax.control.machine import ControlPlane
from areal_jax.runtime.schedule import Fault, Schedule
from areal_jax.runtime.simulated_host import Call, Host
from areal_jax.runtime.simulated_machines import DrawnMachines, Machines
from areal_jax.types import ArealError, SampleId, VersionSpan


class SimulationError(ArealError):
    """A simulated run that hung or broke an invariant; the message names the seed."""


@dataclass(frozen=True)
class SimResult:
    rows: list[Row]
    audit: AuditResult
    virtual_s: float
    """Until the last batch was trained."""
    head_ages: dict[int, int]
    """Trained samples by trained version - version of their first token."""
    token_ages: dict[int, int]
    """Trained tokens by trained version - version of the token."""
    versions: int
    """Versions committed, the initial one not counted."""
    faults: dict[str, int]
    """Faults that did strike, by kind."""
    interruptions: int
    swaps: int
    """Versions that a host adopted, the first ones not counted."""
    recomputed_tokens: int
    """Tokens whose KV was rebuilt at a swap."""
    held: dict[int, int]
    """Decode calls by the number of versions whose parameters the host held."""
    tokens: int
    """Tokens decoded, those lost with a host included."""
    host_busy_s: float
    """Summed over hosts."""
    trainer_busy_s: float


def simulate(config: Config, schedule: Schedule, machines: Machines | None = None) -> SimResult:
    """Run to the end and audit. Raises SimulationError on a hang or a broken invariant, and for faults that
    would strike machines which cannot do again what is lost.
    """
    if machines is not None and schedule.faults:
        raise SimulationError(
            f"{len(schedule.faults)} faults for machines that forget what they trained; leave "
            "Schedule.faults empty, or the machines out"
        )
    return World(config, schedule, machines or DrawnMachines(config, schedule)).run()


@dataclass
class Meters:
    head_ages: Counter[int] = field(default_factory=Counter)
    token_ages: Counter[int] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    interruptions: int = 0
    swaps: int = 0
    recomputed_tokens: int = 0
    held: Counter[int] = field(default_factory=Counter)
    tokens: int = 0
    host_busy_s: float = 0.0
    trainer_busy_s: float = 0.0

    def swapped(self, call: Call) -> None:
        """A host adopted a version as this turn began."""
        assert call.adopted is not None
        self.swaps += call.adopted.version > 0
        self.interruptions += call.adopted.interrupted
        self.recomputed_tokens += call.recomputed


class World:
    """The clock, the journal and the machines. A callback of a process that died since does nothing."""

    def __init__(self, config: Config, schedule: Schedule, machines: Machines) -> None:
        self.config, self.schedule, self.machines = config, schedule, machines
        self.plane = ControlPlane(config)
        self.rows: list[Row] = []
        self.meters = Meters()
        self.now_s = 0.0
        self.finished_s: float | None = None
        self._pending: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._told = 0
        self._noise = np.random.default_rng([schedule.seed, 2])
        self._faults = list(schedule.faults)
        self._hosts: dict[str, Host] = {}
        self._spans: dict[SampleId, tuple[VersionSpan, ...]] = {}
        self._trainer = 0
        """Which trainer process this is; what an earlier one began is lost."""
        self._is_trainer_up = True
        self._published_s = 0.0
        self._checkpoint = 0

    def run(self) -> SimResult:
        self.later(0.0, self.tell, e.RunStarted(self.machines.publish(0), self.config.run.steps))
        self._join_all()
        while self._pending:
            self.now_s, _, call, arguments = heapq.heappop(self._pending)
            call(*arguments)
            if self.now_s > self.schedule.max_virtual_s or len(self.rows) > self.schedule.max_rows:
                self._give_up(f"still going after {self.now_s:.0f} virtual s and {len(self.rows)} rows")
        if self.finished_s is None:
            self._give_up("nothing left to happen")
        m = self.meters
        return SimResult(
            self.rows, audit(self.config, self.rows), self.finished_s, dict(sorted(m.head_ages.items())),
            dict(sorted(m.token_ages.items())), self.plane.version, dict(m.faults), m.interruptions, m.swaps,
            m.recomputed_tokens, dict(sorted(m.held.items())), m.tokens, m.host_busy_s, m.trainer_busy_s,
        )  # fmt: skip

    # --- clock and journal ----------------------------------------------------------------------------------

    def later(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        self._told += 1  # ties in time are broken by who asked first
        heapq.heappush(self._pending, (self.now_s + seconds, self._told, call, arguments))

    def latency(self, seconds: float) -> float:
        return seconds * float(np.exp(self.schedule.jitter * self._noise.standard_normal()))

    def tell(self, event: Event) -> None:
        """Handle, journal, then act, as every driver does; and see whether a fault strikes in between."""
        plane = self.plane
        if isinstance(event, e.SampleFinished) and plane.awaits(event.sample, event.host):
            self._spans[event.sample] = event.spans
        if (
            isinstance(event, e.BatchTrained)
            and plane.training is not None
            and event.step == plane.trained_version
        ):
            self._weigh(plane.training)
        before = plane.version
        actions = plane.handle(event)
        self.rows.append((len(self.rows), event, actions))
        live = len(plane.in_flight)
        if plane.version < before or plane.trained + sum(plane.dropped.values()) + live != plane.admitted:
            self._give_up(f"{event} broke the accounts")
        struck = [fault for fault in self._faults if fault.at_row < len(self.rows)]
        self._faults = [fault for fault in self._faults if fault.at_row >= len(self.rows)]
        crash = next((fault for fault in struck if fault.kind == "driver_crash"), None)
        if crash is None:
            for action in actions:
                self._do(action)
            self._after(event)
        for fault in struck:
            self._strike(fault)

    def _do(self, action: Action) -> None:
        match action:
            case e.Dispatch():
                if (host := self._hosts.get(action.host)) is not None:
                    host.take(action)
            case e.Cancel():
                if (host := self._hosts.get(action.host)) is not None:
                    host.decoder.cancel(action.samples)
            case e.Score():
                self.later(self.latency(self.schedule.reward_s), self.tell, self.machines.score(action))
            case e.Train() if self._is_trainer_up:  # else it asks again when it is back
                seconds = self.latency(self.schedule.train_s)
                self.meters.trainer_busy_s += seconds
                self.later(seconds, self._trained, self._trainer, action)
            case e.Drop(ordinal) | e.Reissue(ordinal):
                self.machines.forget(ordinal)
            case e.Finish():
                self.finished_s = self.now_s

    def _after(self, event: Event) -> None:
        """What machines do once an event is journaled, without being asked."""
        if isinstance(event, e.BatchTrained):
            self._publish(event.step + 1)
            if (event.step + 1) % self.config.trainer.checkpoint_every == 0:
                self.later(
                    self.latency(self.schedule.publish_s), self._checkpointed, self._trainer, event.step + 1
                )
        if isinstance(event, e.VersionCommitted):
            for host in self._hosts.values():
                host.wake()

    # --- faults ---------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        if fault.kind == "host_death" and not self._hosts:
            self._faults.append(replace(fault, at_row=len(self.rows)))  # nobody to kill yet
            return
        self.meters.faults[fault.kind] += 1
        if fault.kind == "driver_crash":
            self._crash(fault.down_s)
        elif fault.kind == "trainer_crash":
            self._trainer += 1
            self._is_trainer_up = False
            self.later(fault.down_s, self._restart_trainer, self._trainer)
        elif fault.kind == "host_death":
            name = sorted(self._hosts)[fault.host % len(self._hosts)]
            self._hosts.pop(name).is_alive = False
            self.later(0.01, self.tell, e.HostLost(name, "simulated death"))
            self.later(fault.down_s + 0.02, self._join, name)
        else:
            raise SimulationError(f"no fault of kind {fault.kind}; host_death, driver_crash or trainer_crash")

    def _crash(self, down_s: float) -> None:
        """Everything dies but the journal: all that was under way, and every message not yet told."""
        self._pending.clear()
        for host in self._hosts.values():
            host.is_alive = False
        self._hosts.clear()
        self._trainer += 1
        live = self.plane.snapshot()
        self.plane = ControlPlane.fold(self.config, (event for _, event, _ in self.rows))
        if self.plane.snapshot() != live:
            self._give_up("the folded state is not the live one")
        self.later(down_s, self._resume)

    def _resume(self) -> None:
        self._join_all()
        self._republish()
        self.tell(e.RunResumed(self.config.run.steps))

    def _restart_trainer(self, trainer: int) -> None:
        if trainer != self._trainer:
            return
        self._republish()
        if self.plane.training is not None:
            self._do(self.plane.training)

    def _give_up(self, why: str) -> NoReturn:
        waits = "; ".join(self.plane.waits())
        raise SimulationError(f"seed {self.schedule.seed}, row {len(self.rows)}: {why}: {waits}")

    # --- machines -------------------------------------------------------------------------------------------

    def _join_all(self) -> None:
        for index in range(self.config.runtime.hosts):
            self.later(0.001 * index, self._join, f"host{index}")

    def _join(self, name: str) -> None:
        self._hosts[name] = Host(name, self.machines.decoder(name, lambda: self.plane.version), self)
        self.tell(e.HostJoined(name, self.config.generation.slots))

    def sample_ended(self, event: e.SampleFinished | e.SampleFailed) -> None:
        """A host's word that a sample ended; it may be late, and it may be said twice."""
        schedule = self.schedule
        delay, again = self._noise.random(2)
        late_s = schedule.delay_s * float(self._noise.random())
        if again < schedule.duplicated:
            self.later(late_s + 0.01, self.tell, event)
        if delay < schedule.delayed:
            self.later(late_s, self.tell, event)
        else:
            self.tell(event)

    def _trained(self, trainer: int, batch: e.Train) -> None:
        if trainer == self._trainer:
            digest, metrics = self.machines.train(batch)
            self.tell(e.BatchTrained(batch.step, batch.ordinals, digest, metrics))

    def _publish(self, version: int) -> None:
        """One publication at a time, in order."""
        self._published_s = max(self._published_s, self.now_s) + self.latency(self.schedule.publish_s)
        self.later(self._published_s - self.now_s, self._committed, self._trainer, version)

    def _republish(self) -> None:
        """A new trainer process loads the last checkpoint and redoes what was trained after it."""
        self._published_s, self._is_trainer_up = self.now_s, True
        is_checkpoint_published = self.plane.version >= self._checkpoint
        for version in range(self._checkpoint + is_checkpoint_published, self.plane.trained_version + 1):
            self._publish(version)

    def _committed(self, trainer: int, version: int) -> None:
        if trainer == self._trainer:
            self.tell(e.VersionCommitted(version, self.machines.publish(version)))

    def _checkpointed(self, trainer: int, version: int) -> None:
        if trainer == self._trainer and version > self._checkpoint:
            self._checkpoint = version
            self.tell(e.CheckpointCommitted(version))

    def _weigh(self, batch: e.Train) -> None:
        """Ages of what is trained, measured from the version at the start of the update."""
        for ordinal, attempt in zip(batch.ordinals, batch.attempts, strict=True):
            for member in range(self.config.algorithm.group_size):
                spans = self._spans.pop(SampleId(ordinal, member, attempt))
                self.meters.head_ages[batch.step - spans[0].version] += 1
                for version, start, end in spans:
                    self.meters.token_ages[batch.step - version] += end - start
