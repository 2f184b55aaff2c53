"""The mathematics of an update: pure functions of parameters and a packed batch.

What is minimised is the sum over loss tokens of weights x (off-policy weight x loss + KL - entropy + value
loss). The weights are those of the whole minibatch, so a micro-batch's gradient is its share, whatever the
split. Shapes: R rows of T tokens a micro-batch, B rows a batch, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from areal_jax.algorithms import masked
from areal_jax.algorithms.advantages import Estimate, whitened
from areal_jax.algorithms.kl import kl_loss, kl_reward
from areal_jax.algorithms.logprobs import TokenStats, packed_stats, token_stats
from areal_jax.algorithms.losses import LOSSES, Loss
from areal_jax.algorithms.proximal import proximal_mix
from areal_jax.algorithms.rewards import overlong_penalty
from areal_jax.algorithms.values import value_loss
from areal_jax.algorithms.weights import reduction_weights
from areal_jax.config import AlgorithmConfig
from areal_jax.models.attention_kernels import Kernel
from areal_jax.models.exact import packed_attention
from areal_jax.models.model import Model, Params
from areal_jax.models.transformer import Remat
from areal_jax.parallel.mesh import ROWS
from areal_jax.trainer.critic import Critic, at_end, before
from areal_jax.trainer.gaps import gap_sums
from areal_jax.trainer.metrics import Sums, value_sums
from areal_jax.trainer.trainable import ALL, Trainable
from areal_jax.types import Batch, PolicyOutputs


@dataclass(frozen=True)
class Objective:
    """One algorithm over one model. `kl_coef` is an array where the coefficient adapts, else a number."""

    model: Model
    algorithm: AlgorithmConfig
    loss: Loss
    advantage: Callable[..., Array | Estimate]
    off_policy: Callable[..., tuple[Array, Array]]
    critic: Critic | None
    max_tokens: float
    """The longest completion."""
    chunk: int
    """Tokens whose logits exist at once."""
    remat: Remat
    trainable: Trainable = ALL
    rows: NamedSharding | None = None
    """How a micro-batch's rows lie on the trainer's mesh."""
    kernel: Kernel | None = None
    """Attention of packed rows; pairs of blocks without one."""

    # --- once a batch ---------------------------------------------------------------------------------------

    def score(self, params: Params, micro: Batch) -> Float[Array, "R T"]:
        """Log-probs of the loss tokens under `params`; 0 elsewhere."""
        stats = self._stats(params, self._hidden(self.model, params, micro), micro)
        return masked.keep(stats.logp, micro.loss_mask)

    @property
    def on_arrival(self) -> tuple[str, ...]:
        """The names of what `arrive` answers."""
        recomputed = ("proximal_logp",) if self.algorithm.proximal_form == "recompute" else ()
        return recomputed + (("values_after",) if self.critic else ())

    def arrive(self, params: Params, critic: Params | None, micro: Batch) -> dict[str, Array]:
        """What policy and critic say of a micro-batch before it is trained, (R, T) each."""
        hidden = self._hidden(self.model, params, micro)  # dropped by the compiler where nothing reads it
        out = {}
        if "proximal_logp" in self.on_arrival:
            out["proximal_logp"] = masked.keep(self._stats(params, hidden, micro).logp, micro.loss_mask)
        if critic is not None:
            out["values_after"] = self._values_after(critic, params, hidden, micro)
        return out

    def finish(
        self, batch: Batch, version: Array, kl_coef: Array | float, scores: Mapping[str, Array]
    ) -> Batch:
        """The batch with its loss mask, ages, log-probs, advantages and weights; 0 off the mask.

        `version` is the trained one. `scores`, (B, T) each: proximal_logp, ref_logp, teacher_logp and
        values_after, as far as the algorithm has them. Without proximal_logp the update makes it, from
        proximal_mix.
        """
        a, sequences = self.algorithm, batch.reward.shape[0]
        batch = self._with_scores(batch, version, kl_coef, scores)
        mask = batch.loss_mask
        estimate = self.advantage(self._rewards(batch), batch, **a.advantage_settings)
        if isinstance(estimate, Estimate):
            batch = batch._replace(returns=masked.keep(estimate.returns, mask))
            estimate = estimate.advantages
        advantages = masked.keep(estimate, mask)
        if a.whiten == "tokens":
            advantages = whitened(advantages, mask)
        constant = a.reduction_constant or self.max_tokens
        weights = reduction_weights(mask, batch.segment_ids, sequences, a.minibatches, a.reduction, constant)
        batch = batch._replace(advantages=advantages, weights=weights)
        if batch.proximal_logp is None:
            return batch._replace(proximal_mix=proximal_mix(batch.ages, a.minibatches, a.proximal_form))
        return self._with_off_policy(batch)

    def _with_scores(
        self, batch: Batch, version: Array, kl_coef: Array | float, scores: Mapping[str, Array]
    ) -> Batch:
        a, mask = self.algorithm, batch.loss_mask
        if a.truncation == "mask":
            mask = mask & (masked.per_token(batch.truncated.astype(jnp.float32), batch.segment_ids) == 0)
        kept = {name: masked.keep(x, mask) for name, x in scores.items() if name in Batch._fields}
        batch = batch._replace(
            loss_mask=mask,
            ages=jnp.where(mask & (batch.versions >= 0), version - batch.versions, 0),
            behavior_logp=masked.keep(batch.behavior_logp, mask),
            **kept,
        )
        if a.proximal_form == "none":
            batch = batch._replace(proximal_logp=batch.behavior_logp)
        if a.has_reference and a.kl.place == "reward":
            kl = kl_reward(batch.behavior_logp, batch.ref_logp, a.kl.estimator)
            batch = batch._replace(token_rewards=masked.keep(-kl_coef * kl, mask))
        if self.critic is not None:
            after = scores["values_after"]
            ends = at_end(after, batch.segment_ids, batch.reward.shape[0])
            batch = batch._replace(
                values=masked.keep(before(after, batch.previous), mask),
                bootstrap=masked.keep(ends, batch.truncated),
            )
        return batch

    def _rewards(self, batch: Batch) -> Float[Array, " S"]:
        """The sequences' rewards as estimators see them."""
        if self.algorithm.truncation != "soft_penalty":
            return batch.reward
        lengths = masked.per_sequence(
            batch.loss_mask.astype(jnp.float32), batch.segment_ids, batch.reward.shape[0]
        )
        margin = self.algorithm.overlong_margin or self.max_tokens / 5
        return batch.reward + overlong_penalty(lengths, self.max_tokens, margin)

    def _with_off_policy(self, batch: Batch) -> Batch:
        """The batch with its off-policy weight, 1 off the mask, and where that was cut."""
        weight, is_cut = self.off_policy(batch, **self.algorithm.off_policy_settings)
        return batch._replace(
            off_policy_weight=jnp.where(batch.loss_mask, weight, 1.0), off_policy_cut=is_cut & batch.loss_mask
        )

    # --- once a micro-batch ---------------------------------------------------------------------------------

    def gradient(
        self, params: Params, critic: Params | None, micro: Batch, kl_coef: Array | float
    ) -> tuple[tuple[Params, Params | None], Sums]:
        """The micro-batch's part of the gradient by what policy and critic train, and its metric sums."""

        def value(trained: tuple[Params, Params | None]) -> tuple[Array, Sums]:
            return self.value(self.trainable.whole(trained[0], params), micro, trained[1], kl_coef)

        return jax.grad(value, has_aux=True)((self.trainable.of(params), critic))

    def value(
        self, params: Params, micro: Batch, critic: Params | None = None, kl_coef: Array | float | None = None
    ) -> tuple[Float[Array, ""], Sums]:
        """The micro-batch's part of what is minimised, and its metric sums."""
        hidden = self._hidden(self.model, params, micro)
        stats, value = self._stats(params, hidden, micro), None
        if critic is not None:
            after = self._values_after(critic, params, hidden, micro)
            value = masked.keep(before(after, micro.previous), micro.loss_mask)
        kl_coef = self.algorithm.kl.coef if kl_coef is None else kl_coef
        objective, metrics = self._terms(stats, value, micro, kl_coef)
        return masked.total(micro.weights * objective, micro.loss_mask), jax.lax.stop_gradient(metrics)

    def _terms(
        self, stats: TokenStats, value: Array | None, micro: Batch, kl_coef: Array | float
    ) -> tuple[Float[Array, "R T"], Sums]:
        """What is minimised, a token at a time, and the metric sums."""
        a, mask = self.algorithm, micro.loss_mask
        now = PolicyOutputs(masked.keep(stats.logp, mask), masked.keep(stats.entropy, mask), value)
        if micro.proximal_logp is None:
            held, mix = jax.lax.stop_gradient(now.logp), micro.proximal_mix
            mixed = micro.behavior_logp + mix * (held - micro.behavior_logp)
            micro = micro._replace(proximal_logp=jnp.where(mix == 1, held, mixed))  # free of rounding
            micro = self._with_off_policy(micro)
        loss, own = self.loss(now, micro, **a.loss_settings)
        objective = micro.off_policy_weight * loss
        if a.has_reference and a.kl.place == "loss":
            kl = kl_loss(now.logp, micro.ref_logp, micro.behavior_logp, a.kl.estimator)
            objective += kl_coef * kl
            own = own | {"kl": kl}
        elif a.has_reference:
            own = own | {"kl": kl_reward(micro.behavior_logp, micro.ref_logp, a.kl.estimator)}
        if a.teacher is not None:
            own = own | {"teacher_kl": kl_reward(micro.behavior_logp, micro.teacher_logp)}
        if a.entropy_coef:
            objective -= a.entropy_coef * now.entropy
        metrics = self._metric_sums(micro, stats, own)
        if value is not None:
            of_critic, is_clipped = value_loss(value, micro.values, micro.returns, a.critic.clip)
            objective += a.critic.coef * of_critic
            metrics |= {"values": value_sums(of_critic, is_clipped, micro.values, micro.returns, mask)}
        return objective, metrics

    def no_metrics(self, rows: int, length: int) -> Sums:
        """Metric sums of nothing. Traced for their shapes: only the loss knows which metrics it returns."""

        def trace() -> Sums:
            token = jnp.zeros((rows, length))
            ids, mask, one = token.astype(jnp.int32), token.astype(bool), jnp.zeros(1)
            arrays = dict.fromkeys(Batch._fields, token)
            arrays |= dict.fromkeys(("tokens", "positions", "segment_ids", "versions", "turn_ids"), ids)
            arrays |= {"previous": ids, "ages": ids, "loss_mask": mask, "support": None, "context_ids": None}
            arrays |= {"reward": one, "temperature": one, "bootstrap": one}
            arrays |= {"group_ids": one.astype(jnp.int32), "truncated": one.astype(bool)}
            value = None if self.critic is None else token
            return self._terms(TokenStats(token, token, token), value, Batch(**arrays), 0.0)[1]

        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(trace))

    # --- forward --------------------------------------------------------------------------------------------

    @property
    def _mesh(self) -> Mesh | None:
        return None if self.rows is None else cast(Mesh, self.rows.mesh)

    def _stats(self, params: Params, hidden: Float[Array, "R T D"], micro: Batch) -> TokenStats:
        """A device those of its own rows, so that the head's gradient is added up over them once."""
        temperature = masked.per_token(micro.temperature, micro.segment_ids)
        mesh = self._mesh
        shards = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
        of_rows: Callable[..., TokenStats] = partial(self._stats_of_rows, max(1, self.chunk // shards))
        if shards > 1:
            of_rows = jax.shard_map(
                of_rows,
                mesh=mesh,
                in_specs=(PartitionSpec(), *[ROWS] * 6),
                out_specs=ROWS,
                axis_names=set(ROWS[0]),
                check_vma=False,
            )
        weight = self.model.head_weight(params)
        return of_rows(
            weight, hidden, micro.tokens, micro.previous, micro.loss_mask, temperature, micro.support
        )

    def _stats_of_rows(
        self,
        chunk: int,
        weight: Array,
        hidden: Array,
        tokens: Array,
        previous: Array,
        mask: Array,
        temperature: Array,
        support: Array | None,
    ) -> TokenStats:
        return packed_stats(
            hidden,
            tokens,
            previous,
            mask,
            temperature,
            self.model.head,
            weight,
            support,
            chunk,
            has_entropy_gradient=self.algorithm.entropy_coef > 0 or self.algorithm.loss not in LOSSES,
            values=None if self.model.config.numerics == "bounded" else self._values,
        )

    def _values(
        self, weight: Array, hidden: Array, tokens: Array, temperature: Array, support: Array | None
    ) -> TokenStats:
        """As a generation host computes them."""
        logits = self.model.head_by_rows(weight, hidden)
        return self.model.in_rows(token_stats)(logits, tokens, temperature, support)

    def _values_after(
        self, critic: Params, params: Params, hidden: Float[Array, "R T D"], micro: Batch
    ) -> Float[Array, "R T"]:
        """The value of the state after each token; `params` and `hidden` are the policy's."""
        assert self.critic is not None
        if self.critic.trunk is not None:
            hidden = self._hidden(self.critic.trunk, self.critic.trunk_params(critic, params), micro)
        return self.critic.values(critic, hidden)

    def _hidden(self, model: Model, params: Params, micro: Batch) -> Float[Array, "R T D"]:
        attend = packed_attention(
            model.config,
            micro.segment_ids,
            micro.context_ids,
            micro.positions,
            micro.previous,
            self.kernel,
            self._mesh,
        )
        return model.hidden(params, micro.tokens, micro.positions, attend, None, self.remat, self.rows)[0]

    def _metric_sums(self, micro: Batch, stats: TokenStats, own: dict[str, Array]) -> Sums:
        """Sums over the loss mask; a loss's own metrics replace none of the framework's."""
        mask = micro.loss_mask
        sums = {
            **own,
            "tokens": mask.astype(jnp.float32),
            "entropy": stats.entropy,
            "support_mass_outside": stats.outside,
            "off_policy_weight_mean": micro.off_policy_weight,
            "off_policy_capped_share": micro.off_policy_cut.astype(jnp.float32),
        }
        gaps = gap_sums(micro.proximal_logp, micro.behavior_logp, micro.ages, mask)
        return {name: masked.total(values, mask) for name, values in sums.items()} | {"gaps": gaps}
