"""Simulates a run under a virtual clock, with the driver's core of a real run and random latencies.

`simulate(config, schedule)` takes sizes and rules from the config. How long hosts, trainer and reward pool
take, and what they return, is drawn at random from the schedule's seed; with the machines of
`simulation.real_machines`, a real engine, task and learner compute the results instead. Equal arguments give
equal journal rows. If a run hangs or becomes inconsistent, the error names the seed and what each part of the
run waits for.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np

from areal_jax.config.tree import Config
from areal_jax.control import events as e
from areal_jax.control.audit import AuditResult, Row, audit
from areal_jax.control.events import Action, Event
from areal_jax.control.machine import ControlPlane
from areal_jax.control.reward_gate import Gates
from areal_jax.episodes.conversation import Conversation
from areal_jax.runtime.core import DriverCore, Incoming, Offer
from areal_jax.simulation.decoders import Call, Decoder
from areal_jax.simulation.machines import DrawnMachines, Machines
from areal_jax.simulation.memory_journal import MemoryJournal
from areal_jax.simulation.schedule import Fault, Schedule
from areal_jax.simulation.workflows import DrawnWorkflows
from areal_jax.trajectories.paths import spans_of
from areal_jax.types import ArealError, Completion, Group, Prompt, SampleId, Trajectory

DRIVER, TRAINER, REWARD = "driver", "trainer", "reward"
"""The processes that can be paused, in addition to the hosts."""
BACK_S = 0.2
"""Seconds within which the driver notices that a process is back: about as long as a sample takes."""


class SimulationError(ArealError):
    """A simulated run hung, became inconsistent or has an invalid schedule.

    The message names the seed or the remedy.
    """


@dataclass
class Meters:
    """Counters of a simulated run; the driver calls `see` for each event and `make` for each batch."""

    head_ages: Counter[int] = field(default_factory=Counter)
    """Number of trained samples by age: version at the start of the update - version of the first token."""
    token_ages: Counter[int] = field(default_factory=Counter)
    """Number of trained tokens by age: version at the start of the update - version of the token."""
    faults: Counter[str] = field(default_factory=Counter)
    """Number of faults that occurred, by kind."""
    masked_above: int | None = None
    """Largest age of tokens that are trained with control.over_age=mask; None: all ages are trained."""
    masked_tokens: int = 0
    """Number of tokens of trained samples that control.over_age=mask kept out of training."""
    holds: int = 0
    """Number of batches that control.over_age=hold made wait."""
    interruptions: int = 0
    swaps: int = 0
    """Number of version changes on hosts; adopting version 0 is not counted."""
    recomputed_tokens: int = 0
    """Number of tokens for which the KV was recomputed at version changes."""
    held: Counter[int] = field(default_factory=Counter)
    """Number of decode calls, by how many versions of the parameters the host had in memory."""
    tokens: int = 0
    """Number of tokens decoded, including tokens of samples that later were lost with their host."""
    host_busy_s: float = 0.0
    """Virtual seconds that hosts spent working, summed over hosts."""

    def see(self, event: Event, actions: Iterable[Action]) -> None:
        if isinstance(event, e.HostAdopted):
            self.swaps += event.version > 0
            self.interruptions += event.interrupted

    def make(
        self, step: int, groups: Sequence[Group], trained: dict[str, float], digest: str, gates: Gates = ()
    ) -> dict[str, float]:
        """Count the ages of a trained batch's tokens; return `trained`, the trainer's metrics, unchanged.

        An age is `step`, the version at the start of the update, minus the token's version.
        """
        for trajectory in (t for group in groups for t in group.trajectories):
            spans = spans_of(trajectory)
            self.head_ages[step - spans[0].version] += 1
            for version, start, end in spans:
                if self.masked_above is not None and step - version > self.masked_above:
                    self.masked_tokens += end - start
                else:
                    self.token_ages[step - version] += end - start
        return trained


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


class Host:
    """A simulated host, which steps its decoder while there is work.

    The host reports the results of a step once the step's virtual time has passed.
    """

    def __init__(self, name: str, decoder: Decoder, world: World) -> None:
        self.name, self.decoder, self.world = name, decoder, world
        self.is_alive = True
        self.epoch = world.epoch
        """The epoch of the driver in which the host joined; the driver refuses events of earlier ones."""
        self.unread: list[tuple[e.HostCommand, Any]] = []
        """The commands that a paused host has not read yet."""
        self.adopted: e.HostAdopted | None = None
        self._open: dict[SampleId, bool] = {}
        """The unfinished samples, and whether the host goes on with them after it was lost."""
        self._is_busy = False
        self._moves: list[e.Move] = []
        self._fetches: list[e.Fetch] = []
        """Those of which the KV is under way."""

    def command(self, action: e.HostCommand, payload: Any) -> None:
        """Carry out a command: a Move once the decode call under way has ended, any other at once.

        A paused host does so when it goes on.
        """
        if self.world.is_paused(self.name):
            self.unread.append((action, payload))
            return
        decoder = self.decoder
        match action:
            case e.Dispatch(samples):
                self._open |= dict.fromkeys(samples, payload is not None)
                decoder.take(action, payload)
            case e.Continue(sample):
                self._open[sample] = False
                decoder.go_on(action, payload)
            case e.Cancel(samples):
                self._open = {sample: own for sample, own in self._open.items() if sample not in samples}
                self._fetches = [fetch for fetch in self._fetches if not {*samples} & {*fetch.samples}]
                decoder.cancel(samples)
            case e.Serve(_, version):
                decoder.serve(version)
            case e.TakeBack(samples):
                self._moves = [move for move in self._moves if move.samples != samples]
                decoder.take_back(samples)
            case e.Move(samples):
                self._open |= dict.fromkeys(samples, False)
                self._moves.append(action)
            case e.Fetch(samples):
                self._open |= dict.fromkeys(samples, False)
                self._fetches.append(action)
                self._later(self.world.latency(self.world.schedule.move_s), self._fetched, action, payload)
                return
        self.wake()

    def go_on(self) -> None:
        """Carry out the commands that have come during a pause."""
        unread, self.unread = self.unread, []
        for action, payload in unread:
            self.command(action, payload)

    def join_again(self) -> tuple[SampleId, ...]:
        """Enter the driver's epoch; return the samples that the host goes on with, and forget the others."""
        self.epoch, self._moves, self._fetches = self.world.epoch, [], []
        self.decoder.cancel([sample for sample, is_kept in self._open.items() if not is_kept])
        self._open = {sample: True for sample, is_kept in self._open.items() if is_kept}
        return tuple(self._open)

    def _later(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        self.world.later(seconds, call, *arguments, of=self.name)

    def _send(self, event: Event, payload: Offer | None = None) -> None:
        self.world.send(event, payload, self.epoch)

    def _fetched(self, fetch: e.Fetch, offer: Offer) -> None:
        if not self.is_alive or fetch not in self._fetches:
            return
        self._fetches.remove(fetch)
        reason = self.decoder.take_over(offer)
        answer = (fetch.samples, self.name, fetch.source)
        self._send(e.MoveFailed(*answer, reason) if reason else e.SamplesMoved(*answer))
        self.wake()

    def _hand_over(self) -> None:
        moves, self._moves = self._moves, []
        for move in moves:
            found, offer = self.decoder.hand_over(move.samples)
            if found and self.is_alive:  # a fault may strike as one of them is delivered
                self._send(e.SamplesOffered(found, self.name, move.target), offer)

    def wake(self) -> None:
        """Begin the next step, unless a step is under way or the host is dead."""
        if self.is_alive and not self._is_busy:
            self._is_busy = True
            self._later(0.0, self._step)

    def _step(self) -> None:
        """Begin a decode call and schedule its end; first the host may adopt the newest committed version."""
        if not self.is_alive:
            return
        world, schedule = self.world, self.world.schedule
        self._hand_over()
        if not self.is_alive:
            return
        call = self.decoder.step()
        seconds = 0.0
        if call.adopted is not None:
            world.meters.recomputed_tokens += call.recomputed
            seconds = world.latency(schedule.swap_s + call.recomputed * schedule.recompute_token_s)
            self.adopted = call.adopted
            self._send(call.adopted)
            if not self.is_alive:  # a fault struck as the adoption was delivered
                return
        if call.live:
            steps = world.config.generation.decode_steps
            load = call.passes + call.live / schedule.crowd_slots
            seconds += call.prefills * schedule.prefill_s + world.latency(schedule.token_s) * steps * load
            world.meters.held[call.held] += 1
        elif call.adopted is None:
            self._is_busy = False
            return
        world.meters.host_busy_s += seconds
        self._later(seconds, self._decoded, call)

    def _decoded(self, call: Call) -> None:
        if self.is_alive:
            self.world.meters.tokens += call.tokens
        for event, trajectory in call.ended:
            # After a turn the host keeps the sample's KV.
            if isinstance(event, e.SampleFinished | e.SampleFailed):
                self._open.pop(event.sample, None)
            if self.is_alive:  # a fault may strike as each of them is delivered
                self.world.sample_ended(event, trajectory, self.epoch)
        if self.is_alive:
            self._step()


class World:
    """A simulation: virtual clock, journal, and the hosts, trainer and reward pool that carry out actions.

    A callback that was scheduled for a process does nothing if the process has died since, and waits while
    the process is paused.
    """

    def __init__(self, config: Config, schedule: Schedule, machines: Machines) -> None:
        self.config, self.schedule, self.machines = config, schedule, machines
        control = config.control
        self.meters = Meters(masked_above=control.max_token_age if control.over_age == "mask" else None)
        self.now_s = 0.0
        self._journal = MemoryJournal()
        self._core = self._driver(ControlPlane(config))
        self._pending: list[tuple[float, int, str, Callable[..., None], tuple[Any, ...]]] = []
        self._calls = 0
        self._paused: dict[str, float] = {}
        """Process -> time at which its pause ends."""
        self.epoch = 0
        """Number of crashes of the driver that the other processes outlived."""
        self._noise = np.random.default_rng([schedule.seed, 2])
        self.workflows = DrawnWorkflows(config, schedule, self._later_in_workflow, self.deliver)
        self._faults = list(schedule.faults)
        self._hosts: dict[str, Host] = {}
        self._trainer = 0
        """Number of the current trainer process; a crash adds 1. Results of earlier processes are ignored."""
        self._is_trainer_up = True
        self._begun = -1
        """Step of the newest batch that the trainer has begun; it ignores that batch if it comes again."""
        self._unread: tuple[e.Train, tuple[Group, ...]] | None = None
        """The batch that the paused trainer has not read yet."""
        self._is_reward_up = True
        self._orphans: set[SampleId] = set()
        """The samples of which the workflows run again when the reward process comes back."""
        self._published_s = 0.0
        self._checkpoint = 0
        self._finished_s = 0.0
        self._is_watching = False
        """Whether the next check of the placement is scheduled."""

    def _driver(self, control: ControlPlane) -> DriverCore:
        return DriverCore(self.config, control, self._journal, self.machines.prompts, self.meters, self)

    @property
    def control(self) -> ControlPlane:
        return self._core.control

    def run(self) -> SimResult:
        self.later(0.0, self.deliver, e.RunStarted(self.machines.publish(0), self.config.run.steps))
        self._join_all()
        rows = self._journal.rows
        while self._pending:
            self.now_s, number, of, call, arguments = heapq.heappop(self._pending)
            if self.is_paused(of):
                heapq.heappush(self._pending, (self._paused[of], number, of, call, arguments))
                continue
            call(*arguments)
            if self.now_s > self.schedule.max_virtual_s or len(rows) > self.schedule.max_rows:
                self._give_up(
                    f"the run did not finish within {self.now_s:.0f} s of virtual time and {len(rows)} "
                    "journal rows"
                )
        if not self.control.state.is_finished:
            self._give_up("the run did not finish, but no event is scheduled")
        result = audit(self.config, rows)
        return SimResult(
            rows=rows,
            audit=result,
            virtual_s=self._finished_s,
            versions=self.control.state.version,
            tool_calls=self.workflows.calls,
            **vars(self.meters),
        )

    # --- clock and events -----------------------------------------------------------------------------------

    def later(self, seconds: float, call: Callable[..., None], *arguments: Any, of: str = "") -> None:
        """Schedule a call, by the process `of`; "": by none that can be paused."""
        self._calls += 1  # calls at equal times run in the order in which they were scheduled
        heapq.heappush(self._pending, (self.now_s + seconds, self._calls, of, call, arguments))

    def _later_in_workflow(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        self.later(seconds, self._with_driver, REWARD, call, *arguments)

    def _with_driver(self, process: str, call: Callable[..., None], *arguments: Any) -> None:
        """Make a call for which a process and the driver exchange messages, once neither is paused."""
        for paused in (process, DRIVER):
            if self.is_paused(paused):
                return self.later(0.0, self._with_driver, process, call, *arguments, of=paused)
        call(*arguments)

    def is_paused(self, process: str) -> bool:
        return self._paused.get(process, 0.0) > self.now_s

    def latency(self, seconds: float) -> float:
        return seconds * float(np.exp(self.schedule.jitter * self._noise.standard_normal()))

    def send(self, event: Event, payload: Trajectory | Offer | None = None, epoch: int | None = None) -> None:
        """Deliver a process's event to the driver, once that is not paused.

        `epoch`: that of the process, if the driver refuses its events of earlier epochs.
        """
        if self.is_paused(DRIVER):
            self.later(0.0, self.send, event, payload, epoch, of=DRIVER)
        elif epoch in (None, self.epoch):
            self.deliver(event, payload)

    def deliver(self, event: Event, payload: Trajectory | Offer | None = None) -> None:
        """Record the event and the control plane's actions, carry these out, then let faults occur.

        The faults are those due by this journal row. If one is a crash of the driver, no action is carried
        out.
        """
        state, core = self.control.state, self._core
        before = state.version
        entries = core.record([(event, payload)])
        trained = state.trained_version * self.config.trainer.batch_size
        known = trained + state.refunds + len(state.groups)
        if state.version < before or known != state.admitted:
            self._give_up(
                f"after {event} the version fell, or trained, dropped and open groups do not add up"
            )
        row = len(self._journal.rows)
        due = [fault for fault in self._faults if fault.at_row < row]
        if due:
            self._faults = [fault for fault in self._faults if fault.at_row >= row]
        kinds, failed = {fault.kind for fault in due}, list[Incoming]()
        if not kinds & {"driver_crash", "controller_crash"}:
            failed = self._core.act(action for entry in entries for action in entry.actions)
        if "driver_crash" not in kinds:
            self._follow(event)
        for fault in due:
            self._strike(fault)
        for event, payload in failed:
            if core is self._core:  # a crash loses them
                self.deliver(event, payload)

    def _follow(self, event: Event) -> None:
        """Do what follows a journaled event without an action of the control plane.

        A trained version is published and, every trainer.checkpoint_every versions, checkpointed. After a
        commit, idle hosts wake to adopt the version.
        """
        if isinstance(event, e.BatchTrained):
            self._journal.forget(event.ordinals)
            version = event.step + 1
            self._publish(version)
            if version % self.config.trainer.checkpoint_every == 0:
                seconds = self.latency(self.schedule.publish_s)
                self.later(seconds, self._checkpointed, self._trainer, version, of=TRAINER)
        elif isinstance(event, e.VersionCommitted):
            for host in self._hosts.values():
                host.wake()
            self._watch_placement()
        if self.control.state.is_finished and not self._finished_s:
            self._finished_s = self.now_s

    def _watch_placement(self) -> None:
        if not self._is_watching and self.control.orchestrator.is_due():
            self._is_watching = True
            self.later(self.config.control.placement_every_s, self._placement_due)

    def _placement_due(self) -> None:
        self._is_watching = False
        if self.control.orchestrator.is_due():
            self.send(e.PlacementDue())
            self._watch_placement()

    # --- the endpoints of the driver's core -----------------------------------------------------------------

    def command(self, action: e.HostCommand, payload: Any = None) -> None:
        if (host := self._hosts.get(action.host)) is not None:
            host.command(action, payload)

    def score(self, action: e.Score, prompt: Prompt, completions: Sequence[Completion]) -> None:
        if self._is_reward_up:  # otherwise it gets the group when it comes back
            seconds = self.latency(self.schedule.reward_s)
            self.later(seconds, self.send, self.machines.score(action, prompt, completions), of=REWARD)

    def train(self, action: e.Train, groups: tuple[Group, ...]) -> None:
        # Otherwise the trainer gets the batch after its restart, or when it comes back.
        if not self._is_trainer_up or action.step <= self._begun:
            return
        if self.is_paused(TRAINER):
            self._unread = action, groups
            return
        self._begun = action.step
        seconds = self.latency(self.schedule.train_s)
        self.later(seconds, self._trained, self._trainer, action, groups, of=TRAINER)

    def hold(self, action: e.Hold) -> None:
        self.meters.holds += 1

    def begin(self, sample: SampleId, prompt: Prompt, conversation: Conversation) -> None:
        if self._is_reward_up:
            self.workflows.begin(sample, prompt, conversation)
        else:
            self._orphans.add(sample)

    def answer(self, sample: SampleId, turn: int, conversation: Conversation) -> None:
        self.workflows.answer(sample, turn, conversation)

    def call(self, sample: SampleId, call: int) -> None:
        self.workflows.call(sample, call)

    def end(self, ordinal: int) -> None:
        self.workflows.end(ordinal)

    # --- faults ---------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        # Without a host, the fault occurs after a later row.
        if fault.kind in ("host_death", "host_pause", "kv_short") and not self._hosts:
            self._faults.append(replace(fault, at_row=len(self._journal.rows)))
            return
        self.meters.faults[fault.kind] += 1
        if fault.kind == "driver_crash":
            self._crash(fault.down_s)
        elif fault.kind == "controller_crash":
            self._crash_controller(fault.down_s)
        elif fault.kind == "driver_pause":
            self._pause(DRIVER, fault.down_s)
        elif fault.kind == "trainer_crash":
            self._end_trainer()
            self._is_trainer_up = False
            self.later(fault.down_s, self._restart_trainer, self._trainer, of=DRIVER)
        elif fault.kind == "trainer_pause":
            self._pause(TRAINER, fault.down_s, self._lose_trainer, self._trainer_goes_on, self._trainer)
        elif fault.kind == "reward_pause":
            self._pause(REWARD, fault.down_s, self._lose_reward, self._reward_goes_on)
        elif fault.kind == "host_pause":
            name = sorted(self._hosts)[fault.host % len(self._hosts)]
            self._pause(name, fault.down_s, self._lose_host, self._host_goes_on, self._hosts[name])
        elif fault.kind == "kv_short":
            self.deliver(e.KVShort(sorted(self._hosts)[fault.host % len(self._hosts)]))
        elif fault.kind == "host_death":
            name = sorted(self._hosts)[fault.host % len(self._hosts)]
            self._hosts.pop(name).is_alive = False
            self.later(0.01, self.send, e.HostLost(name, "simulated death"))
            self._paused.pop(name, None)
            self.later(fault.down_s + 0.02, self._with_driver, name, self._join, name)
        else:
            raise SimulationError(
                f"Schedule.faults: unknown kind {fault.kind}; use host_death, host_pause, kv_short, "
                "driver_crash, driver_pause, controller_crash, trainer_crash, trainer_pause or reward_pause"
            )

    def _crash(self, down_s: float) -> None:
        """Simulate a crash of the driver, which loses all work in progress; resume from the journal later.

        `down_s`: virtual seconds until the run resumes. Raises SimulationError if the control plane's state,
        rebuilt from the journal, differs from the state before the crash.
        """
        self._pending.clear()
        self._paused.clear()
        self._is_watching = False
        for host in self._hosts.values():
            host.is_alive = False
        self._hosts.clear()
        self.workflows.crash()
        self._is_reward_up = True
        self._orphans.clear()
        self._end_trainer()
        self._fold()
        self.later(down_s, self._resume)

    def _crash_controller(self, down_s: float) -> None:
        """Simulate a crash of the controller's process alone; a new one resumes from the journal.

        The other processes go on with what they have. The new controller refuses what hosts have sent since,
        as it cannot know of it; all other results reach it.
        """
        self._fold()
        self.epoch += 1
        for host in self._hosts.values():
            host.unread.clear()
            self.later(down_s + self.latency(0.01), self._with_driver, host.name, self._register, host)
        self._hosts.clear()
        self.workflows.crash()
        self.later(down_s, self.deliver, e.RunResumed(self.config.run.steps))
        self._pause(DRIVER, down_s + 1e-3)  # what has come meanwhile is heard after RunResumed

    def _fold(self) -> None:
        """Rebuild the driver from the journal. SimulationError if its state is another one than before."""
        live = self.control.snapshot()
        self._core = self._driver(
            ControlPlane.fold(self.config, (event for _, event, _ in self._journal.rows))
        )
        if self.control.snapshot() != live:
            self._give_up("the state folded from the journal differs from the live one")

    def _resume(self) -> None:
        self._join_all()
        self._republish()
        self.deliver(e.RunResumed(self.config.run.steps))

    def _end_trainer(self) -> None:
        self._trainer += 1
        self._begun, self._unread = -1, None
        self._paused.pop(TRAINER, None)

    def _restart_trainer(self, trainer: int) -> None:
        if trainer == self._trainer:
            self._paused.pop(TRAINER, None)
            self._republish()
            self._ask_again(trainer)

    def _ask_again(self, trainer: int) -> None:
        if trainer != self._trainer:
            return
        self._is_trainer_up = True
        if (batch := self.control.state.training) is not None:
            self._core.act([batch])

    # --- pauses ---------------------------------------------------------------------------------------------

    def _pause(
        self,
        process: str,
        down_s: float,
        lose: Callable[..., None] | None = None,
        go_on: Callable[..., None] | None = None,
        *arguments: Any,
    ) -> None:
        """Pause a process for `down_s` seconds, after which `go_on` is called.

        If the driver finds it lost before, `lose` is called then. The driver itself is never lost.
        """
        self._paused[process] = max(self._paused.get(process, 0.0), self.now_s + down_s)
        if lose is not None and down_s > self.schedule.lost_s:
            self.later(self.schedule.lost_s, lose, *arguments, of=DRIVER)
        if go_on is not None:
            self.later(down_s, go_on, *arguments)

    def _until_heard(self) -> float:
        return BACK_S * float(self._noise.random())

    def _lose_host(self, host: Host) -> None:
        if self.is_paused(host.name) and self._hosts.get(host.name) is host:
            del self._hosts[host.name]
            host.unread.clear()
            self.deliver(e.HostLost(host.name, "simulated pause"))

    def _host_goes_on(self, host: Host) -> None:
        if not host.is_alive or self.is_paused(host.name):
            return
        if self._hosts.get(host.name) is host:
            host.go_on()
        else:
            self.later(self._until_heard(), self._with_driver, host.name, self._register, host)

    def _register(self, host: Host) -> None:
        """Let a host join again, which was lost although it lives, or has outlived the controller."""
        if not host.is_alive or host.name in self._hosts:
            return
        self._hosts[host.name] = host
        self.deliver(e.HostJoined(host.name, self.config.generation.rollout_slots, host.join_again()))
        if host.adopted is not None:
            self.send(replace(host.adopted, interrupted=0), epoch=host.epoch)
        host.wake()

    def _lose_trainer(self, trainer: int) -> None:
        if trainer == self._trainer and self.is_paused(TRAINER):
            self._is_trainer_up, self._unread = False, None

    def _trainer_goes_on(self, trainer: int) -> None:
        if trainer != self._trainer or self.is_paused(TRAINER):
            return
        if not self._is_trainer_up:
            self.later(self._until_heard(), self._with_driver, TRAINER, self._ask_again, trainer)
        elif self._unread is not None:
            unread, self._unread = self._unread, None
            self.train(*unread)

    def _lose_reward(self) -> None:
        if self.is_paused(REWARD):
            self._is_reward_up = False
            self._orphans |= self.workflows.crash()

    def _reward_goes_on(self) -> None:
        if not self._is_reward_up and not self.is_paused(REWARD):
            self.later(self._until_heard(), self._with_driver, REWARD, self._reward_again)

    def _reward_again(self) -> None:
        """Let the reward process come back: it gets the groups again, and runs its workflows again."""
        self._is_reward_up = True
        state, (orphans, self._orphans) = self.control.state, (self._orphans, set())
        scoring = [group for group in state.groups.values() if group.stage == "scoring"]
        again: list[Action] = [e.Score(group.ordinal, group.attempt) for group in scoring]
        again += [e.Rerun(sample) for sample in sorted(orphans) if state.is_open(sample)]
        for event, payload in self._core.act(again):
            self.deliver(event, payload)

    def _give_up(self, reason: str) -> NoReturn:
        waits, row = "; ".join(self.control.waits()), len(self._journal.rows)
        raise SimulationError(f"seed {self.schedule.seed}, journal row {row}: {reason}: {waits}")

    # --- machines -------------------------------------------------------------------------------------------

    def _join_all(self) -> None:
        for index in range(self.config.runtime.hosts):
            self.later(0.001 * index, self._join, f"host{index}", of=DRIVER)

    def _join(self, name: str) -> None:
        self._hosts[name] = Host(name, self.machines.decoder(name, lambda: self.control.state.version), self)
        self.deliver(e.HostJoined(name, self.config.generation.rollout_slots))

    def sample_ended(self, event: Event, trajectory: Trajectory | None, epoch: int) -> None:
        """Deliver the event of an ended sample at once or late, once or twice, at random by the schedule."""
        schedule = self.schedule
        delay, again = self._noise.random(2)
        late_s = schedule.delay_s * float(self._noise.random())
        if again < schedule.duplicated:
            self.later(late_s + 0.01, self.send, event, trajectory, epoch)
        if delay < schedule.delayed:
            self.later(late_s, self.send, event, trajectory, epoch)
        else:
            self.send(event, trajectory, epoch)

    def _trained(self, trainer: int, batch: e.Train, groups: tuple[Group, ...]) -> None:
        if trainer == self._trainer:
            digest, metrics = self.machines.train(batch, groups)
            self.send(e.BatchTrained(batch.step, batch.ordinals, digest, metrics))

    def _publish(self, version: int) -> None:
        """Schedule the time from which hosts can load a version; versions are published one after another."""
        self._published_s = max(self._published_s, self.now_s) + self.latency(self.schedule.publish_s)
        seconds = self._published_s - self.now_s
        self.later(seconds, self._committed, self._trainer, version, of=TRAINER)

    def _republish(self) -> None:
        """Start a new trainer process: load the last checkpoint, and publish newer versions once more."""
        self._published_s, self._is_trainer_up = self.now_s, True
        state = self.control.state
        is_checkpoint_published = state.version >= self._checkpoint
        for version in range(self._checkpoint + is_checkpoint_published, state.trained_version + 1):
            self._publish(version)

    def _committed(self, trainer: int, version: int) -> None:
        if trainer == self._trainer:
            self.send(e.VersionCommitted(version, self.machines.publish(version)))

    def _checkpointed(self, trainer: int, version: int) -> None:
        if trainer == self._trainer and version > self._checkpoint:
            self._checkpoint = version
            self.send(e.CheckpointCommitted(version))
