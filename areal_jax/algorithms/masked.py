"""Reductions and gathers under a mask: the only module that sums over padded arrays.

Values off the mask (mask False) may be anything, even NaN or infinite, because a function with a mask first
replaces these values, so that they change neither a result nor a gradient.
"""

from __future__ import annotations

from typing import Literal

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from areal_jax.types import ArealError

Aggregate = Literal["mean", "sum", "max"]


def keep(values: Float[Array, "..."], mask: Bool[Array, "..."]) -> Float[Array, "..."]:
    """Returns `values` where the mask is True, and elsewhere 0, through which no gradient flows."""
    chex.assert_type(mask, bool)
    chex.assert_is_broadcastable(values.shape, mask.shape)
    return jnp.where(mask, values, 0.0)


def total(values: Float[Array, "..."], mask: Bool[Array, "..."]) -> Float[Array, ""]:
    """Returns the sum of the values on the mask."""
    return keep(values, mask).sum()


def mean(values: Float[Array, "..."], mask: Bool[Array, "..."]) -> Float[Array, ""]:
    """Returns the mean of the values on the mask; 0 if the mask is False everywhere."""
    return total(values, mask) / jnp.maximum(mask.sum(), 1)


def is_segment_end(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Returns whether each token is the last of its segment; padding is a segment."""
    return jnp.concatenate(
        [segment_ids[:, 1:] != segment_ids[:, :-1], jnp.ones_like(segment_ids[:, :1], bool)], axis=1
    )


def per_token(values: Float[Array, " S"], segment_ids: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns at each token its sequence's value; 0 at padding and at shared prefixes."""
    chex.assert_rank([values, segment_ids], [1, 2])
    chex.assert_type(segment_ids, int)
    padded = jnp.concatenate([jnp.zeros_like(values[:1]), values])
    return padded.at[segment_ids].get(mode="fill", fill_value=0)


def per_sequence(
    values: Float[Array, "B T"], segment_ids: Int[Array, "B T"], sequences: int
) -> Float[Array, " S"]:
    """Returns the sum of `values` over all tokens of each sequence; `sequences` is the number S."""
    chex.assert_rank(values, 2)
    chex.assert_equal_shape([values, segment_ids])
    chex.assert_type(segment_ids, int)
    return jax.ops.segment_sum(values.ravel(), segment_ids.ravel(), sequences + 1)[1:]


def per_sample(values: Float[Array, " S"], sample_ids: Int[Array, " S"] | None) -> Float[Array, " S"]:
    """Returns at each sequence the sum of `values` over all sequences of its sample (`Batch.sample_ids`)."""
    if sample_ids is None:
        return values
    chex.assert_equal_shape([values, sample_ids])
    return jax.ops.segment_sum(values, sample_ids, len(sample_ids))[sample_ids]


def once_per_sample(values: Float[Array, " S"], sample_ids: Int[Array, " S"] | None) -> Float[Array, " S"]:
    """Returns `values` at the first sequence of each sample, and 0 at the other ones."""
    if sample_ids is None:
        return values
    chex.assert_equal_shape([values, sample_ids])
    return keep(values, jnp.diff(sample_ids, prepend=-1) != 0)


def of_sequence(
    aggregate: Aggregate,
    values: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    sequences: int,
) -> Float[Array, "B T"]:
    """Returns at each token the `aggregate` (mean, sum or max) of its sequence's values on the mask.

    The result is 0 for a sequence without tokens on the mask. Values off the mask and values of other
    sequences do not change a bit of a sequence's result. `sequences`: number of sequences in the batch.
    """
    chex.assert_equal_shape([values, mask, segment_ids])
    if aggregate == "max":
        lowest = jnp.where(mask, values, -jnp.inf).ravel()
        each = jax.ops.segment_max(lowest, segment_ids.ravel(), sequences + 1)[1:]
        return per_token(jnp.where(each == -jnp.inf, 0.0, each), segment_ids)
    if aggregate not in ("mean", "sum"):
        raise ArealError(
            f"algorithm.off_policy_settings.aggregate={aggregate!r} is unknown; use mean, sum or max"
        )
    each = per_sequence(keep(values, mask), segment_ids, sequences)
    if aggregate == "mean":
        each = each / jnp.maximum(per_sequence(mask.astype(values.dtype), segment_ids, sequences), 1)
    return per_token(each, segment_ids)
