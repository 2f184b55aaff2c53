"""`prepare` and `update` of one algorithm: loops that call the compiled programs of `learner_programs`.

`prepare` computes log-probs and values by micro-batches, then advantages and weights over the whole batch. In
`update` each micro-batch adds its gradient (`accumulate`), and each minibatch takes one optimiser step
(`apply`). Other work that the device does between two programs does not change the results. Shapes: R rows of
T tokens a micro-batch, S sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from areal_jax.algorithms.shapes import B, map_batch
from areal_jax.config.sections import AlgorithmConfig
from areal_jax.models.model import Model, Params
from areal_jax.models.transformer import Remat
from areal_jax.parallel.mesh import (
    one_device,
    own_rows,
    param_shardings,
    platform_of,
    replicated,
    row_parts,
    rows_over,
)
from areal_jax.trainer.compiled import Compiled, Forecast, bytes_on_one_device
from areal_jax.trainer.critic import Critic
from areal_jax.trainer.forward import Forward
from areal_jax.trainer.learner_programs import LearnerPrograms
from areal_jax.trainer.optimization import Optimization
from areal_jax.trainer.scorer import Executor, Scorer
from areal_jax.trainer.state import TrainState
from areal_jax.trainer.trainable import Trainable
from areal_jax.trainer.update import Objective
from areal_jax.trainer.update_metrics import to_floats
from areal_jax.trajectories.plan import BatchPlan
from areal_jax.types import ArealError, Batch, PreparedBatch, VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.store import dtypes_in, wire_copy


class Teacher(NamedTuple):
    """A frozen model for distillation: `prepare` adds the teacher's log-probs of the tokens to the batch."""

    model: Model
    load: Callable[[Any], Params]
    """Called as `load(shardings)`; returns the model's float32 parameters with these shardings."""
    executor: Executor | None = None
    """Where it computes; None: as the trainer, on its mesh."""


class TrainsBatches(Protocol):
    """Trains batches of one layout: a learner itself, or its update over prefix trees (`areal_jax.trees`).

    `prepare` returns a batch with all that `update` needs; its `tokens` are those of all processes' rows.
    """

    def own_rows(self, rows: int) -> np.ndarray: ...

    def prepare(self, state: TrainState, batch: Batch, between: Callable | None = None) -> Any: ...

    def update(
        self,
        state: TrainState,
        batch: Any,
        between: Callable | None = None,
        before_apply: Callable | None = None,
    ) -> tuple[TrainState, dict[str, float]]: ...

    def forecast(self, state: TrainState, batch: Any, is_alone: bool = True) -> Forecast: ...


class Learner:
    """Trains one model by one algorithm on a mesh. The caller holds the train state; `update` donates it.

    A micro-batch is `rows` x `length` tokens. `max_tokens`: tokens of the longest turn (None: `length`), for
    the overlong penalty and, without algorithm.reduction_constant, Dr.GRPO's constant. `mesh`: None means one
    device. `logp_chunk`: number of tokens for which logits are in memory at once. `remat`: what the backward
    pass recomputes. `teacher`: required if `algorithm.teacher` is set, else forbidden. `optimizer_memory`:
    where the optimiser's moments are stored between two steps. `trainable`: a leaf is trained if this regular
    expression matches the leaf's full path (None: all leaves are trained). `reference`: where the reference
    policy computes, if the algorithm has one (None: as the trainer, on its mesh).
    """

    def __init__(
        self,
        model: Model,
        algorithm: AlgorithmConfig,
        optimizer: optax.GradientTransformation,
        *,
        rows: int,
        length: int,
        max_tokens: int | None = None,
        mesh: Mesh | None = None,
        logp_chunk: int = 1024,
        remat: Remat = "layer",
        teacher: Teacher | None = None,
        optimizer_memory: Literal["device", "host"] = "device",
        trainable: str | None = None,
        reference: Executor | None = None,
    ) -> None:
        self.model, self.algorithm, self.optimizer = model, algorithm, optimizer
        self.rows, self.length, self.teacher = rows, length, teacher
        self.mesh = mesh or one_device()
        self._shards = row_parts(self.mesh)
        # Each number of micro-batches in one program is compiled: on a CPU in seconds, on others in minutes.
        self._joins_micro_batches = self.mesh.size == 1 and platform_of(self.mesh) == "cpu"
        self._require_consistent()
        self.trainable = Trainable(trainable)
        self.trainable.require(model)
        has_critic = algorithm.critic.kind != "none"
        self.critic = Critic(model, algorithm.critic.kind, self.trainable) if has_critic else None
        self._forward = partial(Forward, mesh=self.mesh, chunk=logp_chunk, remat=remat)
        self.objective = Objective.of(
            self._forward, model, algorithm, float(max_tokens or length), self.critic, self.trainable
        )
        self.compiled: list[Compiled] = []
        self._reference = None
        if algorithm.has_reference and reference is not None:
            self._reference = self._scorer("score", model, reference)
        holds_reference = algorithm.has_reference and self._reference is None
        self._optimization = Optimization(
            model,
            algorithm,
            optimizer,
            self.critic,
            self.trainable,
            holds_reference=holds_reference,
            memory=optimizer_memory,
        )
        self.programs = LearnerPrograms(
            self.objective, self._optimization, self.mesh, rows, length, self.compiled.append
        )
        self.state_shardings = self.programs.state_shardings
        if self._reference is not None:
            self.state_shardings = self.state_shardings.replace(reference=self._reference.shardings)

    def _scorer(self, name: str, model: Model, executor: Executor) -> Scorer:
        return Scorer(model, executor, self.mesh, self._forward, name, self.compiled.append)

    def on_mesh(self, state: TrainState) -> TrainState:
        """Returns the state without a reference policy apart, as the trainer's programs take it."""
        return state if self._reference is None else state.replace(reference=None)

    def _require_consistent(self) -> None:
        if self.rows % self._shards:
            raise ArealError(
                f"trainer.rows={self.rows} does not divide evenly over the mesh's data x fsdp x expert = "
                f"{self._shards} shards; set trainer.rows to a multiple of {self._shards}"
            )
        teacher = self.algorithm.teacher
        if (self.teacher is None) != (teacher is None):
            raise ArealError(
                f"algorithm.teacher={teacher} and Learner(teacher={self.teacher and 'given'}): give a "
                "teacher to Learner if algorithm.teacher is set, else None"
            )

    @property
    def takes_shared_prompts(self) -> bool:
        """Whether samples in a row may share prefixes, as their prompt (`Batch.subtree_ends`).

        False if an attention kernel is used, because kernels see each segment alone.
        """
        return self.objective.forward.kernel is None

    def trains(self, plan: BatchPlan) -> TrainsBatches:
        """Returns what prepares and trains a batch of this plan.

        Raises ArealError for layout "apart", which a `trees.tree_learner.TreeLearner` trains.
        """
        if plan.layout == "apart":
            raise ArealError(
                "this learner trains packed rows, and the batch is planned with layout=apart; make a "
                "TreeLearner instead, or plan the batch with another layout"
            )
        return self

    def forecast(self, state: TrainState, batch: PreparedBatch, is_alone: bool = True) -> Forecast:
        """Returns the device memory that `update` needs for this prepared batch; compiles the programs.

        The result's `resident` counts state, batch and micro-batches. `is_alone` is False if `update` will be
        called with a function `between`, since `update` then runs other programs.
        """
        state = self.on_mesh(state)
        programs, sums = self.programs, self.programs.abstract_sums()
        size = bytes_on_one_device(sums)
        minibatches = self.micro_batches(batch)
        needs = {}
        for micros in minibatches:
            live = [micro for micro in micros if micro is not None]
            # The choice of programs is that of `update`.
            if is_alone and self._joins_micro_batches and len(live) > 1:
                padded = _padded(live, len(micros))
                needs["step"] = programs.step.beyond_arguments(state, *padded, np.bool_(True))
                continue
            needs["apply"] = size + programs.apply.beyond_arguments(state, sums, np.bool_(True))
            if len(live) == 1:
                needs["begin"] = programs.begin.beyond_arguments(state, live[0])
            elif live:
                needs["accumulate"] = size + programs.accumulate.beyond_arguments(state, sums, live[0])
        return Forecast(bytes_on_one_device((state, batch, minibatches)), needs)

    # --- state ----------------------------------------------------------------------------------------------

    def init(self, params: Params, donate: bool = False) -> TrainState:
        """Returns the state of version 0, with a copy of `params`; a reference policy gets a second copy.

        If `donate`, the state takes over the buffers of `params` that already have the state's shardings,
        without copying them; the caller must not use `params` again.
        """
        if not donate:
            params = jax.tree.map(jnp.array, params, dtypes_in(params, self.model.config.accumulate))
        on = self.programs.state_shardings
        first = jax.jit(self._optimization.first, donate_argnums=0, out_shardings=on)
        state = first(jax.device_put(params, on.params))
        if self._reference is not None:
            state = state.replace(reference=self._reference.take(state.params))
        return state

    def abstract_state(self) -> TrainState:
        """Returns the shapes, dtypes and shardings of the state, as `checkpoint.restore` needs them."""
        first = jax.jit(self._optimization.first, out_shardings=self.programs.state_shardings)
        state = jax.eval_shape(first, self.model.abstract_params)
        if self._reference is not None:
            state = state.replace(reference=self._reference.abstract_params())
        return state

    def versioned(self, state: TrainState) -> VersionedParams:
        """Returns the state's parameters, not a copy, with version and digest (a hash of the bits).

        The parameters become invalid when the state is donated to `update`.
        """
        return VersionedParams(int(state.version), state.params, digest(state.params))

    def publish(self, state: TrainState) -> VersionedParams:
        """Returns a copy of the state's parameters, which `update` leaves intact, with version and digest."""
        return wire_copy(self.versioned(state), "float32")

    # --- prepare --------------------------------------------------------------------------------------------

    def prepare(
        self,
        state: TrainState,
        batch: Batch,
        between: Callable[[Array], None] | None = None,
    ) -> PreparedBatch:
        """Returns the batch on the trainer's mesh with all that `update` needs; `state` is not donated.

        Added to the batch are ages, advantages and the reduction's weights; also proximal log-probs and
        off-policy weights, unless `update` computes these. If the mesh spans several processes, each process
        passes only its own rows of the batch (`own_rows`). `between` is called after each micro-batch, as
        `update` describes.
        """
        batch = self._to_device(batch)
        arrive = partial(self.programs.arrive, state.params, state.critic)
        zero = self.programs.zero_rows()
        scores: dict[str, Array] = {}
        if names := self.objective.on_arrival:
            scores = self._scores(arrive, dict.fromkeys(names, zero), batch, between)
        if self._reference is not None:
            under = partial(self._reference.logp, state.reference)
            scores["ref_logp"] = self._scores(under, zero, batch, between)
        elif self.algorithm.has_reference:
            under = partial(self.programs.score, self.trainable.whole(state.reference, state.params))
            scores["ref_logp"] = self._scores(under, zero, batch, between)
        if self.teacher is not None:
            scores["teacher_logp"] = self._scores(self._score_teacher, zero, batch, between)
        return self.programs.finish(batch, state.version, state.kl_control, scores)

    def logp(self, params: Params, batch: Batch) -> Float[Array, "B T"]:
        """Returns the log-probs of the loss tokens under `params`, computed as in `prepare`; 0 elsewhere."""
        under = partial(self.programs.score, params)
        return self._scores(under, self.programs.zero_rows(), self._to_device(batch), None)

    @cached_property
    def _score_teacher(self) -> Callable[[Batch], Array]:
        """A function from a micro-batch to the teacher's log-probs."""
        assert self.teacher is not None
        model, load, executor = self.teacher
        if executor is not None:
            scorer = self._scorer("score_teacher", model, executor)
            return partial(scorer.logp, scorer.take(load(scorer.shardings)))
        forward, params = self._loaded_teacher
        return partial(self.programs.program("score_teacher", forward.logp), params)

    @cached_property
    def _loaded_teacher(self) -> tuple[Forward, Params]:
        """The teacher's forward pass and parameters; the first access loads the teacher."""
        assert self.teacher is not None
        model = self.teacher.model
        shardings = param_shardings(model.logical_axes, model.abstract_params, self.mesh)
        return self._forward(model), self.teacher.load(shardings)

    def own_rows(self, rows: int) -> np.ndarray:
        """Returns the ascending indices of this process's rows in a batch of `rows` rows."""
        return own_rows(self.mesh, rows)

    def _to_device(self, batch: Batch) -> Batch:
        given, length = batch.tokens.shape
        # Rows of the whole batch; `given` are those of this process.
        rows = given * self._shards // len(self.own_rows(self._shards))
        minibatches = self.algorithm.minibatches
        if length != self.length or rows % (self.rows * minibatches):
            raise ArealError(
                f"a batch of {rows} rows of {length} tokens does not fit this learner, which was built for "
                f"micro-batches of {self.rows} rows of {self.length} tokens and {minibatches} minibatches; "
                f"pack rows of {self.length} tokens, and a multiple of {self.rows * minibatches} rows"
            )
        put = jax.make_array_from_process_local_data
        return map_batch(
            lambda x: put(rows_over(self.mesh), x, (rows, *x.shape[1:])),
            lambda x: put(replicated(self.mesh), x, x.shape),
            batch,
        )

    def micro_batches(self, batch: B) -> list[list[B | None]]:
        """Returns the batch's minibatches, in order, each as the list of its micro-batches.

        A micro-batch without a loss token is None.
        """
        has_tokens = np.asarray(self.programs.has_tokens(batch.loss_mask))
        micros = [m if has else None for m, has in zip(self.programs.split(batch), has_tokens, strict=True)]
        each = len(micros) // self.algorithm.minibatches
        return [micros[start : start + each] for start in range(0, len(micros), each)]

    def _scores(
        self,
        program: Callable[[Batch], Any],
        nothing: Any,
        batch: Batch,
        between: Callable[[Array], None] | None,
    ) -> Any:
        """Calls `program` for each micro-batch; returns the results, joined to (B, T) each.

        A micro-batch without a loss token is skipped: its result is `nothing`. `between` is called after each
        micro-batch that is not skipped, as `update` describes.
        """
        scores = []
        for micro in itertools.chain.from_iterable(self.micro_batches(batch)):
            scores.append(nothing if micro is None else program(micro))
            if micro is not None and between is not None:
                between(jax.tree.leaves(scores[-1])[0])
        return jax.tree.map(lambda *parts: self.programs.joined(parts), *scores)

    # --- update ---------------------------------------------------------------------------------------------

    def update(
        self,
        state: TrainState,
        batch: PreparedBatch,
        between: Callable[[Array], None] | None = None,
        before_apply: Callable[[Array], None] | None = None,
    ) -> tuple[TrainState, dict[str, float]]:
        """Train on a prepared batch: returns the next state and the metrics; donates `state`.

        Each minibatch takes one optimiser step. `between(array)` is called after each micro-batch's program
        is started, with an array of the program's result: `between` may wait for the array and then let a
        generation host use the device. If `between` is None, a mesh of one CPU device runs all micro-batches
        of a minibatch and the optimiser step as one program, which returns the same bits.

        `before_apply(array)` is called before each program that donates the state, with an array that is
        computed once the programs before have ended: `before_apply` may wait for other readers of the state.
        """
        metrics, reference, state = [], state.reference, self.on_mesh(state)
        minibatches = self.micro_batches(batch)
        is_joined = between is None and self._joins_micro_batches
        for index, micros in enumerate(minibatches):
            is_last = np.bool_(index == len(minibatches) - 1)
            live = [micro for micro in micros if micro is not None]
            if is_joined and len(live) > 1:
                if before_apply is not None:
                    before_apply(batch.loss_mask)
                state, sums_of_minibatch = self.programs.step(state, *_padded(live, len(micros)), is_last)
            else:
                state, sums_of_minibatch = self._by_micro_batch(state, live, is_last, between, before_apply)
            metrics.append(sums_of_minibatch)
        if self._reference is not None:
            state = state.replace(reference=reference)
        return state, to_floats(jax.device_get(metrics))

    def _by_micro_batch(
        self,
        state: TrainState,
        live: Sequence[PreparedBatch],
        is_last: Any,
        between: Callable[[Array], None] | None,
        before_apply: Callable[[Array], None] | None,
    ) -> tuple[TrainState, dict[str, Any]]:
        programs = self.programs
        sums = programs.zero_sums() if len(live) != 1 else None
        for micro in live:
            sums = programs.begin(state, micro) if sums is None else programs.accumulate(state, sums, micro)
            if between is not None:
                between(sums[1]["tokens"])
        assert sums is not None  # without a micro-batch they are zeros
        if before_apply is not None:
            before_apply(sums[1]["tokens"])
        return programs.apply(state, sums, is_last)


def _padded(live: Sequence[PreparedBatch], count: int) -> tuple[tuple[PreparedBatch, ...], np.int32]:
    """Returns the micro-batches `live`, padded to `count` by copies of the first, and the length of `live`.

    `live`: the micro-batches with loss tokens. Padding lets one compiled program run any number of them.
    """
    return (*live, *[live[0]] * (count - len(live))), np.int32(len(live))
