"""Strategies of asynchrony: which groups may start, and when the trainer has to wait.

A strategy is pure: it reads the state and never changes it. A new strategy is one more small class and one
more line in `STRATEGIES`, both here. `Config.on_update` is what a host does with half-decoded samples when a
new version commits; `refusals.ON_UPDATE` lists the values that each strategy allows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import ClassVar

from areal_jax.control.gate import may_admit, may_train
from areal_jax.control.state import State


@dataclass(frozen=True)
class Ahead:
    """Generate `max_staleness` batches ahead of the trainer on average; train each complete batch at once.

    This is AReaL (Fu et al., arXiv:2505.24298) if hosts recompute the KV cache of half-decoded samples at a
    new version, and PipelineRL (Piche et al., arXiv:2509.19128) if they keep it.
    """

    batch_size: int
    max_staleness: int | None

    is_next_begun_first: ClassVar[bool] = False
    """Whether a batch is trained only once every group of the next one has begun or is certain to begin under
    the version that the trainer holds."""

    def admits(self, state: State) -> bool:
        """Whether one more group may start now."""
        s = state
        return may_admit(s.admitted + 1, s.refunds, s.version, self.batch_size, self.max_staleness)

    def trains(self, state: State, ordinals: Collection[int]) -> bool:
        """Whether the groups `ordinals` may be trained as the next batch."""
        return True


@dataclass(frozen=True)
class Bounded(Ahead):
    """Admit as `Ahead` does, and train no sample that is more than `max_staleness` versions old.

    The trainer waits whenever training a batch would make another group too old for its own batch.

    max_staleness=0: each batch is generated, trained and published before the next is generated.
    max_staleness=K: DORA, where hosts pin each sample to the version it began under. DORA's three promises: a
    trajectory is of one version (kept by the hosts); no sample is discarded for being slow; no trained sample
    is older than K.

    After a host is lost, its samples start again on another host, as the same attempt and with the same
    random keys, but under the newest version, since perhaps no host has their version any more. Their earlier
    tokens are lost. Each sample is still of one version, but the members of a group may then differ in
    version.
    """

    def trains(self, state: State, ordinals: Collection[int]) -> bool:
        bound, left = self.max_staleness, state.began(but=ordinals)
        return bound is None or may_train(state.trained_version, left, self.batch_size, bound)


@dataclass(frozen=True)
class OneStep(Bounded):
    """One-step off-policy: while batch n is trained, hosts generate batch n + 1 with version n.

    Version n is the one from before that update, so all tokens of batch n are of version n - 1.

    A host drains: it adopts a version only after finishing its queue. Two more rules keep the promise. Groups
    of batch n + 1 that find no free slot are queued on hosts as soon as batch n is complete, and the trainer
    starts batch n only when those hosts have adopted version n. Otherwise a host could adopt version n + 1
    before it begins these groups.

    Groups that begin again (a lost host, a failed sample or reward, `control.max_token_age`) and groups that
    replace dropped ones begin under the newest version; the batch that trains them then has tokens of age 0
    besides those of age 1.
    """

    is_next_begun_first: ClassVar[bool] = True


STRATEGIES: dict[str, Callable[[int, int | None], Ahead]] = {
    "sync": lambda batch_size, max_staleness: Bounded(batch_size, 0),
    "one_step": lambda batch_size, max_staleness: OneStep(batch_size, 1),
    "interruptible": Ahead,
    "keep": Ahead,
    "pinned": Bounded,
}
"""`control.strategy` -> a function that makes the strategy from B and `max_staleness` (None = unbounded)."""
