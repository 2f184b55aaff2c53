"""The mathematics of an update: pure functions of parameters and a packed batch.

What is minimised is the sum over loss tokens of weights x (off-policy weight x loss + KL - entropy). The
weights are those of the whole minibatch, so a micro-batch's gradient is its share, whatever the split.
Shapes: R rows of T tokens a micro-batch, B rows a batch, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from areal_jax.algorithms import masked
from areal_jax.algorithms.kl import kl_loss
from areal_jax.algorithms.logprobs import TokenStats, packed_stats
from areal_jax.algorithms.losses import Loss, ratio
from areal_jax.algorithms.proximal import proximal_mix
from areal_jax.algorithms.weights import reduction_weights
from areal_jax.config import AlgorithmConfig
from areal_jax.models.attention import PackedAttention
from areal_jax.models.model import Model, Params
from areal_jax.types import Batch, PolicyOutputs

MAXIMUM = "logp_gap_max"
"""The one metric that is no mean over tokens."""


@dataclass(frozen=True)
class Objective:
    """One algorithm over one model."""

    model: Model
    algorithm: AlgorithmConfig
    loss: Loss
    advantage: Callable[..., Array]
    off_policy: Callable[..., tuple[Array, Array]]
    constant: float
    """C of the reduction `constant`, in tokens."""
    chunk: int
    """Tokens whose logits exist at once."""
    remat: bool

    # --- once a batch ---------------------------------------------------------------------------------------

    def score(self, params: Params, micro: Batch) -> Float[Array, "R T"]:
        """Log-probs of the loss tokens under `params`; 0 elsewhere."""
        return masked.keep(self._stats(params, micro).logp, micro.loss_mask)

    def finish(self, batch: Batch, version: Array, proximal: Array | None, reference: Array | None) -> Batch:
        """The batch with its loss mask, ages, log-probs, advantages and weights; 0 off the mask.

        `version` is the trained one. Without `proximal` the update makes it, from proximal_mix.
        """
        a = self.algorithm
        mask = batch.loss_mask
        if a.truncation == "mask":
            mask = mask & (masked.per_token(batch.truncated.astype(jnp.float32), batch.segment_ids) == 0)
        batch = batch._replace(
            loss_mask=mask,
            ages=jnp.where(mask & (batch.versions >= 0), version - batch.versions, 0),
            behavior_logp=masked.keep(batch.behavior_logp, mask),
            ref_logp=reference,
        )
        advantages = self.advantage(batch.reward, batch, **a.advantage_settings)
        weights = reduction_weights(
            mask, batch.segment_ids, batch.reward.shape[0], a.minibatches, a.reduction, self.constant
        )
        batch = batch._replace(advantages=masked.keep(advantages, mask), weights=weights)
        if proximal is None:
            return batch._replace(proximal_mix=proximal_mix(batch.ages, a.minibatches, a.proximal_form))
        batch = batch._replace(proximal_logp=masked.keep(proximal, mask))
        return batch._replace(off_policy_weight=self._off_policy(batch)[0])

    def _off_policy(self, batch: Batch) -> tuple[Array, Array]:
        """The off-policy weight, 1 off the mask, and where it was cut."""
        weight, is_cut = self.off_policy(batch, **self.algorithm.off_policy_settings)
        return jnp.where(batch.loss_mask, weight, 1.0), is_cut & batch.loss_mask

    # --- once a micro-batch ---------------------------------------------------------------------------------

    def gradient(self, params: Params, micro: Batch) -> tuple[Params, dict[str, Array]]:
        """The micro-batch's part of the gradient, and its metric sums."""
        return jax.grad(self.value, has_aux=True)(params, micro)

    def value(self, params: Params, micro: Batch) -> tuple[Float[Array, ""], dict[str, Array]]:
        """The micro-batch's part of what is minimised, and its metric sums."""
        a, mask = self.algorithm, micro.loss_mask
        stats = self._stats(params, micro)
        now = PolicyOutputs(masked.keep(stats.logp, mask), masked.keep(stats.entropy, mask))
        if micro.proximal_logp is None:
            gap = jax.lax.stop_gradient(now.logp) - micro.behavior_logp
            micro = micro._replace(proximal_logp=micro.behavior_logp + micro.proximal_mix * gap)
            micro = micro._replace(off_policy_weight=self._off_policy(micro)[0])
        loss, own = self.loss(now, micro, **a.loss_settings)
        objective = micro.off_policy_weight * loss
        if a.kl.coef:
            kl = kl_loss(now.logp, micro.ref_logp, micro.behavior_logp, a.kl.estimator)
            objective += a.kl.coef * kl
            own = own | {"kl": kl}
        if a.entropy_coef:
            objective -= a.entropy_coef * now.entropy
        metrics = jax.lax.stop_gradient(self._metric_sums(micro, stats, own))
        return masked.total(micro.weights * objective, mask), metrics

    def no_metrics(self, rows: int, length: int) -> dict[str, Array]:
        """Metric sums of nothing. Traced for their shapes: only the loss knows which metrics it returns."""

        def trace() -> dict[str, Array]:
            values = jnp.zeros((rows, length))
            ids, mask = values.astype(jnp.int32), values.astype(bool)
            one = jnp.zeros(1)
            micro = Batch(
                ids, ids, ids, mask, values, ids, ids, ids, one, one.astype(jnp.int32), one, one.astype(bool)
            )._replace(
                ages=ids,
                proximal_logp=values,
                advantages=values,
                weights=values,
                off_policy_weight=values,
                ref_logp=values,
            )
            _, own = self.loss(PolicyOutputs(values, values), micro, **self.algorithm.loss_settings)
            own = own | ({"kl": values} if self.algorithm.kl.coef else {})
            return self._metric_sums(micro, TokenStats(values, values, values), own)

        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(trace))

    def _stats(self, params: Params, micro: Batch) -> TokenStats:
        attend = PackedAttention(micro.segment_ids, micro.context_ids)
        hidden, _ = self.model.hidden(params, micro.tokens, micro.positions, attend, remat=self.remat)
        return packed_stats(
            hidden,
            micro.tokens,
            micro.previous,
            micro.loss_mask,
            masked.per_token(micro.temperature, micro.segment_ids),
            lambda h: self.model.logits(params, h),
            micro.support,
            self.chunk,
        )

    def _metric_sums(self, micro: Batch, stats: TokenStats, own: dict[str, Array]) -> dict[str, Array]:
        """Sums over the loss mask, and one maximum; a loss's own metrics replace none of the framework's."""
        mask = micro.loss_mask
        gap = micro.proximal_logp - micro.behavior_logp
        _, is_capped = self._off_policy(micro)
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


def add_metrics(left: dict[str, Array], right: dict[str, Array]) -> dict[str, Array]:
    return {
        name: jnp.maximum(left[name], right[name]) if name == MAXIMUM else left[name] + right[name]
        for name in left
    }


def to_floats(minibatches: Sequence[dict[str, Any]]) -> dict[str, float]:
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
