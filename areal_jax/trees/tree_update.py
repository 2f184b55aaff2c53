"""`prepare` and `update` by walks over the prefix trees of a batch (`trajectories.walk`).

Each minibatch has a tree of its own, since each has an optimiser step of its own. The batch has one sequence
per row and lies whole on every device: a walk reads tokens of any row, and a loss the whole sequence. Each
device of the mesh's data, fsdp and expert axes takes one walk, a part of the tree's leaves. All walks make
the same calls, so no device waits for a collective that another one never starts. Shapes: B sequences of at
most T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from areal_jax.algorithms.shapes import map_batch
from areal_jax.models.model import Params
from areal_jax.parallel.mesh import replicated, row_axes, row_parts, rows_over
from areal_jax.trainer.compiled import Forecast, Program, bytes_on_one_device
from areal_jax.trainer.forward import Forward
from areal_jax.trainer.learner_programs import LearnerPrograms
from areal_jax.trainer.state import TrainState
from areal_jax.trainer.update import Objective
from areal_jax.trajectories.leaf_order import Blocks, depth_first
from areal_jax.trajectories.leaf_ranges import TOKENS, LeafCosts
from areal_jax.trajectories.prefix_tree import Sampled, trained_on_paths, tree_of
from areal_jax.trajectories.walk import POP, PUSH, Walk, plan_walk
from areal_jax.trees.tree_arrays import Gradients, Sequences, WalkStep
from areal_jax.trees.tree_passes import TreePasses
from areal_jax.types import Batch, PreparedBatch

Between = Callable[[Array], None] | None
"""Called between two calls of programs, as `Learner.update` describes."""


SCORES = {"proximal_logp": "logp", "values_after": "values_after"}
"""Score of `Objective.on_arrival` -> its name among the scores of `TreePasses.push`."""


class Walks(NamedTuple):
    """The steps over the tree of one minibatch."""

    scoring: Walk
    """Without gradients."""
    training: Walk


class TreeBatch(NamedTuple):
    """A prepared batch with one sequence per row, and the walks over its minibatches."""

    batch: PreparedBatch
    sequences: Sequences
    walks: tuple[Walks, ...]

    @property
    def tokens(self) -> Array:
        """The batch's tokens, (B, T)."""
        return self.batch.tokens


class Pushes(NamedTuple):
    """Programs that compute the paths of walks with one model."""

    empty_path: Callable[[], Any]
    push: Program
    """`TreePasses.push`; donates the path and the scores."""


class TreeUpdate:
    """Prepares and trains batches of sequences of at most `length` tokens over their prefix trees.

    `blocks`: into which blocks a device cuts what it computes. `programs` finishes batches and applies
    gradients, as for packed batches.
    """

    def __init__(
        self, objective: Objective, programs: LearnerPrograms, mesh: Mesh, length: int, blocks: Blocks
    ) -> None:
        self._objective, self._programs, self._mesh = objective, programs, mesh
        self._length, self._blocks = length, blocks
        self._walks = row_parts(mesh)
        passes = self._passes(objective)
        self._policy = self._pushes("push", passes)
        slopes = self._by_walk(jax.eval_shape(passes.no_slopes))
        self._no_slopes = jax.jit(passes.no_slopes, out_shardings=slopes)
        sums = jax.tree.map(lambda leaf: leaf.sharding, programs.abstract_sums())
        self._pop = programs.program(
            "pop", passes.pop, donate_argnums=1, out_shardings=Gradients(sums, slopes)
        )

    def _passes(self, objective: Objective) -> TreePasses:
        return TreePasses(objective, self._mesh, self._walks, self._length, self._blocks)

    def _pushes(self, name: str, passes: TreePasses) -> Pushes:
        on = self._by_walk(jax.eval_shape(passes.empty_path))
        push = self._programs.program(
            name, passes.push, donate_argnums=(2, 3), out_shardings=(on, replicated(self._mesh))
        )
        return Pushes(jax.jit(passes.empty_path, out_shardings=on), push)

    def _by_walk(self, tree: Any) -> Any:
        """Returns shardings that give each device the arrays of its walk.

        The walks are an array's first axis; in keys and values, of five axes, the layers come before it.
        """
        axes = lambda leaf: PartitionSpec(*(None,) * (leaf.ndim == 5), *row_axes(self._mesh))  # noqa: E731
        return jax.tree.map(lambda leaf: NamedSharding(self._mesh, axes(leaf)), tree)

    def pushes_of(self, name: str, forward: Forward) -> Pushes:
        """Returns the programs `name`, for log-probs under the parameters of another model."""
        return self._pushes(name, self._passes(replace(self._objective, forward=forward, critic=None)))

    @cached_property
    def alone(self) -> Pushes:
        """Programs for the policy's model without its critic."""
        if self._objective.critic is None:
            return self._policy
        return self.pushes_of("score", self._objective.forward)

    # --- prepare --------------------------------------------------------------------------------------------

    def prepare(
        self,
        state: TrainState,
        batch: Batch,
        minibatches: int,
        others: Mapping[str, tuple[Pushes, Params]],
        between: Between,
        *,
        costs: LeafCosts = TOKENS,
    ) -> TreeBatch:
        """Returns the batch on the mesh with all that `update` needs.

        `batch`: numpy arrays, one sequence per row, equally many rows for each minibatch. `others`: names of
        further log-probs, with the models and parameters under which they are computed. `costs`: by which the
        leaves are cut over the devices.
        """
        sequences, walks = self._planned(batch, minibatches, costs)
        batch = map_batch(self._everywhere, self._everywhere, batch)
        steps = [each.scoring for each in walks]
        scores: dict[str, Array] = {}
        if arriving := self._objective.on_arrival:
            wanted = [SCORES[name] for name in arriving]
            found = self._scores(
                self._policy, (state.params, state.critic), wanted, sequences, steps, between
            )
            scores = {name: found[SCORES[name]] for name in arriving}
        for name, (pushes, params) in others.items():
            found = self._scores(pushes, (params, None), ["logp"], sequences, steps, between)
            scores[name] = found["logp"]
        finished = self._programs.finish(batch, state.version, state.kl_control, scores)
        return TreeBatch(finished, sequences, walks)

    def _planned(
        self, batch: Batch, minibatches: int, costs: LeafCosts
    ) -> tuple[Sequences, tuple[Walks, ...]]:
        """Returns the sequences on the devices, and the walks over the tree of each minibatch."""
        is_asked = np.zeros(batch.tokens.shape, bool)
        temperature = np.ones(batch.tokens.shape, self._objective.forward.model.config.accumulate)
        walks = []
        rows = np.flatnonzero((batch.segment_ids > 0).any(axis=1))
        for of_minibatch in np.split(np.arange(len(batch.tokens)), minibatches):
            own = np.intersect1d(of_minibatch, rows)
            sampled = [Sampled.of_row(batch, row) for row in own.tolist()]
            tree = depth_first(tree_of(sampled), self._blocks)
            trained = trained_on_paths(tree, sampled, self._length)
            is_asked[own], temperature[own] = trained.is_trained, trained.temperature
            plan = partial(plan_walk, tree, self._walks, self._blocks, costs)
            walks.append(Walks(plan(with_gradients=False).of_rows(own), plan().of_rows(own)))
        sequences = Sequences(
            tokens=self._everywhere(batch.tokens),
            support=None if batch.support is None else self._everywhere(batch.support),
            is_asked=self._everywhere(is_asked),
            temperature=self._everywhere(temperature),
        )
        return sequences, tuple(walks)

    def _everywhere(self, x: np.ndarray) -> Array:
        return jax.make_array_from_callback(x.shape, replicated(self._mesh), x.__getitem__)

    def _steps(self, walk: Walk) -> Iterator[tuple[int, WalkStep]]:
        """Yields kind and arrays of each step."""
        endings = self._everywhere(walk.endings)
        for number, kind in enumerate(walk.kinds.tolist()):
            yield kind, self._step(walk, number, endings)

    def _step(self, walk: Walk, number: int, endings: Array) -> WalkStep:
        by_walk, arrays = rows_over(self._mesh), (*walk.rows[number].T.copy(), *walk.columns[number])
        return WalkStep(
            endings, *(jax.make_array_from_callback(x.shape, by_walk, x.__getitem__) for x in arrays)
        )

    def _scores(
        self,
        pushes: Pushes,
        models: tuple[Params, Params | None],
        names: Sequence[str],
        sequences: Sequences,
        walks: Sequence[Walk],
        between: Between,
    ) -> dict[str, Array]:
        """Returns the scores `names` (`TreePasses.push`) of all sequences, (B, T) each."""
        zeros = np.zeros(sequences.tokens.shape, self._objective.forward.model.config.accumulate)
        path, scores = pushes.empty_path(), {name: self._everywhere(zeros) for name in names}
        for walk in walks:
            for _, step in self._steps(walk):
                path, scores = pushes.push(*models, path, scores, sequences, step)
                if between is not None:
                    between(path.stats.logp)
        return scores

    # --- update ---------------------------------------------------------------------------------------------

    def update(
        self, state: TrainState, prepared: TreeBatch, between: Between, before_apply: Between = None
    ) -> tuple[TrainState, list[dict[str, Any]]]:
        """Trains on a prepared batch; returns the next state and each minibatch's metric sums.

        Donates `state`. `before_apply` is called before each optimiser step, as `Learner.update` describes.
        """
        path, slopes, metrics = self._policy.empty_path(), self._no_slopes(), []
        for index, walk in enumerate(each.training for each in prepared.walks):
            gradients = Gradients(self._programs.zero_sums(), slopes)
            for kind, step in self._steps(walk):
                if kind == PUSH:
                    path, _ = self._policy.push(
                        state.params, state.critic, path, {}, prepared.sequences, step
                    )
                else:
                    gradients = self._pop(state, gradients, path, prepared.batch, prepared.sequences, step)
                if between is not None:
                    between(path.stats.logp if kind == PUSH else gradients.sums[1]["tokens"])
            if before_apply is not None:
                before_apply(gradients.sums[1]["tokens"])
            is_last = np.bool_(index == len(prepared.walks) - 1)
            state, sums = self._programs.apply(state, gradients.sums, is_last)
            metrics.append(sums)
            slopes = gradients.slopes
        return state, metrics

    def forecast(self, state: TrainState, prepared: TreeBatch) -> Forecast:
        """Returns the device memory that `update` needs for this batch; compiles the largest programs."""
        path, slopes = self._policy.empty_path(), self._no_slopes()
        sums = self._programs.abstract_sums()
        resident = bytes_on_one_device((state, prepared.batch, prepared.sequences, path, slopes, sums))
        needs = {"apply": self._programs.apply.beyond_arguments(state, sums, np.bool_(True))}
        if step := self._largest(prepared, PUSH):
            models = state.params, state.critic
            needs["push"] = self._policy.push.beyond_arguments(*models, path, {}, prepared.sequences, step)
        if step := self._largest(prepared, POP):
            needs["pop"] = self._pop.beyond_arguments(
                state, Gradients(sums, slopes), path, prepared.batch, prepared.sequences, step
            )
        return Forecast(resident, needs)

    def abstract_calls(
        self, state: TrainState, batch: PreparedBatch, minibatches: int
    ) -> dict[str, tuple[Program, tuple]]:
        """Returns programs with abstract arguments for steps of as many tokens as a block has.

        These are `push` and `pop` of the update, `push with scores` of `prepare`, if the algorithm needs it,
        and `tree score`, with which a reference policy is scored. `state` and `batch`, as `update` gets it,
        are abstract arrays with shardings.
        """

        def on(sharding: Any, shape: tuple[int, ...], dtype: Any) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        whole, by_walk = replicated(self._mesh), rows_over(self._mesh)
        shape, accumulate = batch.tokens.shape, self._objective.forward.model.config.accumulate
        sequences = Sequences(batch.tokens, batch.support, batch.loss_mask, on(whole, shape, accumulate))
        each, columns = (self._walks,), (self._walks, self._blocks.most)
        step = WalkStep(
            on(whole, (shape[0] // minibatches, 2), np.int32),
            *(on(by_walk, size, np.int32) for size in (each,) * 4 + (columns,) * 4),
        )
        score = on(whole, shape, accumulate)
        path, slopes = jax.eval_shape(self._policy.empty_path), jax.eval_shape(self._no_slopes)
        gradients = Gradients(self._programs.abstract_sums(), slopes)
        models, rest = (state.params, state.critic), (sequences, step)
        calls: dict[str, tuple[Program, tuple]] = {
            "push": (self._policy.push, (*models, path, {}, *rest)),
            "pop": (self._pop, (state, gradients, path, batch, *rest)),
        }
        if names := [SCORES[name] for name in self._objective.on_arrival]:
            scores = dict.fromkeys(names, score)
            calls["push with scores"] = self._policy.push, (*models, path, scores, *rest)
        if self._objective.algorithm.has_reference:
            reference = self._objective.trainable.whole(state.reference, state.params)
            alone = path._replace(critic_kv=None, values=None)
            calls["tree score"] = self.alone.push, (reference, None, alone, {"logp": score}, *rest)
        return calls

    def _largest(self, prepared: TreeBatch, kind: int) -> WalkStep | None:
        """Returns a step of this kind with the most columns; None if there is none."""
        found = [
            (int(walk.buckets[number]), -index, int(number))
            for index, walk in enumerate(each.training for each in prepared.walks)
            for number in np.flatnonzero(walk.kinds == kind)
        ]
        if not found:
            return None
        _, index, number = max(found)
        walk = prepared.walks[-index].training
        return self._step(walk, number, self._everywhere(walk.endings))
