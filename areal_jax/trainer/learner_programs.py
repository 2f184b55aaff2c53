"""The compiled programs that a learner calls in its loops: pure functions of state and (micro-)batch.

Shapes: R rows of T tokens a micro-batch, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from areal_jax.algorithms.shapes import B, map_batch
from areal_jax.parallel.mesh import replicated, rows_over
from areal_jax.trainer.compiled import Compiled, Program
from areal_jax.trainer.optimization import Optimization
from areal_jax.trainer.state import TrainState
from areal_jax.trainer.update import Objective
from areal_jax.trainer.update_metrics import add_metrics
from areal_jax.types import PreparedBatch

GradientSums = Any
"""((policy's gradient, critic's gradient or None), metric sums); each is a sum over micro-batches."""


class LearnerPrograms:
    """The compiled programs for micro-batches of `rows` x `length` tokens.

    `report` is called when a program's arguments have shapes that no earlier call of the program had.
    `accumulate` donates its argument `sums`; `apply` and `step` donate `state`.
    """

    def __init__(
        self,
        objective: Objective,
        optimization: Optimization,
        mesh: Mesh,
        rows: int,
        length: int,
        report: Callable[[Compiled], None],
    ) -> None:
        self._objective, self._optimization = objective, optimization
        self._rows, self._length = rows, length
        self._dtype = objective.forward.model.config.accumulate
        self._by_row, whole = rows_over(mesh), replicated(mesh)
        self.state_shardings = optimization.shardings(mesh)
        trained = optimization.trainable.of(self.state_shardings.params)
        self._sums_shardings = sums = ((trained, self.state_shardings.critic), whole)
        after = (self.state_shardings, whole)
        self.program = program = partial(Program, report=report)

        self.arrive = program("arrive", objective.arrive)
        self.score = program("score", objective.forward.logp)
        self.finish = program("finish", objective.finish)
        self.split = program("split", self._split)
        self.zero_sums = program("zero_sums", self._zero_sums, out_shardings=sums)
        self.begin = program("begin", self._begin, out_shardings=sums)
        self.accumulate = program("accumulate", self._accumulate, donate_argnums=1, out_shardings=sums)
        self.apply = program("apply", optimization.apply, donate_argnums=0, out_shardings=after)
        self.step = program("step", self._step, donate_argnums=0, out_shardings=after)

        # Not reported: their shapes follow from those of the programs above.
        self.has_tokens = jax.jit(self._has_tokens, out_shardings=whole)
        self.joined = jax.jit(jnp.concatenate, out_shardings=self._by_row)
        nothing = partial(jnp.zeros, (rows, length), self._dtype)
        self.zero_rows = jax.jit(nothing, out_shardings=self._by_row)

    def _has_tokens(self, mask: Array) -> Array:
        """Returns for each micro-batch of a batch whether `mask`, (B, T), is True at any of its tokens."""
        return mask.any(1).reshape(-1, self._rows).any(1)

    def _split(self, batch: B) -> tuple[B, ...]:
        """Returns the batch's micro-batches, `rows` successive rows each; per-sequence arrays stay whole."""

        def micro(start: int) -> B:
            rows = slice(start, start + self._rows)
            part = lambda x: jax.lax.with_sharding_constraint(x[rows], self._by_row)  # noqa: E731
            return map_batch(part, lambda x: x, batch)

        return tuple(map(micro, range(0, batch.tokens.shape[0], self._rows)))

    def abstract_sums(self) -> GradientSums:
        """Returns the shapes, dtypes and shardings of GradientSums, as jax.ShapeDtypeStruct."""
        return jax.eval_shape(jax.jit(self._zero_sums, out_shardings=self._sums_shardings))

    def _zero_sums(self) -> GradientSums:
        state = self._optimization.abstract()
        trained = self._optimization.trainable.of(state.params), state.critic
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, self._dtype), trained)
        return zeros, self._objective.no_metrics(self._rows, self._length)

    def _begin(self, state: TrainState, micro: PreparedBatch) -> GradientSums:
        """Returns the gradient and the metric sums of one micro-batch.

        If a minibatch has only one micro-batch, these are already the minibatch's sums, and no zeros are
        added.
        """
        return self._objective.gradient(state.params, state.critic, micro, state.kl_control)

    def _accumulate(self, state: TrainState, sums: GradientSums, micro: PreparedBatch) -> GradientSums:
        grads, metrics = self._begin(state, micro)
        return jax.tree.map(jnp.add, sums[0], grads), add_metrics(sums[1], metrics)

    def _step(
        self, state: TrainState, micros: Sequence[PreparedBatch], count: Array, is_last: Array
    ) -> tuple[TrainState, dict[str, Any]]:
        """Returns the state after an optimiser step on the first `count` of `micros`, and the metric sums.

        A single program accumulates and applies the gradients. `is_last`: whether `micros` are the batch's
        last minibatch.
        """
        # Arrays per sequence are the whole batch's in every micro-batch: they are not stacked.
        stacked = map_batch(lambda *parts: jnp.stack(parts), lambda first, *_: first, *micros)

        def add(i: Array, sums: GradientSums) -> GradientSums:
            return self._accumulate(state, sums, map_batch(lambda x: x[i], lambda x: x, stacked))

        sums = jax.lax.fori_loop(0, count, add, self._zero_sums())
        return self._optimization.apply(state, sums, is_last)
