"""Asynchrony paradigms: who is admitted, under which version, and when the trainer has to wait.

A strategy is pure and sees counts and versions only. A new one is one more small class and one more line in
`STRATEGIES`, both here. What a host does with live samples when a version commits is `Config.on_update`;
`refusals.ON_UPDATE` says which of them keep a strategy's promise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from areal_jax.control.gate import may_admit, may_train


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

    def trains(self, progress: Progress, left: Sequence[int]) -> bool:
        """May the next batch be trained, though it leaves behind groups that began under these versions?"""
        ...


@dataclass(frozen=True)
class Ahead:
    """Run ahead of the trainer by `max_staleness` batches in the mean, and never let it wait.

    AReaL (Fu et al., arXiv:2505.24298), where hosts rebuild KV; PipelineRL (Piche et al., arXiv:2509.19128),
    where they keep it.
    """

    max_staleness: int | None

    def admits(self, progress: Progress) -> bool:
        admitted, dropped, version, _, batch_size = progress
        return may_admit(admitted + 1, dropped, version, batch_size, self.max_staleness)

    def min_version(self, progress: Progress) -> int:
        return progress.version

    def trains(self, progress: Progress, left: Sequence[int]) -> bool:
        return True


@dataclass(frozen=True)
class Bounded:
    """Admit as `Ahead` does, and train nothing that is older than `max_staleness`: the trainer waits instead.

    0: a batch is generated, trained, published, then the next is generated. 1: batch n + 1 is generated while
    n is trained; every batch is of the version before its own. K: DORA, where hosts pin each sample to
    the version it began under. Its three promises: a trajectory is of one version (the hosts'
    part); nothing is discarded for being slow; nothing trained is older than K.

    A sample whose host died begins anew elsewhere, as the same attempt and with the same keys, under the
    newest version, since nobody need hold its own any more: all of its tokens are of that one version. What
    it had decoded is lost, the group is not; its members may then differ in version.
    """

    max_staleness: int | None

    def admits(self, progress: Progress) -> bool:
        admitted, dropped, version, _, batch_size = progress
        return may_admit(admitted + 1, dropped, version, batch_size, self.max_staleness)

    def min_version(self, progress: Progress) -> int:
        return progress.version

    def trains(self, progress: Progress, left: Sequence[int]) -> bool:
        bound = self.max_staleness
        return bound is None or may_train(progress.trained_version, left, progress.batch_size, bound)


STRATEGIES: dict[str, Callable[[int | None], Strategy]] = {
    "sync": lambda max_staleness: Bounded(0),
    "one_step": lambda max_staleness: Bounded(1),
    "interruptible": Ahead,
    "keep": Ahead,
    "pinned": Bounded,
}
"""`control.strategy` -> its strategy, made from the staleness bound."""
