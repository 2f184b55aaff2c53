"""A generation host under the virtual clock: turns, and what they cost; what decodes in them is its decoder.

A decoder is the real thing (`runtime.real_machines`) or, here, answers whose lengths are drawn from a seed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from areal_jax.config import Config
from areal_jax.control import events as e
from areal_jax.types import PolicyVersion, SampleId, VersionSpan

if TYPE_CHECKING:
    from areal_jax.runtime.simulated import World


@dataclass(frozen=True)
class Call:
    """What a host did between two looks at the clock."""

    adopted: e.HostAdopted | None
    """The version change that the turn began with."""
    prefills: int
    """Samples that got a slot."""
    live: int
    """Slots that decoded; 0 = nothing to do."""
    tokens: int
    ended: tuple[e.SampleFinished | e.SampleFailed, ...]
    """Samples that ended in the decode call: told when its time is up."""
    recomputed: int = 0
    """Tokens whose KV was rebuilt under the adopted version."""
    passes: int = 1
    """Versions that live slots decode under, one after the other: each reads its parameters."""
    held: int = 1
    """Versions whose parameters the host had to hold."""


class Decoder(Protocol):
    def take(self, dispatch: e.Dispatch) -> None: ...

    def cancel(self, samples: Iterable[SampleId]) -> None: ...

    def step(self) -> Call:
        """Adopt the newest committed version, refill free slots, decode once."""
        ...


class Host:
    """Takes turns as long as its decoder has work, and tells what came of each when its time is up."""

    def __init__(self, name: str, decoder: Decoder, world: World) -> None:
        self.name, self.decoder, self.world = name, decoder, world
        self.is_alive = True
        self._is_busy = False

    def take(self, dispatch: e.Dispatch) -> None:
        self.decoder.take(dispatch)
        self.wake()

    def wake(self) -> None:
        """Take the next turn, unless one is under way."""
        if self.is_alive and not self._is_busy:
            self._is_busy = True
            self.world.later(0.0, self._turn)

    def _turn(self) -> None:
        """A decode call begins; its tokens are of the version that is committed now."""
        if not self.is_alive:
            return
        world, schedule = self.world, self.world.schedule
        call = self.decoder.step()
        seconds = 0.0
        if call.adopted is not None:
            world.meters.swapped(call)
            seconds = world.latency(schedule.swap_s + call.recomputed * schedule.recompute_token_s)
            world.tell(call.adopted)
            if not self.is_alive:  # a fault struck as the adoption was told
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
        world.later(seconds, self._decoded, call)

    def _decoded(self, call: Call) -> None:
        if not self.is_alive:
            return
        self.world.meters.tokens += call.tokens
        for event in call.ended:
            if not self.is_alive:
                return
            self.world.sample_ended(event)
        if self.is_alive:
            self._turn()


@dataclass
class Work:
    """One sample on its way."""

    sample: SampleId
    length: int
    """Tokens it will have."""
    fails: bool = False
    min_version: PolicyVersion = 0
    """What its dispatch asked for."""
    version: PolicyVersion = -1
    """What it decodes under; -1 before it has a slot."""
    tokens: int = 0
    spans: list[VersionSpan] = field(default_factory=list)
    interruptions: int = 0

    def grow(self, tokens: int) -> int:
        """Decode so many tokens, or as many as there are left; how many."""
        start, self.tokens = self.tokens, min(self.tokens + tokens, self.length)
        if self.spans and self.spans[-1].version == self.version:
            self.spans[-1] = self.spans[-1]._replace(end=self.tokens)
        else:
            self.spans.append(VersionSpan(self.version, start, self.tokens))
        return self.tokens - start


class DrawnAnswers:
    """Static slots that hold answers of drawn lengths: `work(sample)` draws one, `latest()` is committed.

    A newer version is adopted at once, except where hosts drain: then not before everything that was
    dispatched for the version held has ended, live or waiting, so that a group is of one version.
    """

    def __init__(
        self,
        name: str,
        config: Config,
        work: Callable[[SampleId], Work],
        latest: Callable[[], tuple[PolicyVersion, str]],
    ) -> None:
        self.name = name
        self._work, self._latest = work, latest
        self._slots, self._steps = config.generation.slots, config.generation.decode_steps
        self._limit, self._on_update = config.generation.max_tokens, config.on_update
        self._version: PolicyVersion = -1
        self._queue: deque[Work] = deque()
        self._live: list[Work] = []

    def take(self, dispatch: e.Dispatch) -> None:
        for sample in dispatch.samples:
            self._queue.append(work := self._work(sample))
            work.min_version = dispatch.min_version

    def cancel(self, samples: Iterable[SampleId]) -> None:
        gone = set(samples)
        self._queue = deque(work for work in self._queue if work.sample not in gone)
        self._live = [work for work in self._live if work.sample not in gone]

    def step(self) -> Call:
        adopted, recomputed = self._adopt()
        prefills = self._refill()
        versions = {work.version for work in self._live}
        live = len(self._live)
        tokens = sum(work.grow(self._steps) for work in self._live)
        ended = tuple(self._end(work) for work in self._live if work.tokens >= work.length)
        self._live = [work for work in self._live if work.tokens < work.length]
        held = len(versions | {self._version})
        return Call(adopted, prefills, live, tokens, ended, recomputed, len(versions), held)

    def _adopt(self) -> tuple[e.HostAdopted | None, int]:
        """Take the newest version if there is a newer one, and the tokens whose KV that rebuilt."""
        version, digest = self._latest()
        if version <= self._version or (self._on_update == "drain" and (self._live or self._is_due())):
            return None, 0
        self._version = version
        interrupted = [work for work in self._live if work.tokens]
        if self._on_update == "pinned":  # the live ones go on under their own
            interrupted = []
        for work in interrupted:
            work.version = version
            work.interruptions += 1
        rebuilt = sum(work.tokens for work in interrupted) if self._on_update == "recompute" else 0
        return e.HostAdopted(self.name, version, digest, len(interrupted)), rebuilt

    def _is_due(self) -> bool:
        """Does a sample wait whose dispatch asked for no newer version than the one held?"""
        return bool(self._queue) and self._queue[0].min_version <= self._version

    def _refill(self) -> int:
        started = 0
        while self._is_due() and len(self._live) < self._slots:
            self._live.append(work := self._queue.popleft())
            work.version = self._version
            started += 1
        return started

    def _end(self, work: Work) -> e.SampleFinished | e.SampleFailed:
        if work.fails:
            return e.SampleFailed(work.sample, self.name, "simulated")
        reason = "length" if work.length == self._limit else "stop"
        return e.SampleFinished(work.sample, self.name, tuple(work.spans), reason, work.interruptions)
