"""A learner that can train a batch over its prefix trees: prefixes that sequences share are computed once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
import optax
from jaxtyping import Array

from areal_jax.config.sections import AlgorithmConfig
from areal_jax.models.model import Model, Params
from areal_jax.trainer.compiled import Forecast
from areal_jax.trainer.learner import Learner, TrainsBatches
from areal_jax.trainer.state import TrainState
from areal_jax.trainer.update_metrics import to_floats
from areal_jax.trajectories.leaf_order import Blocks
from areal_jax.trajectories.leaf_ranges import TOKENS, LeafCosts
from areal_jax.trajectories.plan import BatchPlan
from areal_jax.trees.tree_update import Pushes, TreeBatch, TreeUpdate
from areal_jax.types import ArealError, Batch


class TreeLearner(Learner):
    """Trains packed batches as `Learner` does, and batches of the layout "apart" over their prefix trees.

    `tree_blocks`: the blocks of tokens that each device computes at once over prefix trees (None: those of a
    micro-batch). `settings`: those of `Learner`.
    """

    def __init__(
        self,
        model: Model,
        algorithm: AlgorithmConfig,
        optimizer: optax.GradientTransformation,
        *,
        tree_blocks: Blocks | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(model, algorithm, optimizer, **settings)
        self.tree_blocks = tree_blocks or Blocks(self.rows * self.length // self._shards)

    def trains(self, plan: BatchPlan) -> TrainsBatches:
        """Returns what prepares and trains a batch of this plan."""
        if plan.layout != "apart":
            return self
        return self.over_trees(LeafCosts(*plan.choice.get("tree_costs", TOKENS)))

    def over_trees(self, costs: LeafCosts = TOKENS) -> OverTrees:
        """Returns what trains batches over their prefix trees; `costs`: as of `OverTrees`."""
        return OverTrees(self, costs)

    @cached_property
    def tree(self) -> TreeUpdate:
        """The update over prefix trees, whose programs the first access makes."""
        return TreeUpdate(self.objective, self.programs, self.mesh, self.length, self.tree_blocks)

    @cached_property
    def tree_teacher(self) -> tuple[Pushes, Params]:
        """The programs for the teacher's log-probs over prefix trees, and its parameters."""
        forward, params = self._loaded_teacher
        return self.tree.pushes_of("score_teacher", forward), params


@dataclass(frozen=True)
class OverTrees:
    """`prepare` and `update` of a learner over the prefix trees of batches.

    A batch has the layout "apart" (`trajectories.plan.BatchLayout`); each process passes all rows. `costs`:
    by which the leaves are cut over the mesh's data and fsdp axes; all processes need the same.
    """

    learner: TreeLearner
    costs: LeafCosts = TOKENS

    def own_rows(self, rows: int) -> np.ndarray:
        """Returns the indices of all rows: a walk reads tokens of any of them."""
        return np.arange(rows)

    def prepare(
        self, state: TrainState, batch: Batch, between: Callable[[Array], None] | None = None
    ) -> TreeBatch:
        """Returns the batch as `Learner.prepare` does, with the walks over its prefix trees."""
        of, minibatches = self.learner, self.learner.algorithm.minibatches
        rows, length = batch.tokens.shape
        if length != of.length or rows % minibatches:
            raise ArealError(
                f"a batch of {rows} rows of {length} tokens does not fit this learner, which was built for "
                f"rows of {of.length} tokens and {minibatches} minibatches; plan it with layout=apart"
            )
        others = {}
        if of.algorithm.has_reference:
            others["ref_logp"] = of.tree.alone, of.trainable.whole(state.reference, state.params)
        if of.teacher is not None:
            others["teacher_logp"] = of.tree_teacher
        return of.tree.prepare(state, batch, minibatches, others, between, costs=self.costs)

    def update(
        self,
        state: TrainState,
        batch: TreeBatch,
        between: Callable[[Array], None] | None = None,
        before_apply: Callable[[Array], None] | None = None,
    ) -> tuple[TrainState, dict[str, float]]:
        """Trains on a prepared batch as `Learner.update` does; donates `state`."""
        state, metrics = self.learner.tree.update(state, batch, between, before_apply)
        return state, to_floats(jax.device_get(metrics))

    def forecast(self, state: TrainState, batch: TreeBatch, is_alone: bool = True) -> Forecast:
        """Returns the device memory that `update` needs for this batch; compiles the largest programs.

        `is_alone` makes no difference: the programs are the same beside generation hosts.
        """
        return self.learner.tree.forecast(state, batch)
