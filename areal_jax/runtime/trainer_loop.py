"""The trainer's loop: trains batches and publishes each new version of the weights.

The loop runs in a thread, or in each process of one jax.distributed world. A batch arrives with a plan that
gives the row and column of each token. Every process reads only the trajectories of its own rows, from memory
or from Redis. Only the first process reports events.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from areal_jax.assembly.device_memory_remedies import TRAINER, explained
from areal_jax.assembly.devices import training_machine
from areal_jax.assembly.parts import Parts
from areal_jax.config.tree import Config
from areal_jax.control.events import BatchTrained, CheckpointCommitted, Event, Hold, VersionCommitted
from areal_jax.observe.waits import HELD, Clock, get
from areal_jax.parallel.agreement import leads
from areal_jax.runtime.compute_choice import plan_groups
from areal_jax.runtime.device_memory import MemoryWatch
from areal_jax.runtime.differences import MACHINE
from areal_jax.runtime.turns import OneDevice
from areal_jax.trainer.checkpoint import Checkpointer
from areal_jax.trainer.learner import Learner
from areal_jax.trainer.state import TrainState
from areal_jax.trajectories.age_mask import oldest_trained, trained_mask
from areal_jax.trajectories.packing import by_place
from areal_jax.trajectories.plan import BatchPlan, fill
from areal_jax.types import ArealError, Group, SampleId, Trajectory, VersionedParams
from areal_jax.weights.store import ParamPublisher

BATCH = "a batch from the control plane"

TrajectorySource = Callable[[Mapping[int, SampleId]], Mapping[int, Trajectory]]
"""`source(samples)` returns the scored trajectories of at least these samples. Keys of `samples` and of the
result are the indices in the batch's plan, where a sample that branched has several.
"""


@dataclass(frozen=True)
class TrainBatch:
    """Command to the trainer: train step `step` on the groups `ordinals` (their places in the run's order).

    `plan` gives the row and column of each token in the batch; `source` returns the trajectories.
    """

    step: int
    ordinals: tuple[int, ...]
    plan: BatchPlan
    source: TrajectorySource


def held_batch(step: int, groups: Sequence[Group], plan: BatchPlan) -> TrainBatch:
    """Make the command to train `groups`, which are in this process's memory, as step `step`."""
    held, ordinals = by_place(groups), tuple(sorted(group.ordinal for group in groups))
    return TrainBatch(step, ordinals, plan, lambda places: held)


def batch_again(
    config: Config, learner: Learner, step: int, groups: Sequence[Group], choice: Mapping[str, Any]
) -> TrainBatch:
    """Make the command to train step `step` again, as it was computed: `choice` as from `recorded_choice`."""
    return held_batch(step, groups, plan_groups(config, groups, learner.takes_shared_prompts, choice))


def train_batch(
    config: Config,
    learner: Learner,
    state: TrainState,
    batch: TrainBatch,
    clock: Clock,
    *,
    between: Callable | None = None,
    before_apply: Callable | None = None,
    memory: MemoryWatch | None = None,
) -> tuple[TrainState, VersionedParams, dict[str, Any]]:
    """Do one update; return the state after it, the new version's parameters and digest, and the metrics.

    The parameters are the arrays of the returned state, not copies. The argument `state` is donated and must
    not be used afterwards. `between(array)`, if given, is called after each micro-batch, so that hosts may
    use the device, and `before_apply(array)` before each program that donates the state, so that it may wait
    for other readers of the state (see `Learner.update`). The metrics contain the plan's `choice`. `memory`,
    if given, adds memory use and seconds (`update_s`). Raises ArealError if the gradient's norm is not
    finite.
    """
    plan = batch.plan
    with clock.doing("pack"):
        learns = learner.trains(plan)
        rows = learns.own_rows(plan.rows)
        packed = fill(plan, rows, batch.source(plan.sources(rows)))
        # Here, because every batch passes here: of a run, of its repetition after a crash, of a replay.
        oldest = oldest_trained(config.control, batch.step)
        packed = packed._replace(loss_mask=trained_mask(packed, oldest))
    metrics: dict[str, Any]
    with clock.doing("update"):
        spent = _Stopwatch()
        between = spent.without(between)
        prepared = learns.prepare(state, packed, between)
        if memory is not None:
            with spent.stopped():
                memory.before(learns, state, prepared, between is None)
        state, metrics = learns.update(state, prepared, between, spent.without(before_apply))
        metrics |= plan.choice
        if memory is not None:
            metrics |= memory.after() | {"update_s": spent.seconds}
        value = learner.versioned(state)
    norms = {name: value for name, value in metrics.items() if name.endswith("grad_norm")}
    if not all(map(math.isfinite, norms.values())):
        raise ArealError(
            f"the run ends at step {batch.step}, because the gradient's norm is not finite ({norms}). Look "
            f"at samples of this step with `areal-jax inspect RUN_FOLDER {batch.ordinals[0]}/0`; start a "
            "new run with a lower trainer.learning_rate, or from the last checkpoint by "
            "model.source=RUN_FOLDER"
        )
    return state, value, metrics


class _Stopwatch:
    """Measures the seconds since it was made, without those in which it was stopped."""

    def __init__(self) -> None:
        self._start_s, self._stopped_s = time.monotonic(), 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start_s - self._stopped_s

    @contextmanager
    def stopped(self) -> Iterator[None]:
        start_s = time.monotonic()
        yield
        self._stopped_s += time.monotonic() - start_s

    def without(self, pause: Callable | None) -> Callable | None:
        """Returns the function `pause`, during which the trainer does not use the device, not measured."""
        if pause is None:
            return None

        def timed(result: Any) -> None:
            result.block_until_ready()  # until then the device works for the trainer
            with self.stopped():
                pause(result)

        return timed


class Trainer:
    """Trains the batches in its inbox; `tell(event)` reports each batch, version and checkpoint.

    A Hold in the inbox only says for what the next batch waits, so that the wait is counted by its cause.

    If several processes train together, each has a Trainer, and all get the same batches in the same order,
    each with its own `TrainBatch.source`. Only the first process calls `tell` and `note`.
    """

    def __init__(
        self,
        parts: Parts,
        state: TrainState,
        store: ParamPublisher,
        checkpointer: Checkpointer,
        tell: Callable[[Event], None],
        *,
        clock: Clock,
        note: Callable[[str], None],
        turns: OneDevice | None = None,
    ) -> None:
        """`turns` decides when the trainer may use a device that it shares with hosts; None: none is shared.

        `note(text)` is called with each memory forecast, and with each program that is compiled after the
        first step.
        """
        self.inbox: queue.Queue[TrainBatch | Hold | None] = queue.Queue()
        self.state, self.machine = state, training_machine(parts.config)
        self._parts, self._store, self._checkpointer = parts, store, checkpointer
        self._tell, self._turns, self._clock = tell if leads() else _ignore, turns, clock
        self._deadline_s = parts.config.runtime.deadline_s
        self._memory = MemoryWatch(parts.learner, note if leads() else _ignore)
        self._pause_s = 0.0
        """Seconds that checkpoints have kept this thread from training since the last batch."""

    def run(self) -> None:
        """Train batches until None arrives in the inbox; then write a checkpoint and wait for all writes.

        Raises WaitTimeout if no batch arrives within runtime.deadline_s, OutOfMemoryError if a program needs
        more memory than the device has.
        """
        with self._explained():
            for batch in self._batches():
                self._take(batch)
            self._checkpoint()
            self._store.close(self._deadline_s)
            self._checkpointer.close(self._deadline_s)

    def _explained(self) -> AbstractContextManager[None]:
        return explained(TRAINER, self._parts.config, self._parts.model.config)

    def _batches(self) -> Iterator[TrainBatch]:
        """Yields the batches in the inbox until None arrives there."""
        awaited, deadline_s = BATCH, self._deadline_s
        while batch := get(
            self.inbox, waiter="the trainer", what=awaited, deadline_s=deadline_s, clock=self._clock
        ):
            awaited = HELD if isinstance(batch, Hold) else BATCH
            if not isinstance(batch, Hold):
                yield batch

    def _take(self, batch: TrainBatch) -> None:
        turns, clock = self._turns, self._clock
        with turns.turn("trainer", clock) if turns else nullcontext():
            between = partial(turns.between, clock) if turns else None
            value, metrics = self.train(batch, between)
            metrics |= {MACHINE: self.machine, "checkpoint_pause_s": self._pause_s}
            self._pause_s = 0.0
            self._tell(BatchTrained(batch.step, batch.ordinals, value.digest, metrics))
            with clock.doing("publish"):
                self._store.publish(
                    value, lambda wire: self._tell(VersionCommitted(wire.version, wire.digest))
                )
        if value.version % self._parts.config.trainer.checkpoint_every == 0:
            self._checkpoint()

    def train(
        self, batch: TrainBatch, between: Callable | None = None
    ) -> tuple[VersionedParams, dict[str, Any]]:
        """Train one batch without reporting it; return the new version's parameters and the metrics.

        The parameters are the arrays of `self.state`, not copies. `between`: as in `train_batch`.
        """
        return self.train_again(self._parts, batch, between=between, memory=self._memory)

    def train_again(
        self, parts: Parts, batch: TrainBatch, **watched: Any
    ) -> tuple[VersionedParams, dict[str, Any]]:
        """Train one batch with other `parts`, as those with which the journal says that it was trained.

        `watched`: further arguments of `train_batch`; returns what `train` does.
        """
        with self._explained():
            self.state, value, metrics = train_batch(
                parts.config,
                parts.learner,
                self.state,
                batch,
                self._clock,
                before_apply=self._await_copy,
                **watched,
            )
        return value, metrics

    def _checkpoint(self) -> None:
        with self._pausing():
            self._checkpointer.save(
                self.state, lambda version: self._tell(CheckpointCommitted(version)), self._deadline_s
            )

    def _await_copy(self, _: Any) -> None:
        """Wait until the checkpoint that is being written no longer needs the arrays of `self.state`."""
        with self._pausing():
            self._checkpointer.wait_copied(self._deadline_s)

    @contextmanager
    def _pausing(self) -> Iterator[None]:
        start_s = time.monotonic()
        with self._clock.doing("checkpoint"):
            yield
        self._pause_s += time.monotonic() - start_s


def _ignore(said: object) -> None:
    """Takes the place of `tell` and `note` in processes that do not report."""
