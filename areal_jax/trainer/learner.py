"""`prepare` and `update` of one algorithm: pure functions of (state, batch), jitted, sharded, state donated.

A batch is scored, then given advantages and weights as a whole (`prepare`); then each micro-batch adds its
gradient (`accumulate`) and each minibatch takes an optimiser step (`apply`). `update` is exactly that loop,
so a driver that runs decode calls between micro-batches computes the same bits. Shapes: R rows of T tokens a
micro-batch, S sequences.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float

from areal_jax.algorithms.advantages import ADVANTAGES
from areal_jax.algorithms.losses import LOSSES
from areal_jax.algorithms.weights import OFF_POLICY, fitting
from areal_jax.config import AlgorithmConfig
from areal_jax.models.attention_kernels import Kernel, choose, on_mesh
from areal_jax.models.model import Model, Params
from areal_jax.models.transformer import Remat
from areal_jax.parallel.mesh import ROWS, make_mesh, own_rows, param_shardings, replicated
from areal_jax.plugin import check_settings, load_object
from areal_jax.trainer.critic import Critic
from areal_jax.trainer.kl_control import KLControl
from areal_jax.trainer.metrics import add_metrics, to_floats
from areal_jax.trainer.optimization import Optimization
from areal_jax.trainer.programs import Compiled, Forecast, Program, bytes_on_one_device
from areal_jax.trainer.state import TrainState
from areal_jax.trainer.trainable import Trainable
from areal_jax.trainer.update import Objective
from areal_jax.types import ArealError, Batch, VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.store import dtype_in, wire_copy

Sums = Any
"""(gradients of the policy's and the critic's parameters, metric sums), of the minibatch so far."""

PER_SEQUENCE = ("reward", "group_ids", "temperature", "truncated", "bootstrap")


class Teacher(NamedTuple):
    """A frozen model whose log-probs `prepare` fills in."""

    model: Model
    load: Callable[[Any], Params]
    """`load(shardings)`: its float32 parameters."""


class Learner:
    """`rows` x `length` is one micro-batch; `max_tokens` is Dr.GRPO's constant where the algorithm has none;
    `trainable` is a regular expression over the paths of the leaves that are trained (None: all).

    The loop that `update` runs, for a driver that has other work between the programs:
    `sums = zero_sums()`, `sums = accumulate(state, sums, micro)` for each of a minibatch's micro-batches
    (`micro_batches`), or `sums = begin(state, micro)` where there is only one; `state, metrics =
    apply(state, sums, is_last)`. `accumulate` donates sums, `apply` the state.
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
    ) -> None:
        self.model, self.algorithm, self.optimizer = model, algorithm, optimizer
        self.rows, self.length = rows, length
        self.compiled: list[Compiled] = []
        self.mesh = mesh or make_mesh({"data": 1, "fsdp": 1, "tensor": 1}, jax.devices(), "the trainer")
        loss = load_object(algorithm.loss, LOSSES, "loss")
        advantage = load_object(algorithm.advantage, ADVANTAGES, "advantage estimator")
        check_settings(loss, algorithm.loss_settings, "algorithm.loss_settings")
        check_settings(advantage, algorithm.advantage_settings, "algorithm.advantage_settings")
        off_policy = load_object(algorithm.off_policy, OFF_POLICY, "off-policy weight")
        check_settings(off_policy, algorithm.off_policy_settings, "algorithm.off_policy_settings")
        off_policy = fitting(loss, off_policy, algorithm)
        has_critic = algorithm.critic.kind != "none"
        self.trainable = Trainable(trainable)
        self.trainable.require(model)
        self.critic = Critic(model, algorithm.critic.kind, self.trainable) if has_critic else None
        longest = float(max_tokens or length)
        self._by_row = NamedSharding(self.mesh, ROWS)
        self.objective = Objective(
            model,
            algorithm,
            loss,
            advantage,
            off_policy,
            self.critic,
            longest,
            logp_chunk,
            remat,
            self.trainable,
            self._by_row,
            self._kernel(model),
        )
        self._shards = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        if rows % self._shards:
            raise ArealError(
                f"trainer.rows={rows} does not divide over the mesh's data x fsdp = {self._shards} shards; "
                "choose a multiple"
            )
        self._whole = replicated(self.mesh)
        self._optimization = Optimization(
            model, algorithm, optimizer, self.critic, self.trainable, memory=optimizer_memory
        )
        self.state_shardings = self._optimization.shardings(self.mesh)
        trained = self.trainable.of(self.state_shardings.params)
        self._sums_shardings = ((trained, self.state_shardings.critic), self._whole)
        sums, after = self._sums_shardings, (self.state_shardings, self._whole)
        program = partial(Program, report=self.compiled.append)
        self.zero_sums = program("zero_sums", self._zero_sums, out_shardings=sums)
        self.begin = program("begin", self._begin, out_shardings=sums)
        self.accumulate = program("accumulate", self._accumulate, donate_argnums=1, out_shardings=sums)
        self.apply = program("apply", self._apply, donate_argnums=0, out_shardings=after)
        self.step = program("step", self._step, donate_argnums=0, out_shardings=after)
        self._arrive = program("arrive", self.objective.arrive)
        self._score = program("score", self.objective.score)
        self._finish = program("finish", self._finish_batch)
        self.teacher = teacher
        if (teacher is None) != (algorithm.teacher is None):
            raise ArealError(
                f"algorithm.teacher={algorithm.teacher} and Learner(teacher={teacher and 'given'}): give "
                "both, or neither"
            )
        if teacher is not None:
            kernel = self._kernel(teacher.model)
            of_teacher = dataclasses.replace(self.objective, model=teacher.model, critic=None, kernel=kernel)
            self._score_teacher = program("score_teacher", of_teacher.score)
        self._split = program("split", self._split_batch)
        self._has_tokens = jax.jit(self._micro_batches_with_tokens, out_shardings=self._whole)
        self._join = jax.jit(jnp.concatenate, out_shardings=self._by_row)
        nothing = partial(jnp.zeros, (rows, length), jnp.float32)
        self._zero_rows = jax.jit(nothing, out_shardings=self._by_row)

    def _kernel(self, model: Model) -> Kernel | None:
        c, platform = model.config, self.mesh.devices.flat[0].platform
        choice = choose(platform, c.heads, c.kv_heads, c.head_dim, c.dtype)
        return on_mesh(choice, self.mesh, c.kv_heads)

    @property
    def takes_shared_prompts(self) -> bool:
        """Whether a row's tokens may see a segment beside their own; the kernels of CUDA devices do not."""
        return self.objective.kernel is None

    def forecast(self, state: TrainState, batch: Batch, is_alone: bool = True) -> Forecast:
        """What training this prepared batch takes of a device's memory; compiles the programs that it runs.

        Resident are the state, the batch and its micro-batches. `is_alone`: updated without `between`.
        """

        def placed(sharding: NamedSharding, leaves: Any) -> Any:
            return jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), leaves
            )

        sums = jax.tree.map(placed, self._sums_shardings, jax.eval_shape(self._zero_sums))
        size = bytes_on_one_device(sums)
        minibatches = [[m for m in micros if m is not None] for micros in self.micro_batches(batch)]
        needs = {}
        for micros, whole in zip(minibatches, self.micro_batches(batch), strict=True):
            if is_alone and self.mesh.size == 1 and len(micros) > 1:
                padded = _padded(micros, len(whole))
                needs["step"] = self.step.memory(state, *padded, np.bool_(True)).beyond_arguments
                continue
            needs["apply"] = size + self.apply.memory(state, sums, np.bool_(True)).beyond_arguments
            if len(micros) == 1:
                needs["begin"] = self.begin.memory(state, micros[0]).beyond_arguments
            elif micros:
                beyond = self.accumulate.memory(state, sums, micros[0]).beyond_arguments
                needs["accumulate"] = size + beyond
        return Forecast(bytes_on_one_device((state, batch, minibatches)), needs)

    # --- state ----------------------------------------------------------------------------------------------

    def init(self, params: Params, seed: int = 0, donate: bool = False) -> TrainState:
        """The state of version 0; `params` are copied, and are the reference where the algorithm has one.

        `donate`: the state takes the params' buffers instead, where they lie on its shardings already.
        `seed` is for what an algorithm adds to the policy; nothing that exists so far draws from it.
        """
        del seed
        if not donate:
            params = jax.tree.map(lambda leaf: jnp.array(leaf, dtype_in(leaf.dtype, "float32")), params)
        first = jax.jit(self._optimization.first, donate_argnums=0, out_shardings=self.state_shardings)
        return first(jax.device_put(params, self.state_shardings.params))

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state: what a checkpoint is restored onto."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            self._optimization.abstract(),
            self.state_shardings,
        )

    def versioned(self, state: TrainState) -> VersionedParams:
        """The state's own parameters with their version and digest; dead once the state is donated."""
        return VersionedParams(int(state.version), state.params, digest(state.params))

    def publish(self, state: TrainState) -> VersionedParams:
        """A copy that outlives the state."""
        return wire_copy(self.versioned(state), "float32")

    # --- prepare --------------------------------------------------------------------------------------------

    def prepare(
        self, state: TrainState, batch: Batch, between: Callable[[Array], None] | None = None
    ) -> Batch:
        """The batch with proximal log-probs, advantages and both kinds of weights, on the trainer's mesh.

        Where several processes make up the mesh, each gives those rows of the batch that `own_rows` names.
        `between` as in `update`.
        """
        batch = self._to_device(batch)
        arrive = partial(self._arrive, state.params, state.critic)
        scores = self._scores(arrive, self.objective.on_arrival, batch, between)
        if self.algorithm.has_reference:
            under = partial(self._score, self.trainable.whole(state.reference, state.params))
            scores |= self._scores(lambda micro: {"ref_logp": under(micro)}, ("ref_logp",), batch, between)
        if self.teacher is not None:
            of = partial(self._score_teacher, self._teacher_params)
            scores |= self._scores(
                lambda micro: {"teacher_logp": of(micro)}, ("teacher_logp",), batch, between
            )
        return self._finish(batch, state.version, state.kl_control, scores)

    def logp(self, params: Params, batch: Batch) -> Float[Array, "B T"]:
        """Log-probs of the loss tokens under any parameters, as `prepare` recomputes them; 0 elsewhere."""
        under = partial(self._score, params)
        return self._scores(lambda micro: {"logp": under(micro)}, ("logp",), self._to_device(batch), None)[
            "logp"
        ]

    def _finish_batch(
        self, batch: Batch, version: Array, control: KLControl | None, scores: dict[str, Array]
    ) -> Batch:
        return self.objective.finish(batch, version, self._optimization.kl_coef(control), scores)

    @cached_property
    def _teacher_params(self) -> Params:
        """Frozen, on the trainer's mesh, read when the first batch arrives."""
        assert self.teacher is not None
        model = self.teacher.model
        return self.teacher.load(param_shardings(model.logical_axes, model.abstract_params, self.mesh))

    def own_rows(self, rows: int) -> np.ndarray:
        """Which of a batch's rows lie on this process's devices, ascending."""
        return own_rows(self.mesh, rows)

    def _to_device(self, batch: Batch) -> Batch:
        given, length = batch.tokens.shape
        rows = given * self._shards // len(self.own_rows(self._shards))
        minibatches = self.algorithm.minibatches
        if length != self.length or rows % (self.rows * minibatches):
            raise ArealError(
                f"a batch of {rows} x {length} does not fit this learner, whose micro-batches are "
                f"{self.rows} x {self.length} with {minibatches} minibatches; pack with the same numbers"
            )

        def put(name: str, x: Any) -> Any:
            if x is None or name in PER_SEQUENCE:
                return x if x is None else jax.make_array_from_process_local_data(self._whole, x, x.shape)
            return jax.make_array_from_process_local_data(self._by_row, x, (rows, *x.shape[1:]))

        return Batch(*(put(name, x) for name, x in zip(Batch._fields, batch, strict=True)))

    def micro_batches(self, batch: Batch) -> list[list[Batch | None]]:
        """Micro-batches by minibatch; None where a micro-batch holds no token to train."""
        has_tokens = np.asarray(self._has_tokens(batch.loss_mask))
        micros = [m if has else None for m, has in zip(self._split(batch), has_tokens, strict=True)]
        each = len(micros) // self.algorithm.minibatches
        return [micros[start : start + each] for start in range(0, len(micros), each)]

    def _micro_batches_with_tokens(self, mask: Array) -> Array:
        return mask.any(1).reshape(-1, self.rows).any(1)

    def _split_batch(self, batch: Batch) -> tuple[Batch, ...]:
        def part(name: str, x: Any, start: int) -> Any:
            if x is None or name in PER_SEQUENCE:
                return x
            return jax.lax.with_sharding_constraint(x[start : start + self.rows], self._by_row)

        named = list(zip(Batch._fields, batch, strict=True))
        starts = range(0, batch.tokens.shape[0], self.rows)
        return tuple(Batch(*(part(name, x, start) for name, x in named)) for start in starts)

    def _scores(
        self,
        program: Callable[[Batch], Mapping[str, Array]],
        names: Sequence[str],
        batch: Batch,
        between: Callable[[Array], None] | None,
    ) -> dict[str, Float[Array, "B T"]]:
        """`names` of what `program` says of the batch, a micro-batch at a time; 0 where none is trained."""
        if not names:
            return {}
        zero: Array = self._zero_rows()
        nothing = dict.fromkeys(names, zero)
        scores: list[Mapping[str, Array]] = []
        for micro in itertools.chain.from_iterable(self.micro_batches(batch)):
            scores.append(nothing if micro is None else program(micro))
            if micro is not None and between is not None:
                between(scores[-1][names[0]])
        return {name: self._join([score[name] for score in scores]) for name in names}

    # --- update ---------------------------------------------------------------------------------------------

    def update(
        self, state: TrainState, batch: Batch, between: Callable[[Array], None] | None = None
    ) -> tuple[TrainState, dict[str, float]]:
        """Train a prepared batch: micro-batches accumulated, an optimiser step a minibatch; donates `state`.

        `between` is called after each program with something of its result to block on: where one device also
        serves, that is when others get their turn. Without it a device of its own takes several micro-batches
        and their step as one program, to the same bits.
        """
        metrics = []
        minibatches = self.micro_batches(batch)
        is_alone = between is None and self.mesh.size == 1
        for index, micros in enumerate(minibatches):
            is_last = np.bool_(index == len(minibatches) - 1)
            live = [micro for micro in micros if micro is not None]
            if is_alone and len(live) > 1:
                state, sums_of_minibatch = self.step(state, *_padded(live, len(micros)), is_last)
            else:
                state, sums_of_minibatch = self._by_micro_batch(state, live, is_last, between)
            metrics.append(sums_of_minibatch)
        return state, to_floats(jax.device_get(metrics))

    def _by_micro_batch(
        self, state: TrainState, live: Sequence[Batch], is_last: Any, between: Callable[[Array], None] | None
    ) -> tuple[TrainState, dict[str, Any]]:
        sums = self.zero_sums() if len(live) != 1 else None
        for micro in live:
            sums = self.begin(state, micro) if sums is None else self.accumulate(state, sums, micro)
            if between is not None:
                between(sums[1]["tokens"])
        return self.apply(state, sums, is_last)

    def _step(
        self, state: TrainState, micros: Sequence[Batch], count: Array, is_last: Array
    ) -> tuple[TrainState, dict[str, Any]]:
        """A minibatch's first `count` micro-batches accumulated and applied; gradients never leave it."""
        named = zip(Batch._fields, zip(*micros, strict=True), strict=True)
        stacked = {
            name: jnp.stack(parts)
            for name, parts in named
            if name not in PER_SEQUENCE and parts[0] is not None
        }

        def add(i: Array, sums: Sums) -> Sums:
            micro = micros[0]._replace(**{name: x[i] for name, x in stacked.items()})
            return self._accumulate(state, sums, micro)

        sums = jax.lax.fori_loop(0, count, add, self._zero_sums())
        return self._apply(state, sums, is_last)

    def _zero_sums(self) -> Sums:
        state = self._optimization.abstract()
        trained = self.trainable.of(state.params), state.critic
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), trained)
        return zeros, self.objective.no_metrics(self.rows, self.length)

    def _begin(self, state: TrainState, micro: Batch) -> Sums:
        """The sums of a minibatch's only micro-batch: no zeros are written, nothing is added."""
        kl_coef = self._optimization.kl_coef(state.kl_control)
        return self.objective.gradient(state.params, state.critic, micro, kl_coef)

    def _accumulate(self, state: TrainState, sums: Sums, micro: Batch) -> Sums:
        grads, metrics = self._begin(state, micro)
        return jax.tree.map(jnp.add, sums[0], grads), add_metrics(sums[1], metrics)

    def _apply(self, state: TrainState, sums: Sums, is_last: Array) -> tuple[TrainState, dict[str, Any]]:
        grads, metrics = sums
        return self._optimization.apply(state, grads, metrics, is_last)


def _padded(live: Sequence[Batch], count: int) -> tuple[tuple[Batch, ...], np.int32]:
    """`count` micro-batches, live ones first, and how many those are: one shape for any number of them."""
    return (*live, *[live[0]] * (count - len(live))), np.int32(len(live))
