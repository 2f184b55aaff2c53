"""The processes of a simulated run: hosts, trainer and reward process, with their crashes and pauses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from areal_jax.config.tree import Config
from areal_jax.control import events as e
from areal_jax.control.events import Action, Event
from areal_jax.control.machine import ControlPlane
from areal_jax.episodes.conversation import Conversation
from areal_jax.lab.simulation.decoders import Decoder, StepResult
from areal_jax.lab.simulation.machines import Machines
from areal_jax.lab.simulation.meters import Meters
from areal_jax.lab.simulation.schedule import Schedule
from areal_jax.lab.simulation.virtual_clock import DRIVER, REWARD, TRAINER, VirtualClock
from areal_jax.lab.simulation.workflows import DrawnWorkflows
from areal_jax.runtime.core import Offer
from areal_jax.types import Completion, Group, Prompt, SampleId, Trajectory

BACK_S = 0.2
"""Seconds within which the driver notices that a process is back: about as long as a sample takes."""


class Surroundings(Protocol):
    """`lab.simulation.world.World`, as its hosts, trainer and reward process see it."""

    config: Config
    schedule: Schedule
    machines: Machines
    meters: Meters
    clock: VirtualClock
    hosts: dict[str, SimHost]
    """The hosts that the driver counts as part of the run, by name."""
    epoch: int
    """Number of crashes of the driver that the other processes outlived."""

    @property
    def control(self) -> ControlPlane: ...

    def latency(self, seconds: float) -> float:
        """Return these seconds times a random factor, drawn from the schedule's seed."""
        ...

    def until_heard(self) -> float:
        """Return after how many seconds the driver notices that a lost process is back."""
        ...

    def send(self, event: Event, payload: Trajectory | Offer | None = None, epoch: int | None = None) -> None:
        """Deliver a process's event to the driver, once that is not paused.

        `epoch`: that of the process, if the driver refuses its events of earlier epochs.
        """
        ...

    def deliver(self, event: Event, payload: Trajectory | Offer | None = None) -> None:
        """Record the event and the control plane's actions, carry these out, then let faults occur."""
        ...

    def sample_ended(self, event: Event, trajectory: Trajectory | None, epoch: int) -> None:
        """Deliver the event of an ended sample at once or late, once or twice, at random by the schedule."""
        ...

    def act(self, actions: Iterable[Action]) -> None:
        """Carry out actions that no event of this moment gave."""
        ...


def _pause(
    world: Surroundings, process: str, down_s: float, lose: Callable[[], None], go_on: Callable[[], None]
) -> None:
    """Pause a process: `lose` is called after Schedule.lost_s, if that is earlier, and `go_on` at the end."""
    world.clock.pause(process, down_s)
    if down_s > (lost_s := world.schedule.lost_s):
        world.clock.later(lost_s, lose, of=DRIVER)
    world.clock.later(down_s, go_on)


class SimHost:
    """A simulated host, which steps its decoder while there is work.

    The host reports the results of a step once the step's virtual time has passed.
    """

    def __init__(self, name: str, decoder: Decoder, world: Surroundings) -> None:
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
        if self.world.clock.is_paused(self.name):
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

    def _later(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        self.world.clock.later(seconds, call, *arguments, of=self.name)

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

    def _decoded(self, call: StepResult) -> None:
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

    # --- death, pauses, and coming back ---------------------------------------------------------------------

    def die(self) -> None:
        self.is_alive = False
        self.world.clock.end_pause(self.name)

    def pause(self, down_s: float) -> None:
        """Pause the host; the driver finds it lost after Schedule.lost_s."""
        _pause(self.world, self.name, down_s, self._lose, self._go_on)

    def _lose(self) -> None:
        """Let the driver find the host lost, if it is still paused."""
        if self.world.clock.is_paused(self.name) and self._is_joined:
            del self.world.hosts[self.name]
            self.unread.clear()
            self.world.deliver(e.HostLost(self.name, "simulated pause"))

    def _go_on(self) -> None:
        """Carry out the commands that have come during a pause, or join again if the host was lost."""
        clock = self.world.clock
        if not self.is_alive or clock.is_paused(self.name):
            return
        if not self._is_joined:
            clock.later(self.world.until_heard(), clock.with_driver, self.name, self.join_again)
            return
        unread, self.unread = self.unread, []
        for action, payload in unread:
            self.command(action, payload)

    def join_again(self) -> None:
        """Join again, after the host was lost although it lives, or has outlived the controller.

        The host enters the driver's epoch, names the samples that it goes on with, and forgets the others.
        """
        if not self.is_alive or self.name in self.world.hosts:
            return
        self.world.hosts[self.name] = self
        self.epoch, self._moves, self._fetches = self.world.epoch, [], []
        self.decoder.cancel([sample for sample, is_kept in self._open.items() if not is_kept])
        self._open = {sample: True for sample, is_kept in self._open.items() if is_kept}
        slots = self.world.config.generation.rollout_slots
        self.world.deliver(e.HostJoined(self.name, slots, tuple(self._open)))
        if self.adopted is not None:
            self._send(replace(self.adopted, interrupted=0))
        self.wake()

    @property
    def _is_joined(self) -> bool:
        return self.world.hosts.get(self.name) is self


class SimTrainer:
    """One trainer process after another: a crash ends one, and its results are ignored from then on."""

    def __init__(self, world: Surroundings) -> None:
        self._world, self._clock = world, world.clock
        self._process = 0
        """Number of the current process."""
        self._is_up = True
        self._begun = -1
        """Step of the newest batch that the process has begun; it ignores that batch if it comes again."""
        self._unread: tuple[e.Train, tuple[Group, ...]] | None = None
        """The batch that the paused process has not read yet."""
        self._published_s = 0.0
        self._checkpoint = 0

    # --- batches and versions -------------------------------------------------------------------------------

    def train(self, action: e.Train, groups: tuple[Group, ...]) -> None:
        # Otherwise the trainer gets the batch after its restart, or when it comes back.
        if not self._is_up or action.step <= self._begun:
            return
        if self._clock.is_paused(TRAINER):
            self._unread = action, groups
            return
        self._begun = action.step
        seconds = self._world.latency(self._world.schedule.train_s)
        self._clock.later(seconds, self._trained, self._process, action, groups, of=TRAINER)

    def trained(self, step: int) -> None:
        """Publish the version of a batch that is journaled as trained, and perhaps make a checkpoint of it.

        That is every trainer.checkpoint_every versions.
        """
        version = step + 1
        self._publish(version)
        if version % self._world.config.trainer.checkpoint_every == 0:
            seconds = self._world.latency(self._world.schedule.publish_s)
            self._clock.later(seconds, self._checkpointed, self._process, version, of=TRAINER)

    def _trained(self, process: int, batch: e.Train, groups: tuple[Group, ...]) -> None:
        if process == self._process:
            digest, metrics = self._world.machines.train(batch, groups)
            self._world.send(e.BatchTrained(batch.step, batch.ordinals, digest, metrics))

    def _publish(self, version: int) -> None:
        """Schedule the time from which hosts can load a version; versions are published one after another."""
        latency = self._world.latency(self._world.schedule.publish_s)
        self._published_s = max(self._published_s, self._clock.now_s) + latency
        seconds = self._published_s - self._clock.now_s
        self._clock.later(seconds, self._committed, self._process, version, of=TRAINER)

    def _committed(self, process: int, version: int) -> None:
        if process == self._process:
            self._world.send(e.VersionCommitted(version, self._world.machines.publish(version)))

    def _checkpointed(self, process: int, version: int) -> None:
        if process == self._process and version > self._checkpoint:
            self._checkpoint = version
            self._world.send(e.CheckpointCommitted(version))

    # --- crashes --------------------------------------------------------------------------------------------

    def crash(self, down_s: float) -> None:
        """End the process; another one starts after `down_s` seconds, and asks for the batch in training."""
        self.end()
        self._is_up = False
        self._clock.later(down_s, self._restart, self._process, of=DRIVER)

    def end(self) -> None:
        self._process += 1
        self._begun, self._unread = -1, None
        self._clock.end_pause(TRAINER)

    def restored(self, checkpoint: int) -> None:
        """Let the next process begin with the checkpoint of this version."""
        self._checkpoint = checkpoint

    def start(self) -> None:
        """Start a new process: load the last checkpoint, and publish newer versions once more."""
        self._published_s, self._is_up = self._clock.now_s, True
        state = self._world.control.state
        is_checkpoint_published = state.version >= self._checkpoint
        for version in range(self._checkpoint + is_checkpoint_published, state.trained_version + 1):
            self._publish(version)

    def _restart(self, process: int) -> None:
        if process == self._process:
            self._clock.end_pause(TRAINER)
            self.start()
            self._ask_again(process)

    def _ask_again(self, process: int) -> None:
        if process != self._process:
            return
        self._is_up = True
        if (batch := self._world.control.state.training) is not None:
            self._world.act([batch])

    # --- pauses ---------------------------------------------------------------------------------------------

    def pause(self, down_s: float) -> None:
        """Pause the process; the driver finds it lost after Schedule.lost_s."""
        lose, go_on = (partial(call, self._process) for call in (self._lose, self._go_on))
        _pause(self._world, TRAINER, down_s, lose, go_on)

    def _lose(self, process: int) -> None:
        if process == self._process and self._clock.is_paused(TRAINER):
            self._is_up, self._unread = False, None

    def _go_on(self, process: int) -> None:
        if process != self._process or self._clock.is_paused(TRAINER):
            return
        if not self._is_up:
            seconds = self._world.until_heard()
            self._clock.later(seconds, self._clock.with_driver, TRAINER, self._ask_again, process)
        elif self._unread is not None:
            unread, self._unread = self._unread, None
            self.train(*unread)


class Rewards:
    """The reward process: its scores and workflows, its crashes and its pauses."""

    def __init__(self, world: Surroundings, workflows: DrawnWorkflows) -> None:
        self._world, self._clock, self._workflows = world, world.clock, workflows
        self._is_up = True
        self._orphans: set[SampleId] = set()
        """The samples of which the workflows run again when the process comes back."""

    def score(self, action: e.Score, prompt: Prompt, completions: Sequence[Completion]) -> None:
        if self._is_up:  # otherwise the process gets the group when it comes back
            seconds = self._world.latency(self._world.schedule.reward_s)
            scored = self._world.machines.score(action, prompt, completions)
            self._clock.later(seconds, self._world.send, scored, of=REWARD)

    def begin(self, sample: SampleId, prompt: Prompt, conversation: Conversation) -> None:
        if self._is_up:
            self._workflows.begin(sample, prompt, conversation)
        else:
            self._orphans.add(sample)

    def restart(self) -> None:
        """A process takes the place of one that ended: it has no workflow, and gets what is open again."""
        self._workflows.crash()
        self._is_up = True
        self._orphans.clear()

    # --- pauses ---------------------------------------------------------------------------------------------

    def pause(self, down_s: float) -> None:
        """Pause the process; the driver finds it lost after Schedule.lost_s."""
        _pause(self._world, REWARD, down_s, self._lose, self._go_on)

    def _lose(self) -> None:
        if self._clock.is_paused(REWARD):
            self._is_up = False
            self._orphans |= self._workflows.crash()

    def _go_on(self) -> None:
        if not self._is_up and not self._clock.is_paused(REWARD):
            self._clock.later(self._world.until_heard(), self._clock.with_driver, REWARD, self._come_back)

    def _come_back(self) -> None:
        """Get the groups again, and run the workflows again."""
        self._is_up = True
        state, (orphans, self._orphans) = self._world.control.state, (self._orphans, set())
        scoring = [group for group in state.groups.values() if group.stage == "scoring"]
        again: list[Action] = [e.Score(group.ordinal, group.attempt) for group in scoring]
        again += [e.Rerun(sample) for sample in sorted(orphans) if state.is_open(sample)]
        self._world.act(again)
