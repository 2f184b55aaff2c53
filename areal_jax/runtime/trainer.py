"""The trainer's thread: batches in, versions out."""

from __future__ import annotations

import math
import queue
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from areal_jax.control.events import BatchTrained, CheckpointCommitted, Event, VersionCommitted
from areal_jax.observe.waits import Clock, get
from areal_jax.runtime.assembly import Parts
from areal_jax.runtime.memory import MemoryWatch
from areal_jax.runtime.turns import Turns
from areal_jax.trainer.checkpoint import Checkpointer
from areal_jax.trainer.state import TrainState
from areal_jax.trajectories.packing import pack
from areal_jax.types import ArealError, Group, VersionedParams
from areal_jax.weights.store import ParamStore


@dataclass(frozen=True)
class TrainBatch:
    """Train step `step` on these groups, in ordinal order."""

    step: int
    groups: tuple[Group, ...]


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
    c, learner = parts.config, parts.learner
    prompts = c.trainer.prompts if learner.takes_shared_prompts else "repeated"
    with clock.doing("pack"):
        packed = pack(batch.groups, c.trainer.rows, c.row_length, c.algorithm.minibatches, prompts)
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
    """`tell(event)` hears of every batch, version and checkpoint, in the order in which they came to be."""

    def __init__(
        self,
        parts: Parts,
        state: TrainState,
        store: ParamStore,
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
        self._tell, self._turns, self._clock = tell, turns, clock
        self._deadline_s = parts.config.runtime.deadline_s
        self._memory = MemoryWatch(parts.learner, note)

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
            self._tell(
                BatchTrained(batch.step, tuple(g.ordinal for g in batch.groups), value.digest, metrics)
            )
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
