"""The hosts of a simulated run: how they step their decoders, and how they come back after a pause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from areal_jax.control import events as e
from areal_jax.control.events import Event
from areal_jax.lab.simulation.decoders import Call, Decoder
from areal_jax.lab.simulation.surroundings import Surroundings
from areal_jax.lab.simulation.virtual_clock import DRIVER
from areal_jax.runtime.core import Offer
from areal_jax.types import SampleId


class HostSurroundings(Surroundings, Protocol):
    hosts: dict[str, Host]
    """The hosts that the driver counts as part of the run, by name."""


class Host:
    """A simulated host, which steps its decoder while there is work.

    The host reports the results of a step once the step's virtual time has passed.
    """

    def __init__(self, name: str, decoder: Decoder, world: HostSurroundings) -> None:
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

    # --- death, pauses, and coming back ---------------------------------------------------------------------

    def die(self) -> None:
        self.is_alive = False
        self.world.clock.end_pause(self.name)

    def pause(self, down_s: float) -> None:
        """Pause the host; the driver finds it lost after Schedule.lost_s."""
        clock, lost_s = self.world.clock, self.world.schedule.lost_s
        clock.pause(self.name, down_s)
        if down_s > lost_s:
            clock.later(lost_s, self._lose, of=DRIVER)
        clock.later(down_s, self._go_on)

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
