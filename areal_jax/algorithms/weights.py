"""What multiplies a token's loss: the reduction's weight and the off-policy weight.

Reduction weights are computed once, over whole minibatches, before any micro-batch is formed; so micro-batch
gradients are plain sums and their split cannot matter. Off-policy weights are functions
`off_policy(batch, *, settings) -> (weight, is_cut)` of the proximal and the behaviour log-probs, (B, T) each;
no gradient flows through them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from areal_jax.algorithms.losses import ratio
from areal_jax.algorithms.masked import per_sequence, per_token
from areal_jax.types import Batch


def reduction_weights(
    loss_mask: Bool[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    sequences: int,
    minibatches: int,
    reduction: str,
    constant: float = 1.0,
) -> Float[Array, "B T"]:
    """Weights of the named reduction; minibatch m owns the m-th of `minibatches` equal runs of rows.

    With m the mask, |o| a sequence's loss tokens and S the minibatch's sequences that have any:
    token_mean m / sum(m); token_mean_batch m / (sum over the batch / minibatches); sequence_mean m / (|o| S);
    sequence_sum m / S; constant m / (C S).
    """
    m = loss_mask.astype(jnp.float32)
    of_minibatch = jnp.repeat(jnp.arange(minibatches), m.shape[0] // minibatches)  # (B,)
    tokens = m.reshape(minibatches, -1).sum(1)
    if reduction == "token_mean":
        return m / jnp.maximum(tokens, 1)[of_minibatch][:, None]
    if reduction == "token_mean_batch":
        return m / jnp.maximum(tokens.sum() / minibatches, 1)
    lengths = per_sequence(m, segment_ids, sequences)
    own_length = jnp.maximum(per_token(lengths, segment_ids), 1)
    with_tokens = (m / own_length).reshape(minibatches, -1).sum(1).round()  # sequences, a minibatch
    share = m / jnp.maximum(with_tokens, 1)[of_minibatch][:, None]
    if reduction == "sequence_mean":
        return share / own_length
    if reduction == "sequence_sum":
        return share
    if reduction == "constant":
        return share / constant
    raise ValueError(f"no reduction {reduction!r}")


def truncate(batch: Batch, *, cap: float = 5.0) -> tuple[Array, Array]:
    """min(w, cap), w = exp(proximal - behaviour): AReaL Eq. 4 (arXiv:2505.24298)."""
    weight = ratio(batch.proximal_logp, batch.behavior_logp)
    return jnp.minimum(weight, cap), weight > cap


def mask(batch: Batch, *, upper: float = 5.0) -> tuple[Array, Array]:
    """w = exp(proximal - behaviour) where it is at most `upper`, else 0."""
    weight = ratio(batch.proximal_logp, batch.behavior_logp)
    is_cut = weight > upper
    return jnp.where(is_cut, 0.0, weight), is_cut


def none(batch: Batch) -> tuple[Array, Array]:
    """1: no correction."""
    return jnp.ones_like(batch.proximal_logp), jnp.zeros_like(batch.loss_mask)


OFF_POLICY: Mapping[str, Any] = {"truncate": truncate, "mask": mask, "none": none}
