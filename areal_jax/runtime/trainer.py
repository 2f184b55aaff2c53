"""The trainer: batches in, versions out. A thread, or each of the processes of one jax.distributed world.

What it is told is a plan: where each token of a batch lies. Every process takes the trajectories of its own
rows, from memory or a journal, and no others; the first one alone tells what came of it.
"""

from __future__ import annotations

import math
import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from areal_jax.config import Config
from areal_jax.control.events import BatchTrained, CheckpointCommitted, Event, VersionCommitted
from areal_jax.observe.waits import Clock, get
from areal_jax.parallel.agreement import leads
from areal_jax.runtime.assembly import Parts
from areal_jax.runtime.memory import MemoryWatch
from areal_jax.runtime.turns import Turns
from areal_jax.trainer.checkpoint import Checkpointer
from areal_jax.trainer.state import TrainState
from areal_jax.trajectories.packing import plan_batch
from areal_jax.trajectories.plan import BatchPlan, fill
from areal_jax.types import ArealError, Group, SampleId, Trajectory, VersionedParams
from areal_jax.weights.store import ParamPublisher

Source = Callable[[Mapping[int, SampleId]], Mapping[int, Trajectory]]
"""`source(places)`: at least the trajectories at those places of a plan, scored; whose each is, is said."""


@dataclass(frozen=True)
class TrainBatch:
    """Train step `step` on the groups of these ordinals, as planned."""

    step: int
    ordinals: tuple[int, ...]
    plan: BatchPlan
    source: Source


def plan_groups(config: Config, groups: Sequence[Group], takes_shared_prompts: bool) -> BatchPlan:
    """Where the tokens of a batch lie; the last as `Learner.takes_shared_prompts`. Raises PackingError."""
    c = config
    prompts = c.trainer.prompts if takes_shared_prompts else "repeated"
    return plan_batch(groups, c.trainer.rows, c.row_length, c.algorithm.minibatches, prompts)


def held_batch(parts: Parts, step: int, groups: Sequence[Group]) -> TrainBatch:
    """The batch of groups that lie in this process's memory. Raises PackingError."""
    groups = sorted(groups, key=lambda group: group.ordinal)
    held = dict(enumerate(one for group in groups for one in group.trajectories))
    ordinals = tuple(group.ordinal for group in groups)
    plan = plan_groups(parts.config, groups, parts.learner.takes_shared_prompts)
    return TrainBatch(step, ordinals, plan, lambda places: held)


def train_batch(
    parts: Parts,
    state: TrainState,
    batch: TrainBatch,
    clock: Clock,
    between: Callable | None = None,
    memory: MemoryWatch | None = None,
) -> tuple[TrainState, VersionedParams, dict[str, float]]:
    """One update, which donates the state: the next one, its version, which aliases it, and the metrics.

    `between` as in `Learner.update`; `memory` watches the learner's device. Raises ArealError for a gradient
    that is not finite.
    """
    learner, plan = parts.learner, batch.plan
    with clock.doing("pack"):
        rows = learner.own_rows(plan.rows)
        packed = fill(plan, rows, batch.source(plan.sources(rows)))
    with clock.doing("update"):
        prepared = learner.prepare(state, packed, between)
        if memory is not None:
            memory.before(state, prepared, between is None)
        state, metrics = learner.update(state, prepared, between)
        metrics |= {} if memory is None else memory.after()
        value = learner.versioned(state)
    norms = {name: value for name, value in metrics.items() if name.endswith("grad_norm")}
    if not all(map(math.isfinite, norms.values())):
        raise ArealError(
            f"step {batch.step}: the gradient's norm is not finite ({norms}). The last checkpoint is "
            "whole; resume "
            "from it with a lower trainer.learning_rate, or look at the batch with `areal-jax inspect`"
        )
    return state, value, metrics


class Trainer:
    """`tell(event)` hears of every batch, version and checkpoint, in the order in which they came to be.

    Of several processes, each has a Trainer and is given the same batches in the same order, each with a
    source of its own; `tell` and `note` are called in the first.
    """

    def __init__(
        self,
        parts: Parts,
        state: TrainState,
        store: ParamPublisher,
        checkpointer: Checkpointer,
        tell: Callable[[Event], None],
        turns: Turns,
        clock: Clock,
        note: Callable[[str], None],
    ) -> None:
        """`note` hears of memory and of programs compiled late."""
        self.inbox: queue.Queue[TrainBatch | None] = queue.Queue()
        self.state = state
        self._parts, self._store, self._checkpointer = parts, store, checkpointer
        self._tell, self._turns, self._clock = tell if leads() else _ignore, turns, clock
        self._deadline_s = parts.config.runtime.deadline_s
        self._memory = MemoryWatch(parts.learner, note if leads() else _ignore)

    def run(self) -> None:
        """Until told None; then the newest state is checkpointed, and whatever is being written ends."""
        while True:
            batch = get(
                self.inbox,
                who="the trainer",
                what="a batch from the control plane",
                deadline_s=self._deadline_s,
                clock=self._clock,
            )
            if batch is None:
                break
            self._take(batch)
        self._checkpoint()
        self._store.close(self._deadline_s)
        self._checkpointer.close(self._deadline_s)

    def _take(self, batch: TrainBatch) -> None:
        with self._turns.trainer(self._clock):
            between = partial(self._turns.between, self._clock) if self._turns.are_taken else None
            value, metrics = self.train(batch, between)
            self._tell(BatchTrained(batch.step, batch.ordinals, value.digest, metrics))
            with self._clock.doing("publish"):
                self._store.publish(
                    value, lambda wire: self._tell(VersionCommitted(wire.version, wire.digest))
                )
        if value.version % self._parts.config.trainer.checkpoint_every == 0:
            self._checkpoint()

    def train(
        self, batch: TrainBatch, between: Callable | None = None
    ) -> tuple[VersionedParams, dict[str, float]]:
        """One batch; the new version, still aliasing the state, and the update's metrics."""
        self.state, value, metrics = train_batch(
            self._parts, self.state, batch, self._clock, between, self._memory
        )
        return value, metrics

    def _checkpoint(self) -> None:
        with self._clock.doing("checkpoint"):
            self._checkpointer.save(
                self.state, lambda version: self._tell(CheckpointCommitted(version)), self._deadline_s
            )


def _ignore(said: object) -> None:
    """What the first of several processes says for all."""
