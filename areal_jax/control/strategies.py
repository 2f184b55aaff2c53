"""Strategies of asynchrony (control.strategy): which groups may start, and when the trainer must wait.

A strategy reads the control plane's state and never changes it. To add a strategy, write a class in this
module and add it to `STRATEGIES`. `Config.on_update` says what a host does with half-decoded samples when a
weights version is committed; `refusals.ON_UPDATE` lists the values that each strategy allows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import ClassVar

from areal_jax.control.gate import may_admit, may_train
from areal_jax.control.state import State


@dataclass(frozen=True)
class Ahead:
    """Hosts generate up to `max_staleness` batches ahead; the trainer trains each batch once it is complete.

    `batch_size`: groups in a batch. `max_staleness`: None = unbounded. This is AReaL (Fu et al.,
    arXiv:2505.24298) if hosts recompute the KV cache of half-decoded samples when they adopt a version, and
    PipelineRL (Piche et al., arXiv:2509.19128) if hosts keep that cache.
    """

    batch_size: int
    max_staleness: int | None

    is_next_begun_first: ClassVar[bool] = False
    """Whether the trainer starts a batch only once all groups of the following batch have begun, or are
    certain to begin, under the weights version that the trainer holds at that time."""

    def admits(self, state: State) -> bool:
        """Whether one more group may start now."""
        s = state
        return may_admit(s.admitted + 1, s.refunds, s.version, self.batch_size, self.max_staleness)

    def trains(self, state: State, ordinals: Collection[int]) -> bool:
        """Whether the groups `ordinals` may be trained as the next batch."""
        return True


@dataclass(frozen=True)
class Bounded(Ahead):
    """Starts groups as `Ahead` does, and trains no sample that is more than `max_staleness` versions old.

    The trainer waits while training a batch would make a group outside that batch too old for a later batch.

    max_staleness=0: each batch is generated, trained and published before the next batch is generated.
    max_staleness=K: this is DORA, if hosts decode each sample with one weights version (on_update=pinned).
    DORA promises that all tokens of a trajectory have one version, that no sample is discarded because it is
    slow, and that no trained sample is more than K versions old.

    The unfinished samples of a lost host start again on another host, with the same random keys, but under
    the newest committed version, because perhaps no host has the former version any more. The tokens decoded
    before are lost. Each sample still has one version, but the samples of one group may differ in version.
    """

    def trains(self, state: State, ordinals: Collection[int]) -> bool:
        bound, left = self.max_staleness, state.began(but=ordinals)
        return bound is None or may_train(state.trained_version, left, self.batch_size, bound)


@dataclass(frozen=True)
class OneStep(Bounded):
    """One-step off-policy: while batch n is trained, hosts generate batch n + 1 with weights version n.

    Training batch n makes version n + 1 out of version n. So all tokens of batch n + 1 have version n and are
    one version old when they are trained.

    Three rules ensure this. A host drains: it adopts a version only after it has finished its queue of
    samples, and the episodes that were dispatched to it, those before their first turn too. Groups of batch
    n + 1 that find no free slot are queued on hosts as soon as batch n is complete. The trainer
    starts batch n only when the hosts of these groups have adopted version n; otherwise a host could adopt
    version n + 1 before it begins its queued groups.

    Groups that restart (after a lost host, a failed sample or reward, or by `control.max_token_age`) and
    groups that replace dropped groups begin under the newest version. The batch that trains them then has
    tokens of age 0 besides tokens of age 1.
    """

    is_next_begun_first: ClassVar[bool] = True


STRATEGIES: dict[str, Callable[[int, int | None], Ahead]] = {
    "sync": lambda batch_size, max_staleness: Bounded(batch_size, 0),
    "one_step": lambda batch_size, max_staleness: OneStep(batch_size, 1),
    "interruptible": Ahead,
    "keep": Ahead,
    "pinned": Bounded,
}
"""Value of control.strategy -> function of batch size (in groups) and max_staleness that makes a strategy."""
