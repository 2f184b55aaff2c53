"""A host's two queues, and what it keeps beside them: its samples, wherever they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from areal_jax.generation.admission import Admission
from areal_jax.generation.commands import Statistics, Work
from areal_jax.generation.kept_turns import KeptTurns
from areal_jax.generation.live_slots import LiveSlots
from areal_jax.observe.waits import Clock
from areal_jax.types import PolicyVersion, SampleId


class Queues:
    """A host's queues: one of rollouts, and one of clients' requests, which have the reserved slots."""

    def __init__(
        self,
        live: LiveSlots,
        clock: Clock,
        settle: Callable[[], None],
        *,
        kept: KeptTurns,
        totals: Statistics,
    ) -> None:
        """`settle()` reads and records the results of all decode calls so far.

        `kept`, `totals`: the host's kept turns, and its Statistics, in which prefills are counted.
        """
        self._live, self._kept = live, kept
        reserved, slots = live.engine.reserved_slots, live.engine.slots
        own: Any = dict(kept=kept, totals=totals)
        self.rollouts = Admission(live, range(reserved, slots), clock, settle, **own)
        self.requests = Admission(live, range(reserved or slots), clock, settle, **own)
        self.both = self.rollouts, self.requests
        self.expected: dict[SampleId, PolicyVersion] = {}
        """Each episode that begins here and has not asked for its first turn -> the turn's oldest version."""

    def of(self, work: Work) -> Admission:
        return self.requests if work.start.is_request else self.rollouts

    @property
    def evicted(self) -> list[Work]:
        """The half-decoded waiting samples: evicted on this host, or taken over from another one."""
        return [work for queue in self.both for work in queue.waiting if work.so_far is not None]

    @property
    def versions(self) -> set[PolicyVersion]:
        """The versions of live and evicted samples, and of open episodes that had a turn here."""
        works = [*self._live.works.values(), *self.evicted]
        return {work.version for work in works} | {*self._kept.episodes.values()}

    def owes(self, version: PolicyVersion) -> bool:
        """Whether samples must still end under `version` before on_update=drain adopts a newer one.

        True while a sample is live or evicted, while an episode that had a turn here is open, or if the first
        waiting rollout, or an episode's first turn that is still to come, may start under `version`.
        """
        next_ones = [work.start.min_version for work in list(self.rollouts.waiting)[:1]]
        is_owed = min([*next_ones, *self.expected.values()], default=version + 1) <= version
        return is_owed or bool(self._live.works or self.evicted or self._kept.episodes)

    def cancel(self, samples: Sequence[SampleId]) -> None:
        """Drops these samples, waiting or live, and what is kept of their earlier turns."""
        for queue in self.both:
            queue.cancel(set(samples))
        self.forget(samples)

    def forget(self, samples: Sequence[SampleId]) -> None:
        """Drops what is kept of these samples' earlier turns; their first turns are not expected any more."""
        self._kept.forget(samples)
        for sample in samples:
            self.expected.pop(sample, None)

    def add(self, work: Work) -> None:
        """Puts a sample behind the others of its queue; a later turn of an episode before all new samples.

        First turns come in any order, and go before new samples that need a newer version than they do.
        """
        waiting, start = self.of(work).waiting, work.start
        self.expected.pop(work.sample, None)
        later = (
            place
            for place, other in enumerate(waiting)
            if other.so_far is None
            and not other.start.turn
            and (start.turn or other.start.min_version > start.min_version)
        )
        waiting.insert(next(later, len(waiting)), work)

    def put_first(self, works: Sequence[Work]) -> None:
        """Puts samples before all others in their queues."""
        for work in reversed(works):
            self.of(work).waiting.appendleft(work)
