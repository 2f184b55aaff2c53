"""What multiplies a token's loss: the reduction's weight and the off-policy weight.

Both are computed once, over whole minibatches, before any micro-batch is formed; so micro-batch gradients are
plain sums and their split cannot matter.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from areal_jax.algorithms.losses import ratio
from areal_jax.algorithms.masked import per_sequence, per_token


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


def off_policy_weight(
    proximal_logp: Float[Array, "B T"],
    behavior_logp: Float[Array, "B T"],
    loss_mask: Bool[Array, "B T"],
    kind: str,
    cap: float,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """exp(proximal - behaviour), truncated to `cap` or masked above it, and where that happened. No gradient.

    The decoupled objective's correction, AReaL Eq. 4 (arXiv:2505.24298).
    """
    if kind == "none":
        return jnp.ones_like(proximal_logp), jnp.zeros_like(loss_mask)
    weight = ratio(proximal_logp, behavior_logp)
    is_over = (weight > cap) & loss_mask
    return jnp.where(weight > cap, cap if kind == "truncate" else 0.0, weight), is_over
