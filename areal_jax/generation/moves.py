"""A host's side of moves: the samples that it hands over to other hosts, and takes over from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from areal_jax.generation.admission import reason_against_kv
from areal_jax.generation.commands import Work
from areal_jax.generation.host_queues import Queues
from areal_jax.generation.live_slots import LiveSlots
from areal_jax.observe.waits import Clock
from areal_jax.types import PolicyVersion, SampleId, VersionedParams


class Moves:
    """Hands samples over, and keeps each until the control plane says that another host has it, or none."""

    def __init__(self, live: LiveSlots, queues: Queues, clock: Clock) -> None:
        self._live, self._queues, self._clock = live, queues, clock
        self._kept: dict[SampleId, Work] = {}

    @property
    def versions(self) -> set[PolicyVersion]:
        """The versions of half-decoded samples that are kept, and that the host may have to take back."""
        return {work.version for work in self._kept.values() if work.so_far is not None}

    def offer(self, samples: Iterable[SampleId]) -> list[Work]:
        """Removes the samples from queues and slots; returns those found, with tokens and KV.

        The results of all decode calls must be recorded.
        """
        with self._clock.doing("move"):
            found = [queue.take(sample) for sample in samples for queue in self._queues.both]
            works = [work for work in found if work is not None]
            self._kept |= {work.sample: work for work in works}
            # Copies: the other host changes what it takes over, and this one may have to take its own back.
            return [replace(work) for work in works]

    def forget(self, samples: Iterable[SampleId]) -> None:
        for sample in samples:
            self._kept.pop(sample, None)

    def take_back(self, samples: Iterable[SampleId]) -> None:
        """Puts kept samples before all others in their queue."""
        self._queues.put_first([self._kept.pop(sample) for sample in samples if sample in self._kept])

    def take_over(
        self, works: Sequence[Work], held: Mapping[PolicyVersion, VersionedParams], name: str
    ) -> str:
        """Puts another host's samples before all others in their queue.

        Returns why they are refused, or "". `held` (version -> parameters) and `name` are this host's.
        """
        for work in works:
            if reason := reason_against_kv(self._live.engine, work, held, name):
                return reason
        with self._clock.doing("move"):
            # What finds no slot waits in host memory, as evicted samples do.
            for work in works[max(0, self._live.engine.slots - len(self._live.works)) :]:
                work.move_to_host_memory()
        self._queues.put_first(works)
        return ""
