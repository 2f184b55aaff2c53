"""Ratios of policies and what measures them apart, from log-probs of the sampled tokens. (B, T) float32 each.

Log-ratios are clamped to +-20 before exp, so that neither a value nor a gradient overflows. One that is not
finite is a fault upstream and no ratio at all: it makes the result, and every gradient through it, NaN, which
ends a run with an error, rather than weighing its token as if nothing were wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from areal_jax.algorithms.masked import of_sequence
from areal_jax.types import ArealError, Batch

LOG_RATIO_BOUND = 20.0
LEAST_PROBABILITY = 1e-8

Level = Literal["token", "sequence", "sequence_token"]


def exp_bounded(log_ratio: Float[Array, "..."]) -> Float[Array, "..."]:
    """exp(log_ratio clamped to +-20); NaN where it is not finite."""
    is_finite = jnp.isfinite(log_ratio)
    bounded = jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    return bounded * jnp.where(is_finite, 1.0, jnp.nan)  # a factor, so that the gradient is NaN too


def ratio(of: Float[Array, "..."], to: Float[Array, "..."]) -> Float[Array, "..."]:
    """exp(of - to)."""
    return exp_bounded(of - to)


def ratio_at(
    level: Level, logp: Float[Array, "B T"], center: Float[Array, "B T"], batch: Batch
) -> Float[Array, "B T"]:
    """The ratio of current to center policy that a token's loss sees.

    token: exp(logp - center). sequence: s, its geometric mean over the sequence's loss tokens, through which
    every one of them gets gradient. sequence_token: sg(s) exp(logp - sg(logp)): the value of s, the gradient
    of the token's own log-prob. GSPO and GSPO-token, Zheng et al. (arXiv:2507.18071).
    """
    if level == "token":
        return ratio(logp, center)
    if level not in ("sequence", "sequence_token"):
        raise ArealError(f"level={level!r} of a ratio: use token, sequence or sequence_token")
    mean = of_sequence("mean", logp - center, batch.loss_mask, batch.segment_ids, batch.group_ids.shape[0])
    s = jnp.where(batch.loss_mask, exp_bounded(mean), 1.0)  # so that no token off the mask has a say in it
    return (
        s if level == "sequence" else jax.lax.stop_gradient(s) * jnp.exp(logp - jax.lax.stop_gradient(logp))
    )


def total_variation(p: Float[Array, "B T"], q: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """|e^p - e^q|: total variation between "this token" and "another" under each."""
    return jnp.abs(jnp.exp(p) - jnp.exp(q))


def binary_kl(p: Float[Array, "B T"], q: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """KL(p | q) of "this token" against "another", from the token's log-probs; probabilities at least 1e-8.

    Log-probs are clamped, and 1 - e^p is taken by expm1: in float32 the probabilities of a nearly sure token
    have no digits left to take a logarithm of.
    """
    (token, others), (q_token, q_others) = _log_pair(p), _log_pair(q)
    return jnp.exp(token) * (token - q_token) + jnp.exp(others) * (others - q_others)


def _log_pair(logp: Float[Array, "B T"]) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-probs of the token and of any other."""
    least, most = math.log(LEAST_PROBABILITY), math.log1p(-LEAST_PROBABILITY)
    others = jnp.log(jnp.clip(-jnp.expm1(logp), LEAST_PROBABILITY, 1 - LEAST_PROBABILITY))
    return jnp.clip(logp, least, most), others


def widest_binary_kl(p: Float[Array, "B T"], q: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """The larger direction of the binary KL."""
    return jnp.maximum(binary_kl(p, q), binary_kl(q, p))


def kl_estimate(p: Float[Array, "..."], q: Float[Array, "..."], estimator: str) -> Float[Array, "..."]:
    """A token's estimate of KL(p | q) where p sampled it.

    k1 = p - q, k2 = (p - q)^2 / 2, k3 = e^d - 1 - d with d = q - p, clamped. Schulman
    (joschu.net/blog/kl-approx).
    """
    gap = q - p
    if estimator == "k1":
        return -gap
    if estimator == "k2":
        return 0.5 * gap**2
    if estimator == "k3":
        return exp_bounded(gap) - 1 - jnp.clip(gap, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    raise ArealError(f"no KL estimator {estimator!r}: use k1, k2 or k3")


DIVERGENCES: Mapping[str, Callable[[Array, Array], Array]] = {
    "k1": lambda p, q: kl_estimate(p, q, "k1"),
    "k2": lambda p, q: kl_estimate(p, q, "k2"),
    "k3": lambda p, q: kl_estimate(p, q, "k3"),
    "binary_kl": widest_binary_kl,
}
"""What an off-policy mask may measure beside the ratio, of (behaviour, proximal)."""
