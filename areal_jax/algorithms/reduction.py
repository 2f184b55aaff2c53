"""Reduction weights: they turn the sum over a minibatch's loss tokens into a mean over tokens or sequences.

They are computed over whole minibatches, before these are split into micro-batches; so a minibatch's gradient
is the sum of its micro-batches' gradients, however the minibatch is split.
"""

from __future__ import annotations

import chex
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from areal_jax.algorithms.masked import per_sample, per_sequence, per_token


def reduction_weights(
    loss_mask: Bool[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    sequences: int,
    minibatches: int,
    reduction: str,
    constant: float = 1.0,
    *,
    sample_ids: Int[Array, " S"] | None = None,
) -> Float[Array, "B T"]:
    """Returns each token's weight for `reduction`; minibatches are equal, consecutive parts of the rows.

    token_mean: m / (sum of m over the minibatch), with the loss mask m. token_mean_batch: m / (sum of m over
    the batch / `minibatches`). sequence_mean: m / (L S), with L loss tokens in the token's sample, and S
    samples with loss tokens in the minibatch. sequence_sum: m / S. constant: m / (`constant` S).
    `sequences`: number of sequences in the batch; `sample_ids`: the sample of each (`Batch.sample_ids`).
    """
    chex.assert_equal_shape([loss_mask, segment_ids])
    chex.assert_type([loss_mask, segment_ids], [bool, int])
    chex.assert_is_divisible(loss_mask.shape[0], minibatches)
    m = loss_mask.astype(float)  # float32, or float64 if jax enables it
    of_minibatch = jnp.repeat(jnp.arange(minibatches), m.shape[0] // minibatches)  # (B,)
    tokens = m.reshape(minibatches, -1).sum(1)
    if reduction == "token_mean":
        return m / jnp.maximum(tokens, 1)[of_minibatch][:, None]
    if reduction == "token_mean_batch":
        return m / jnp.maximum(tokens.sum() / minibatches, 1)
    lengths = per_sample(per_sequence(m, segment_ids, sequences), sample_ids)
    own_length = jnp.maximum(per_token(lengths, segment_ids), 1)
    # Each sample adds 1 up to rounding.
    with_tokens = (m / own_length).reshape(minibatches, -1).sum(1).round()  # samples per minibatch
    share = m / jnp.maximum(with_tokens, 1)[of_minibatch][:, None]
    if reduction == "sequence_mean":
        return share / own_length
    if reduction == "sequence_sum":
        return share
    if reduction == "constant":
        return share / constant
    raise ValueError(
        f"algorithm.reduction={reduction!r} is unknown; use token_mean, token_mean_batch, sequence_mean, "
        "sequence_sum or constant"
    )
