"""The effective sample size of a batch: to how many tokens or sequences of equal weight its weights amount.

A token's importance weight is w = exp(d), d = log-prob under the policy before the update - behaviour
log-prob; a sequence's is the product over its tokens, exp(Σ d). Kish's effective sample size of n weights is
(Σ w)² / Σ w²: n if all are equal, 1 if one outweighs all others (L. Kish, Survey Sampling, 1965; A. Owen,
Monte Carlo theory, methods and examples, 2013, section 9.3). No weight is capped or masked. Weights are
summed relative to the largest, so that no sum overflows. Shapes: R rows of T tokens, S sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from areal_jax.algorithms import masked
from areal_jax.types import PreparedBatch


class WeightSums(NamedTuple):
    """Sums over `count` weights exp(x), each divided by exp(`largest`); zeros are the sums of no weight."""

    count: Float[Array, ""]
    largest: Float[Array, ""]
    """The largest x, in nats; 0 if there is none."""
    total: Float[Array, ""]
    squares: Float[Array, ""]

    def joined(self, other: WeightSums) -> WeightSums:
        """Returns the sums over the weights of both `self` and `other`."""
        largest = jnp.maximum(self.largest, other.largest)
        # The 0 of no weight at all must not outweigh weights that are far below 1.
        largest = jnp.where(
            self.count == 0, other.largest, jnp.where(other.count == 0, self.largest, largest)
        )
        # An empty one may lie above the other, where exp would overflow.
        own, its = (jnp.exp(jnp.minimum(x.largest - largest, 0.0)) for x in (self, other))
        return WeightSums(
            self.count + other.count,
            largest,
            self.total * own + other.total * its,
            self.squares * own**2 + other.squares * its**2,
        )

    def share(self) -> float:
        """Returns the effective sample size as a share of `count`, in (0, 1]; 1 if there is no weight."""
        count, total, squares = (float(np.asarray(x)) for x in (self.count, self.total, self.squares))
        return total**2 / (count * squares) if count else 1.0


def weight_sums(log_weights: Float[Array, "..."], mask: Bool[Array, "..."]) -> WeightSums:
    """Returns the sums over the weights exp(log_weights) where the mask is True.

    A log-weight that is not finite makes the sums NaN.
    """
    chex.assert_equal_shape([log_weights, mask])
    chex.assert_type([log_weights, mask], [float, bool])
    x = masked.keep(jnp.where(jnp.isfinite(log_weights), log_weights, jnp.nan), mask)
    count = mask.sum().astype(x.dtype)
    largest = jnp.where(count > 0, jnp.where(mask, x, -jnp.inf).max(), 0.0)
    weights = masked.keep(jnp.exp(x - largest), mask)
    return WeightSums(count, largest, weights.sum(), (weights**2).sum())


def effective_sizes(logp: Float[Array, "R T"], micro: PreparedBatch) -> dict[str, WeightSums]:
    """Returns the sums of a micro-batch's token and sequence weights, by the name of their metric.

    `logp`: log-probs under the policy before the update. Only tokens on the loss mask that a policy sampled
    count, and sequences with such a token; a sequence lies in one micro-batch as a whole.
    """
    mask = micro.loss_mask & (micro.versions >= 0)
    gap = masked.keep(logp - micro.behavior_logp, mask)
    ids, sequences = micro.segment_ids, micro.group_ids.shape[0]
    lengths = masked.per_sequence(mask.astype(gap.dtype), ids, sequences)
    return {
        "effective_token_share": weight_sums(gap, mask),
        "effective_sequence_share": weight_sums(masked.per_sequence(gap, ids, sequences), lengths > 0),
    }
