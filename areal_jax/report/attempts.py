"""Collects from a journal what became of each attempt of a group: trained, or discarded for which reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean

from areal_jax.control import events as e
from areal_jax.report.selection import PENDING, TRAINED, Attempt
from areal_jax.trajectories.journal import Row


@dataclass
class _OpenAttempt:
    """An attempt that is neither trained nor discarded yet."""

    attempt: int
    lengths: dict[int, int] = field(default_factory=dict)
    """Index of each sample that ended -> its completion tokens."""
    is_finished: bool = False
    reward: float | None = None

    def closed(self, fate: str) -> Attempt:
        is_finished = self.is_finished or fate == TRAINED
        return Attempt(fate, is_finished, tuple(self.lengths.values()), self.reward)


class Attempts:
    """The attempts of a run's groups, from its journal's rows in order."""

    def __init__(self) -> None:
        self._closed: list[Attempt] = []
        self._open: dict[int, _OpenAttempt] = {}
        """By ordinal, from its first dispatch or its last restart on."""

    @classmethod
    def of(cls, rows: Iterable[Row]) -> list[Attempt]:
        """Returns every attempt that was dispatched; those without a fate yet are PENDING."""
        books = cls()
        for row in rows:
            books.see(row)
        return books.all()

    def see(self, row: Row) -> None:
        """Count one row of the journal."""
        match row.event:
            case e.SampleFinished(sample, _, spans) if own := self._own(sample.ordinal, sample.attempt):
                tokens = 0
                for _, start, end in spans:
                    tokens += end - start
                own.lengths.setdefault(sample.member, tokens)
            case e.RewardScored(ordinal, attempt, rewards) if own := self._own(ordinal, attempt):
                own.is_finished, own.reward = True, fmean(rewards)
            case e.BatchTrained(_, ordinals):
                for ordinal in ordinals:
                    self._close(ordinal, TRAINED)
        for action in row.actions:
            match action:
                case e.Dispatch(samples):
                    self._open.setdefault(samples[0].ordinal, _OpenAttempt(samples[0].attempt))
                case e.Score(ordinal, attempt) if own := self._own(ordinal, attempt):
                    own.is_finished = True
                case e.Reissue(ordinal, _, reason) | e.Drop(ordinal, reason):
                    self._close(ordinal, reason)

    def all(self) -> list[Attempt]:
        """Returns the attempts of the rows seen so far."""
        return [*self._closed, *(own.closed(PENDING) for own in self._open.values())]

    def _own(self, ordinal: int, attempt: int) -> _OpenAttempt | None:
        """Returns the open attempt with this number; None for a late event of an earlier one."""
        own = self._open.get(ordinal)
        return own if own is not None and own.attempt == attempt else None

    def _close(self, ordinal: int, fate: str) -> None:
        # A group that waited for a host, and was never dispatched, generated nothing.
        if (own := self._open.pop(ordinal, None)) is not None:
            self._closed.append(own.closed(fate))
