"""Asynchrony paradigms: who is admitted, and under which version.

A strategy is pure and sees counts only. A new one is one more small class and one more line in `STRATEGIES`,
both here. What a host does with live samples when a version commits (drain, recompute) is `Config.on_update`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from areal_jax.control.gate import may_admit


class Progress(NamedTuple):
    """How far a run is: all that a strategy may look at. Groups are counted, versions are numbers."""

    admitted: int
    dropped: int
    version: int
    """Last committed version: hosts can load it."""
    trained_version: int
    """Version the trainer holds; ahead of `version` while a publication is under way."""
    batch_size: int


class Strategy(Protocol):
    def admits(self, progress: Progress) -> bool:
        """May one more group start now?"""
        ...

    def min_version(self, progress: Progress) -> int:
        """What a host must have adopted before the first token of a group dispatched now."""
        ...


@dataclass(frozen=True)
class Interruptible:
    """AReaL: run ahead of the trainer by `max_staleness` batches; hosts change weights in mid-sample."""

    max_staleness: int | None

    def admits(self, progress: Progress) -> bool:
        admitted, dropped, version, _, batch_size = progress
        return may_admit(admitted + 1, dropped, version, batch_size, self.max_staleness)

    def min_version(self, progress: Progress) -> int:
        return progress.version


@dataclass(frozen=True)
class Sync:
    """Generate a batch, train it, publish it, then generate the next: the gate at staleness 0."""

    def admits(self, progress: Progress) -> bool:
        admitted, dropped, version, _, batch_size = progress
        return may_admit(admitted + 1, dropped, version, batch_size, max_staleness=0)

    def min_version(self, progress: Progress) -> int:
        return progress.version


STRATEGIES: dict[str, Callable[[int | None], Strategy]] = {
    "interruptible": Interruptible,
    "sync": lambda max_staleness: Sync(),
}
"""`control.strategy` -> its strategy, made from the staleness bound."""
