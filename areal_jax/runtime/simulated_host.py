"""A generation host of the simulated driver: static slots, decode calls, version changes between calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from areal_jax.control import events as e
from areal_jax.types import SampleId, VersionSpan

if TYPE_CHECKING:
    from areal_jax.runtime.simulated import World


@dataclass
class Work:
    """One sample on its way."""

    sample: SampleId
    length: int
    """Tokens it will have."""
    fails: bool = False
    tokens: int = 0
    spans: list[VersionSpan] = field(default_factory=list)
    interruptions: int = 0

    def grow(self, tokens: int, version: int) -> None:
        start, self.tokens = self.tokens, min(self.tokens + tokens, self.length)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = self.spans[-1]._replace(end=self.tokens)
        else:
            self.spans.append(VersionSpan(version, start, self.tokens))


class Host:
    """Admit, decode a few tokens, see whether a newer version is committed, go on; or be idle."""

    def __init__(self, name: str, slots: int, world: World) -> None:
        self.name, self.slots, self.world = name, slots, world
        self.version = -1
        self.is_alive = True
        self.queue: deque[Work] = deque()
        self.live: list[Work] = []
        self._is_busy = False
        self._drains = world.config.on_update == "drain"

    def take(self, works: Iterable[Work]) -> None:
        """Queue them. No sample starts before the newest version is adopted, so any min_version is kept."""
        self.queue.extend(works)
        self.wake()

    def cancel(self, samples: Iterable[SampleId]) -> None:
        gone = set(samples)
        self.queue = deque(work for work in self.queue if work.sample not in gone)
        self.live = [work for work in self.live if work.sample not in gone]

    def wake(self) -> None:
        """Take the next turn, unless one is under way."""
        if self.is_alive and not self._is_busy:
            self._is_busy = True
            self.world.later(0.0, self._turn)

    def _turn(self) -> None:
        """Between two decode calls."""
        if not self.is_alive:
            return
        world, schedule = self.world, self.world.schedule
        seconds = self._adopt()
        if not self.is_alive:  # a fault struck as the adoption was told
            return
        is_draining = self.version < world.plane.version
        admitted = 0
        while self.queue and len(self.live) < self.slots and not is_draining:
            self.live.append(self.queue.popleft())
            admitted += 1
        if not self.live:
            self._is_busy = False
            return
        steps = world.config.generation.decode_steps
        seconds += admitted * schedule.prefill_s
        seconds += world.latency(schedule.token_s) * steps * (1 + len(self.live) / schedule.crowd_slots)
        world.meters.host_busy_s += seconds
        world.later(seconds, self._decoded, steps)

    def _adopt(self) -> float:
        """Change weights if a newer version is committed; seconds it takes."""
        world, version = self.world, self.world.plane.version
        if version <= self.version or (self._drains and self.live):
            return 0.0
        interrupted = [work for work in self.live if work.tokens]
        for work in interrupted:
            work.interruptions += 1
        world.meters.interruptions += len(interrupted)
        self.version = version
        world.tell(e.HostAdopted(self.name, version, world.digest_of(version), len(interrupted)))
        return world.latency(world.schedule.swap_s)

    def _decoded(self, steps: int) -> None:
        """A decode call came back: every live slot has `steps` more tokens, all of them under one version."""
        if not self.is_alive:
            return
        world = self.world
        for work in self.live:
            before = work.tokens
            work.grow(steps, self.version)
            world.meters.tokens += work.tokens - before
        ended = [work for work in self.live if work.tokens >= work.length]
        self.live = [work for work in self.live if work.tokens < work.length]
        for work in ended:
            if not self.is_alive:
                return
            if work.fails:
                world.sample_ended(e.SampleFailed(work.sample, self.name, "simulated"))
                continue
            reason = "length" if work.length == world.config.generation.max_tokens else "stop"
            spans = tuple(work.spans)
            world.sample_ended(e.SampleFinished(work.sample, self.name, spans, reason, work.interruptions))
        if self.is_alive:
            self._turn()
