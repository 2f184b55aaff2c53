"""Advantage estimators: pure functions `advantage(rewards (S,), batch, *, settings) -> (B, T)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from areal_jax.algorithms.masked import per_token
from areal_jax.types import Batch


def group_normalized(
    rewards: Float[Array, " S"],
    batch: Batch,
    *,
    center: Literal["group", "batch"] = "group",
    scale: Literal["group", "batch", "none"] = "group",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Float[Array, "B T"]:
    """(R - mean) / (std + eps), broadcast to every token; mean by `center`, std by `scale`.

    group/group is GRPO (arXiv:2402.03300), group/none Dr.GRPO (arXiv:2503.20783), batch/batch AReaL's
    global-batch normalisation (arXiv:2505.24298). `ddof` 1 is the sample standard deviation, as the public
    systems take it; 0 the population's. Equal rewards, in what gives the mean or in what gives the standard
    deviation, get exactly 0.
    """
    groups = batch.group_ids
    whole = jnp.zeros_like(groups)
    mean, _, is_flat = _statistics(rewards, groups if center == "group" else whole, ddof)
    centred = jnp.where(is_flat, 0.0, rewards - mean)
    if scale == "none":
        return per_token(centred, batch.segment_ids)
    _, std, is_flat = _statistics(rewards, groups if scale == "group" else whole, ddof)
    return per_token(jnp.where(is_flat, 0.0, centred / (std + eps)), batch.segment_ids)


def ones(rewards: Float[Array, " S"], batch: Batch) -> Float[Array, "B T"]:
    """1 everywhere: supervised learning by the policy gradient's machinery."""
    return per_token(jnp.ones_like(rewards), batch.segment_ids)


def _statistics(x: Float[Array, " S"], ids: Int[Array, " S"], ddof: int) -> tuple[Array, Array, Array]:
    """Mean, standard deviation and whether all values are equal, of each element's own group; (S,) each."""
    size = x.shape[0]
    count = jax.ops.segment_sum(jnp.ones_like(x), ids, size)
    mean = jax.ops.segment_sum(x, ids, size) / jnp.maximum(count, 1)
    squares = jax.ops.segment_sum((x - mean[ids]) ** 2, ids, size)
    std = jnp.sqrt(squares / jnp.maximum(count - ddof, 1))
    is_flat = jax.ops.segment_max(x, ids, size) == jax.ops.segment_min(x, ids, size)
    return mean[ids], jnp.where(is_flat, 0.0, std)[ids], is_flat[ids]


ADVANTAGES: Mapping[str, Any] = {"group_normalized": group_normalized, "ones": ones}
