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

from areal_jax.algorithms import masked
from areal_jax.algorithms.advantages import ADVANTAGES
from areal_jax.algorithms.kl import kl_loss
from areal_jax.algorithms.logprobs import TokenStats, packed_stats
from areal_jax.algorithms.losses import LOSSES, ratio
from areal_jax.algorithms.weights import off_policy_weight, reduction_weights
from areal_jax.config import AlgorithmConfig
from areal_jax.models.attention import PackedAttention
from areal_jax.models.model import Model, Params
from areal_jax.parallel.mesh import ROWS, make_mesh, param_shardings, replicated
from areal_jax.plugin import check_settings, load_object
from areal_jax.trainer.state import TrainState
from areal_jax.types import ArealError, Batch, PolicyOutputs, VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.memory import wire_copy

Sums = Any
"""(gradient of the minibatch so far, metric sums so far)."""

PER_SEQUENCE = ("reward", "group_ids", "temperature", "truncated")
MAXIMUM = "logp_gap_max"
"""The one metric that is no mean over tokens."""


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
        self._constant = algorithm.reduction_constant or float(max_tokens or length)
        self._chunk, self._remat = logp_chunk, remat
        self._loss = load_object(algorithm.loss, LOSSES, "loss")
        self._advantage = load_object(algorithm.advantage, ADVANTAGES, "advantage estimator")
        check_settings(self._loss, algorithm.loss_settings, "algorithm.loss_settings")
        check_settings(self._advantage, algorithm.advantage_settings, "algorithm.advantage_settings")
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
        self._score = jax.jit(self._score_micro_batch)
        self._finish = jax.jit(self._finish_batch, static_argnames="minibatches")
        self._split = jax.jit(self._split_batch)

    # --- state ----------------------------------------------------------------------------------------------

    def _first_state(self, params: Params) -> TrainState:
        zero = jnp.zeros((), jnp.int32)
        reference = jax.tree.map(jnp.copy, params) if self.algorithm.kl_coef else None
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
        reference = params if self.algorithm.kl_coef else None
        whole = jax.tree.map(lambda _: self._whole, abstract)
        return whole.replace(params=params, optimizer=optimizer, reference=reference)

    def init(self, params: Params, seed: int = 0) -> TrainState:
        """The state of version 0; `params` are copied, and are the reference where the algorithm has one.

        `seed` is for what an algorithm adds to the policy; nothing that exists so far draws from it.
        """
        del seed
        params = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), params)
        return jax.jit(self._first_state, out_shardings=self.state_shardings)(params)

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
        proximal, reference = batch.behavior_logp, None
        if self.algorithm.proximal == "recompute":
            proximal = self._scores(state.params, batch, between)
        if self.algorithm.kl_coef:
            reference = self._scores(state.reference, batch, between)
        return self._finish(batch, proximal, reference, minibatches=self.algorithm.minibatches)

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

    def _score_micro_batch(self, params: Params, micro: Batch) -> Float[Array, "R T"]:
        return masked.keep(self._stats(params, micro).logp, micro.loss_mask)

    def _finish_batch(
        self, batch: Batch, proximal: Array, reference: Array | None, minibatches: int
    ) -> Batch:
        a = self.algorithm
        sequences = batch.reward.shape[0]
        mask = batch.loss_mask
        if a.truncation == "mask":
            mask = mask & (masked.per_token(batch.truncated.astype(jnp.float32), batch.segment_ids) == 0)
        behavior = masked.keep(batch.behavior_logp, mask)
        proximal = masked.keep(proximal, mask)
        batch = batch._replace(
            loss_mask=mask, behavior_logp=behavior, proximal_logp=proximal, ref_logp=reference
        )
        advantages = self._advantage(batch.reward, batch, **a.advantage_settings)
        off_policy, _ = off_policy_weight(proximal, behavior, mask, a.off_policy, a.off_policy_cap)
        return batch._replace(
            advantages=masked.keep(advantages, mask),
            weights=reduction_weights(
                mask, batch.segment_ids, sequences, minibatches, a.reduction, self._constant
            ),
            off_policy_weight=off_policy,
        )

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
        return state, _to_floats(jax.device_get(metrics))

    def _zero_sums(self) -> Sums:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), self.model.abstract_params)
        shapes = jax.eval_shape(self._metric_sums_of_nothing)
        return zeros, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def _metric_sums_of_nothing(self) -> dict[str, Array]:
        """Traced for its shapes: only the loss knows which metrics it returns."""
        values = jnp.zeros((self.rows, self.length))
        ids, mask = values.astype(jnp.int32), values.astype(bool)
        reward, group, truncated = jnp.zeros(1), jnp.zeros(1, jnp.int32), jnp.zeros(1, bool)
        micro = Batch(ids, ids, ids, mask, values, ids, ids, reward, group, reward, truncated)
        micro = micro._replace(
            proximal_logp=values, advantages=values, weights=values, off_policy_weight=values, ref_logp=values
        )
        _, own = self._loss(PolicyOutputs(values, values), micro, **self.algorithm.loss_settings)
        if self.algorithm.kl_coef:
            own = own | {"kl": values}
        return self._metric_sums(micro, TokenStats(values, values, values), own)

    def _accumulate(self, params: Params, sums: Sums, micro: Batch) -> Sums:
        grads, metrics = jax.grad(self._objective, has_aux=True)(params, micro)
        return jax.tree.map(jnp.add, sums[0], grads), _add_metrics(sums[1], metrics)

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

    def _stats(self, params: Params, micro: Batch) -> TokenStats:
        hidden, _ = self.model.hidden(
            params, micro.tokens, micro.positions, PackedAttention(micro.segment_ids), remat=self._remat
        )
        temperature = masked.per_token(micro.temperature, micro.segment_ids)
        return packed_stats(
            hidden,
            micro.tokens,
            micro.positions,
            temperature,
            lambda h: self.model.logits(params, h),
            micro.support,
            self._chunk,
        )

    def _objective(self, params: Params, micro: Batch) -> tuple[Float[Array, ""], dict[str, Array]]:
        """The micro-batch's part of what is minimised, and its metrics.

        sum over the loss mask of weights (off-policy weight loss + kl_coef KL - entropy_coef entropy).
        """
        a, mask = self.algorithm, micro.loss_mask
        stats = self._stats(params, micro)
        now = PolicyOutputs(masked.keep(stats.logp, mask), masked.keep(stats.entropy, mask))
        loss, own = self._loss(now, micro, **a.loss_settings)
        objective = micro.off_policy_weight * loss
        if a.kl_coef:
            kl = kl_loss(now.logp, micro.ref_logp, micro.behavior_logp, a.kl_estimator)
            objective += a.kl_coef * kl
            own = own | {"kl": kl}
        if a.entropy_coef:
            objective -= a.entropy_coef * now.entropy
        metrics = jax.lax.stop_gradient(self._metric_sums(micro, stats, own))
        return masked.total(micro.weights * objective, mask), metrics

    def _metric_sums(self, micro: Batch, stats: TokenStats, own: dict[str, Array]) -> dict[str, Array]:
        """Sums over the loss mask, and one maximum; a loss's own metrics replace none of the framework's."""
        a, mask = self.algorithm, micro.loss_mask
        gap = micro.proximal_logp - micro.behavior_logp
        _, is_capped = off_policy_weight(
            micro.proximal_logp, micro.behavior_logp, mask, a.off_policy, a.off_policy_cap
        )
        sums = {
            **own,
            "tokens": mask.astype(jnp.float32),
            "entropy": stats.entropy,
            "logp_gap_mean": jnp.abs(gap),
            "mismatch_kl": ratio(micro.proximal_logp, micro.behavior_logp) - 1 - gap,
            "support_mass_outside": stats.outside,
            "off_policy_weight_mean": micro.off_policy_weight,
            "off_policy_capped_share": is_capped.astype(jnp.float32),
        }
        totals = {name: masked.total(values, mask) for name, values in sums.items()}
        return totals | {MAXIMUM: masked.largest(jnp.abs(gap), mask)}


def _add_metrics(left: dict[str, Array], right: dict[str, Array]) -> dict[str, Array]:
    return {
        name: jnp.maximum(left[name], right[name]) if name == MAXIMUM else left[name] + right[name]
        for name in left
    }


def _to_floats(minibatches: list[dict[str, Any]]) -> dict[str, float]:
    """Means over all loss tokens of the batch; of the gradient norm, over the minibatches."""
    tokens = sum(float(m["tokens"]) for m in minibatches)
    out = {"trained_tokens": tokens}
    for name in minibatches[0]:
        values = [float(m[name]) for m in minibatches]
        if name == "grad_norm":
            out[name] = sum(values) / len(values)
        elif name == MAXIMUM:
            out[name] = max(values)
        elif name != "tokens":
            out[name] = sum(values) / max(tokens, 1.0)
    return out
