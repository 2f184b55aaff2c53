"""Simulates a run under a virtual clock, with the driver's core of a real run and random latencies.

`simulate(config, schedule)` takes sizes and rules from the config. How long hosts, trainer and reward pool
take, and what they return, is drawn at random from the schedule's seed; with the machines of
`ablations.real_machines`, a real engine, task and learner compute the results instead. Equal arguments give
equal journal rows. If a run hangs or becomes inconsistent, the error names the seed and what each part of the
run waits for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np

from areal_jax.config.tree import Config
from areal_jax.control import events as e
from areal_jax.control.audit import AuditResult, Row, audit
from areal_jax.control.events import Action, Event
from areal_jax.control.machine import ControlPlane
from areal_jax.episodes.conversation import Conversation
from areal_jax.lab.simulation.machines import DrawnMachines, Machines
from areal_jax.lab.simulation.memory_journal import MemoryJournal
from areal_jax.lab.simulation.meters import Meters
from areal_jax.lab.simulation.processes import BACK_S, Rewards, SimHost, SimTrainer
from areal_jax.lab.simulation.schedule import CRASHES, PAUSES, Fault, Schedule
from areal_jax.lab.simulation.virtual_clock import DRIVER, REWARD, VirtualClock
from areal_jax.lab.simulation.workflows import DrawnWorkflows
from areal_jax.runtime.core import DriverCore, Incoming, Offer
from areal_jax.types import ArealError, Completion, Group, Prompt, SampleId, Trajectory


class SimulationError(ArealError):
    """A simulated run hung, became inconsistent or has an invalid schedule.

    The message names the seed or the remedy.
    """


@dataclass(kw_only=True)
class SimResult(Meters):
    """The result of a simulated run: the journal's rows (events with actions), their audit, and counts."""

    rows: list[Row]
    audit: AuditResult
    virtual_s: float
    """Virtual seconds from the start until every group was trained or dropped."""
    versions: int
    """Number of versions committed, without the initial one."""
    tool_calls: Counter[tuple[SampleId, int]]
    """(sample, number of its tool call) -> how often the tool was called."""


def simulate(config: Config, schedule: Schedule, machines: Machines | None = None) -> SimResult:
    """Simulate a run to its end and audit it. `machines` decode, score and train; None = random results.

    Raises SimulationError if the run hangs or becomes inconsistent; also if `machines` are given and the
    schedule has faults, because given machines cannot train a batch again after a crash. Violations that the
    audit finds are in the result; they raise nothing.
    """
    if machines is not None and schedule.faults:
        raise SimulationError(
            f"Schedule.faults has {len(schedule.faults)} faults, but the given machines cannot train a batch "
            "twice; leave Schedule.faults empty, or pass no machines"
        )
    return World(config, schedule, machines or DrawnMachines(config, schedule)).run()


class World:
    """A simulation: virtual clock, journal, and the hosts, trainer and reward process that carry out actions.

    A callback that was scheduled for a process does nothing if the process has died since, and waits while
    the process is paused.
    """

    def __init__(self, config: Config, schedule: Schedule, machines: Machines) -> None:
        self.config, self.schedule, self.machines = config, schedule, machines
        control = config.control
        self.meters = Meters(masked_above=control.max_token_age if control.over_age == "mask" else None)
        self.clock = VirtualClock()
        self._journal = MemoryJournal()
        self._driver = self._open()
        self.epoch = 0
        self._noise = np.random.default_rng([schedule.seed, 2])
        self.hosts: dict[str, SimHost] = {}
        self.workflows = DrawnWorkflows(config, schedule, self._later_in_workflow, self.deliver)
        self._trainer, self._rewards = SimTrainer(self), Rewards(self, self.workflows)
        self._faults = list(schedule.faults)
        self._finished_s = 0.0
        self._is_down = False
        """Whether a crash of the driver has ended all processes, and the run is not resumed yet."""
        self._is_watching = False
        """Whether the next check of the placement is scheduled."""

    def _open(self) -> DriverCore:
        """Returns the driver in the state that the journal has."""
        control = ControlPlane.fold(self.config, (event for _, event, _ in self._journal.rows))
        return DriverCore(self.config, control, self._journal, self.machines.prompts, self.meters, self)

    @property
    def control(self) -> ControlPlane:
        return self._driver.control

    @property
    def row(self) -> int:
        """The number of the journal's rows."""
        return len(self._journal.rows)

    def run(self) -> SimResult:
        self.clock.later(0.0, self.deliver, e.RunStarted(self.machines.publish(0), self.config.run.steps))
        self._join_all()
        self.to_end()
        rows = self._journal.rows
        result = audit(self.config, rows)
        return SimResult(
            rows=rows,
            audit=result,
            virtual_s=self._finished_s,
            versions=self.control.state.version,
            tool_calls=self.workflows.calls,
            **vars(self.meters),
        )

    def to_end(self) -> None:
        """Makes all scheduled calls. Raises SimulationError if the run does not finish."""
        while self.clock.advance():
            now_s = self.clock.now_s
            if now_s > self.schedule.max_virtual_s or self.row > self.schedule.max_rows:
                self._give_up(
                    f"the run did not finish within {now_s:.0f} s of virtual time and {self.row} journal rows"
                )
        if not self.control.state.is_finished:
            self._give_up("the run did not finish, but no event is scheduled")

    # --- events ---------------------------------------------------------------------------------------------

    def _later_in_workflow(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        self.clock.later(seconds, self.clock.with_driver, REWARD, call, *arguments)

    def latency(self, seconds: float) -> float:
        return seconds * float(np.exp(self.schedule.jitter * self._noise.standard_normal()))

    def until_heard(self) -> float:
        return BACK_S * float(self._noise.random())

    def send(self, event: Event, payload: Trajectory | Offer | None = None, epoch: int | None = None) -> None:
        if self.clock.is_paused(DRIVER):
            self.clock.later(0.0, self.send, event, payload, epoch, of=DRIVER)
        elif epoch in (None, self.epoch):
            self.deliver(event, payload)

    def deliver(self, event: Event, payload: Trajectory | Offer | None = None) -> None:
        """Record the event and the control plane's actions, carry these out, then let faults occur.

        The faults are those due by this journal row. If one is a crash of the driver, no action is carried
        out.
        """
        state, driver = self.control.state, self._driver
        before = state.version
        entries = driver.record([(event, payload)])
        trained = state.trained_version * self.config.trainer.batch_size
        known = trained + state.refunds + len(state.groups)
        if state.version < before or known != state.admitted:
            self._give_up(
                f"after {event} the version fell, or trained, dropped and open groups do not add up"
            )
        row = self.row
        due = [fault for fault in self._faults if fault.at_row < row]
        if due:
            self._faults = [fault for fault in self._faults if fault.at_row >= row]
        kinds, failed = {fault.kind for fault in due}, list[Incoming]()
        if not kinds & {"driver_crash", "controller_crash"}:
            failed = driver.act(action for entry in entries for action in entry.actions)
        if "driver_crash" not in kinds:
            self._follow(event)
        for fault in due:
            self._strike(fault)
        for event, payload in failed:
            if driver is self._driver:  # a crash loses them
                self.deliver(event, payload)

    def _follow(self, event: Event) -> None:
        """Do what follows a journaled event without an action of the control plane.

        A trained version is published and, every trainer.checkpoint_every versions, checkpointed. After a
        commit, idle hosts wake to adopt the version.
        """
        if isinstance(event, e.BatchTrained):
            self._forget(event.ordinals)
            self._trainer.trained(event.step)
        elif isinstance(event, e.VersionCommitted):
            for host in self.hosts.values():
                host.wake()
            self._watch_placement()
        if self.control.state.is_finished and not self._finished_s:
            self._finished_s = self.clock.now_s

    def _forget(self, ordinals: Sequence[int]) -> None:
        """Deletes the trajectories of groups that were trained."""
        self._journal.forget(ordinals)

    def _watch_placement(self) -> None:
        if not self._is_watching and self.control.orchestrator.is_due():
            self._is_watching = True
            self.clock.later(self.schedule.placed_every_s, self._placement_due)

    def _placement_due(self) -> None:
        self._is_watching = False
        if self.control.orchestrator.is_due():
            self.send(e.PlacementDue())
            self._watch_placement()

    # --- the endpoints of the driver's core -----------------------------------------------------------------

    def command(self, action: e.HostCommand, payload: Any = None) -> None:
        if (host := self.hosts.get(action.host)) is not None:
            host.command(action, payload)

    def score(self, action: e.Score, prompt: Prompt, completions: Sequence[Completion]) -> None:
        self._rewards.score(action, prompt, completions)

    def train(self, action: e.Train, groups: tuple[Group, ...]) -> None:
        self._trainer.train(action, groups)

    def hold(self, action: e.Hold) -> None:
        self.meters.holds += 1

    def begin(self, sample: SampleId, prompt: Prompt, conversation: Conversation) -> None:
        self._rewards.begin(sample, prompt, conversation)

    def answer(self, sample: SampleId, turn: int, conversation: Conversation) -> None:
        self.workflows.answer(sample, turn, conversation)

    def call(self, sample: SampleId, call: int) -> None:
        self.workflows.call(sample, call)

    def end(self, ordinal: int) -> None:
        self.workflows.end(ordinal)

    # --- faults ---------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        # Without a host, or while every process is down, the fault occurs after a later row.
        is_of_host = fault.kind in ("host_death", "host_pause", "kv_short")
        if self._is_down or (is_of_host and not self.hosts):
            self._faults.append(replace(fault, at_row=self.row))
            return
        self.meters.faults[fault.kind] += 1
        match fault.kind:
            case "driver_crash":
                self._crash(fault.down_s)
            case "controller_crash":
                self._crash_controller(fault.down_s)
            case "driver_pause":
                self.clock.pause(DRIVER, fault.down_s)
            case "trainer_crash":
                self._trainer.crash(fault.down_s)
            case "trainer_pause":
                self._trainer.pause(fault.down_s)
            case "reward_pause":
                self._rewards.pause(fault.down_s)
            case "host_pause":
                self._struck(fault).pause(fault.down_s)
            case "kv_short":
                self.deliver(e.KVShort(self._struck(fault).name))
            case "host_death":
                host = self._struck(fault)
                del self.hosts[host.name]
                host.die()
                self.clock.later(0.01, self.send, e.HostLost(host.name, "simulated death"))
                again = self.clock.with_driver, host.name, self._join, host.name
                self.clock.later(fault.down_s + 0.02, *again)
            case _:
                raise SimulationError(
                    f"Schedule.faults: unknown kind {fault.kind}; use one of {', '.join([*CRASHES, *PAUSES])}"
                )

    def _struck(self, fault: Fault) -> SimHost:
        return self.hosts[sorted(self.hosts)[fault.host % len(self.hosts)]]

    def _crash(self, down_s: float) -> None:
        """Simulate a crash of the driver, which loses all work in progress; resume from the journal later.

        `down_s`: virtual seconds until the run resumes. Raises SimulationError if the control plane's state,
        rebuilt from the journal, differs from the state before the crash.
        """
        self.clock.clear()
        self._is_watching, self._is_down = False, True
        for host in self.hosts.values():
            host.is_alive = False
        self.hosts.clear()
        self._rewards.restart()
        self._trainer.end()
        self._fold()
        self.clock.later(down_s, self._resume)

    def _crash_controller(self, down_s: float) -> None:
        """Simulate a crash of the controller's process alone; a new one resumes from the journal.

        The other processes go on with what they have. The new controller refuses what hosts have sent since,
        as it cannot know of it; all other results reach it.
        """
        self._fold()
        self.epoch += 1
        for host in self.hosts.values():
            host.unread.clear()
            seconds = down_s + self.latency(0.01)
            self.clock.later(seconds, self.clock.with_driver, host.name, host.join_again)
        self.hosts.clear()
        self.workflows.crash()
        self.clock.later(down_s, self.deliver, e.RunResumed(self.config.run.steps))
        self.clock.pause(DRIVER, down_s + 1e-3)  # what has come meanwhile is heard after RunResumed

    def _fold(self) -> None:
        """Rebuild the driver from the journal. Raises SimulationError if its state is not the one before."""
        live = self.control.snapshot()
        self._driver = self._open()
        if self.control.snapshot() != live:
            self._give_up("the state folded from the journal differs from the live one")

    def _resume(self) -> None:
        self._is_down = False
        self._join_all()
        self._trainer.start()
        self.deliver(e.RunResumed(self.config.run.steps))

    def act(self, actions: Iterable[Action]) -> None:
        for event, payload in self._driver.act(actions):
            self.deliver(event, payload)

    def _give_up(self, reason: str) -> NoReturn:
        waits = "; ".join(self.control.waits())
        raise SimulationError(f"seed {self.schedule.seed}, journal row {self.row}: {reason}: {waits}")

    # --- hosts ----------------------------------------------------------------------------------------------

    def _join_all(self) -> None:
        for index in range(self.config.runtime.hosts):
            self.clock.later(0.001 * index, self._join, f"host{index}", of=DRIVER)

    def _join(self, name: str) -> None:
        decoder = self.machines.decoder(name, lambda: self.control.state.version)
        self.hosts[name] = SimHost(name, decoder, self)
        self.deliver(e.HostJoined(name, self.config.generation.rollout_slots))

    def sample_ended(self, event: Event, trajectory: Trajectory | None, epoch: int) -> None:
        schedule = self.schedule
        delay, again = self._noise.random(2)
        late_s = schedule.delay_s * float(self._noise.random())
        if again < schedule.duplicated:
            self.clock.later(late_s + 0.01, self.send, event, trajectory, epoch)
        if delay < schedule.delayed:
            self.clock.later(late_s, self.send, event, trajectory, epoch)
        else:
            self.send(event, trajectory, epoch)
