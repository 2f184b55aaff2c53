"""Reductions and gathers under a mask: the only place that sums over padded arrays.

Off the mask a value may be anything, NaN and infinities included; it is replaced before it is used, so that
neither a sum nor a gradient sees it.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from areal_jax.types import ArealError

Aggregate = Literal["mean", "sum", "max"]


def keep(values: Float[Array, "..."], mask: Bool[Array, "..."]) -> Float[Array, "..."]:
    """`values` on the mask, 0 off it; no gradient off it."""
    return jnp.where(mask, values, 0.0)


def total(values: Float[Array, "..."], mask: Bool[Array, "..."]) -> Float[Array, ""]:
    return keep(values, mask).sum()


def mean(values: Float[Array, "..."], mask: Bool[Array, "..."]) -> Float[Array, ""]:
    """Mean over the mask; 0 where the mask is empty."""
    return total(values, mask) / jnp.maximum(mask.sum(), 1)


def largest(values: Float[Array, "..."], mask: Bool[Array, "..."]) -> Float[Array, ""]:
    """Maximum over the mask of values >= 0; 0 where the mask is empty."""
    return keep(values, mask).max()


def per_token(values: Float[Array, " S"], segment_ids: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Each token's sequence value; 0 on padding and on prompts that groups share."""
    padded = jnp.concatenate([jnp.zeros_like(values[:1]), values])
    return padded.at[segment_ids].get(mode="fill", fill_value=0)


def per_sequence(
    values: Float[Array, "B T"], segment_ids: Int[Array, "B T"], sequences: int
) -> Float[Array, " S"]:
    """Sum over each sequence's tokens."""
    return jax.ops.segment_sum(values.ravel(), segment_ids.ravel(), sequences + 1)[1:]


def of_sequence(
    aggregate: Aggregate,
    values: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    sequences: int,
) -> Float[Array, "B T"]:
    """Each token's sequence aggregate: mean, sum or maximum over the sequence's tokens on the mask.

    0 where a sequence has none. No token off the mask and no other sequence plays a part, in no bit.
    """
    if aggregate == "max":
        lowest = jnp.where(mask, values, -jnp.inf).ravel()
        each = jax.ops.segment_max(lowest, segment_ids.ravel(), sequences + 1)[1:]
        return per_token(jnp.where(each == -jnp.inf, 0.0, each), segment_ids)
    if aggregate not in ("mean", "sum"):
        raise ArealError(f"aggregate={aggregate!r} of a sequence's tokens: use mean, sum or max")
    each = per_sequence(keep(values, mask), segment_ids, sequences)
    if aggregate == "mean":
        each = each / jnp.maximum(per_sequence(mask.astype(values.dtype), segment_ids, sequences), 1)
    return per_token(each, segment_ids)
