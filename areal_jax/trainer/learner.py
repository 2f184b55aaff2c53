"""`prepare` and `update` of one algorithm: pure functions of (state, batch), jitted, sharded, state donated.

A batch is scored, then given advantages and weights as a whole (`prepare`); then each micro-batch adds its
gradient (`accumulate`) and each minibatch takes an optimiser step (`apply`). `update` is exactly that loop,
so a driver that runs decode calls between micro-batches computes the same bits. Shapes: R rows of T tokens a
micro-batch, S sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float

from areal_jax.algorithms.advantages import ADVANTAGES
from areal_jax.algorithms.losses import LOSSES
from areal_jax.algorithms.weights import OFF_POLICY
from areal_jax.config import AlgorithmConfig
from areal_jax.models.model import Model, Params
from areal_jax.parallel.mesh import ROWS, make_mesh, param_shardings, replicated
from areal_jax.plugin import check_settings, load_object
from areal_jax.trainer.state import TrainState
from areal_jax.trainer.update import Objective, add_metrics, to_floats
from areal_jax.types import ArealError, Batch, VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.store import wire_copy

Sums = Any
"""(gradient of the minibatch so far, metric sums so far)."""

PER_SEQUENCE = ("reward", "group_ids", "temperature", "truncated", "bootstrap")


class Learner:
    """`rows` x `length` is one micro-batch; `max_tokens` is Dr.GRPO's constant where the algorithm has none.

    The loop that `update` runs, for a driver that has other work between the programs:
    `sums = zero_sums()`, `sums = accumulate(state.params, sums, micro)` for each of a minibatch's
    micro-batches (`micro_batches`), `state, metrics = apply(state, sums, is_last)`. Sums and state are
    donated.
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
        remat: bool = True,
    ) -> None:
        self.model, self.algorithm, self.optimizer = model, algorithm, optimizer
        self.rows, self.length = rows, length
        self.mesh = mesh or make_mesh({"data": 1, "fsdp": 1, "tensor": 1}, jax.devices(), "the trainer")
        loss = load_object(algorithm.loss, LOSSES, "loss")
        advantage = load_object(algorithm.advantage, ADVANTAGES, "advantage estimator")
        check_settings(loss, algorithm.loss_settings, "algorithm.loss_settings")
        check_settings(advantage, algorithm.advantage_settings, "algorithm.advantage_settings")
        off_policy = load_object(algorithm.off_policy, OFF_POLICY, "off-policy weight")
        check_settings(off_policy, algorithm.off_policy_settings, "algorithm.off_policy_settings")
        constant = algorithm.reduction_constant or float(max_tokens or length)
        self.objective = Objective(model, algorithm, loss, advantage, off_policy, constant, logp_chunk, remat)
        shards = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        if rows % shards:
            raise ArealError(
                f"trainer.rows={rows} does not divide over the mesh's data x fsdp = {shards} shards; choose "
                "a multiple"
            )
        self._by_row = NamedSharding(self.mesh, ROWS)
        self._whole = replicated(self.mesh)
        self.state_shardings = self._place_state()
        sums = (self.state_shardings.params, self._whole)
        self.zero_sums = jax.jit(self._zero_sums, out_shardings=sums)
        self.accumulate = jax.jit(self._accumulate, donate_argnums=1, out_shardings=sums)
        self.apply = jax.jit(self._apply, donate_argnums=0, out_shardings=(self.state_shardings, self._whole))
        self._score = jax.jit(self.objective.score)
        self._finish = jax.jit(self.objective.finish)
        self._split = jax.jit(self._split_batch)

    # --- state ----------------------------------------------------------------------------------------------

    def _first_state(self, params: Params) -> TrainState:
        zero = jnp.zeros((), jnp.int32)
        reference = jax.tree.map(jnp.copy, params) if self.algorithm.has_reference else None
        return TrainState(zero, zero, params, self.optimizer.init(params), reference)

    def _place_state(self) -> TrainState:
        """A sharding for every leaf; the optimiser's moments lie as the parameters they belong to."""
        abstract = jax.eval_shape(self._first_state, self.model.abstract_params)
        params = param_shardings(self.model.logical_axes, self.model.abstract_params, self.mesh)
        optimizer = optax.tree_utils.tree_map_params(
            self.optimizer,
            lambda _, sharding: sharding,
            abstract.optimizer,
            params,
            transform_non_params=lambda _: self._whole,
        )
        reference = params if self.algorithm.has_reference else None
        whole = jax.tree.map(lambda _: self._whole, abstract)
        return whole.replace(params=params, optimizer=optimizer, reference=reference)

    def init(self, params: Params, seed: int = 0, donate: bool = False) -> TrainState:
        """The state of version 0; `params` are copied, and are the reference where the algorithm has one.

        `donate`: the state takes the params' buffers instead, where they lie on its shardings already.
        `seed` is for what an algorithm adds to the policy; nothing that exists so far draws from it.
        """
        del seed
        if not donate:
            params = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), params)
        first = jax.jit(self._first_state, donate_argnums=0, out_shardings=self.state_shardings)
        return first(jax.device_put(params, self.state_shardings.params))

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state: what a checkpoint is restored onto."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            jax.eval_shape(self._first_state, self.model.abstract_params),
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

        `between` as in `update`.
        """
        batch = self._to_device(batch)
        form = self.algorithm.proximal_form
        proximal, reference = batch.behavior_logp if form == "none" else None, None
        if form == "recompute":
            proximal = self._scores(state.params, batch, between)
        if self.algorithm.has_reference:
            reference = self._scores(state.reference, batch, between)
        return self._finish(batch, state.version, proximal, reference)

    def _to_device(self, batch: Batch) -> Batch:
        rows, length = batch.tokens.shape
        minibatches = self.algorithm.minibatches
        if length != self.length or rows % (self.rows * minibatches):
            raise ArealError(
                f"a batch of {rows} x {length} does not fit this learner, whose micro-batches are "
                f"{self.rows} x {self.length} with {minibatches} minibatches; pack with the same numbers"
            )

        def put(name: str, x: Any) -> Any:
            return (
                None
                if x is None
                else jax.device_put(x, self._whole if name in PER_SEQUENCE else self._by_row)
            )

        return Batch(*(put(name, x) for name, x in zip(Batch._fields, batch, strict=True)))

    def micro_batches(self, batch: Batch) -> list[list[Batch | None]]:
        """Micro-batches by minibatch; None where a micro-batch holds no token to train."""
        count = batch.tokens.shape[0] // self.rows
        masks = np.split(np.asarray(batch.loss_mask), count)
        micros = [m if mask.any() else None for m, mask in zip(self._split(batch), masks, strict=True)]
        each = count // self.algorithm.minibatches
        return [micros[start : start + each] for start in range(0, count, each)]

    def _split_batch(self, batch: Batch) -> tuple[Batch, ...]:
        def part(name: str, x: Any, start: int) -> Any:
            return x if x is None or name in PER_SEQUENCE else x[start : start + self.rows]

        named = list(zip(Batch._fields, batch, strict=True))
        starts = range(0, batch.tokens.shape[0], self.rows)
        return tuple(Batch(*(part(name, x, start) for name, x in named)) for start in starts)

    def _scores(
        self, params: Params, batch: Batch, between: Callable[[Array], None] | None
    ) -> Float[Array, "B T"]:
        """Log-probs of the loss tokens under `params`, a micro-batch at a time; 0 elsewhere."""
        scores = []
        for micro in itertools.chain.from_iterable(self.micro_batches(batch)):
            if micro is None:
                scores.append(jnp.zeros((self.rows, self.length), jnp.float32))
                continue
            scores.append(self._score(params, micro))
            if between is not None:
                between(scores[-1])
        return jnp.concatenate(scores)

    # --- update ---------------------------------------------------------------------------------------------

    def update(
        self, state: TrainState, batch: Batch, between: Callable[[Array], None] | None = None
    ) -> tuple[TrainState, dict[str, float]]:
        """Train a prepared batch: micro-batches accumulated, an optimiser step a minibatch; donates `state`.

        `between` is called after each program with something of its result to block on: where one device also
        serves, that is when others get their turn.
        """
        metrics = []
        minibatches = self.micro_batches(batch)
        for index, micros in enumerate(minibatches):
            sums = self.zero_sums()
            for micro in micros:
                if micro is None:
                    continue
                sums = self.accumulate(state.params, sums, micro)
                if between is not None:
                    between(sums[1]["tokens"])
            state, sums_of_minibatch = self.apply(state, sums, np.bool_(index == len(minibatches) - 1))
            metrics.append(sums_of_minibatch)
        return state, to_floats(jax.device_get(metrics))

    def _zero_sums(self) -> Sums:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), self.model.abstract_params)
        return zeros, self.objective.no_metrics(self.rows, self.length)

    def _accumulate(self, params: Params, sums: Sums, micro: Batch) -> Sums:
        grads, metrics = self.objective.gradient(params, micro)
        return jax.tree.map(jnp.add, sums[0], grads), add_metrics(sums[1], metrics)

    def _apply(self, state: TrainState, sums: Sums, is_last: Array) -> tuple[TrainState, dict[str, Array]]:
        grads, metrics = sums
        updates, optimizer = self.optimizer.update(grads, state.optimizer, state.params)
        state = state.replace(
            step=state.step + 1,
            version=state.version + is_last.astype(jnp.int32),
            params=optax.apply_updates(state.params, updates),
            optimizer=optimizer,
        )
        return state, metrics | {"grad_norm": optax.tree.norm(grads)}
