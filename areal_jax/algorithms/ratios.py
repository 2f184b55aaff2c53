"""Ratios of policies and measures of their distance, from log-probs of the sampled tokens; (B, T) float32.

Log-ratios are clamped to +-20 before exp, so that neither a value nor a gradient overflows. A log-ratio that
is not finite shows an error in the log-probs. The result and every gradient through the result are then NaN,
so that the run ends with an error instead of training with a wrong weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from areal_jax.algorithms.masked import of_sequence
from areal_jax.types import ArealError, PreparedBatch

LOG_RATIO_BOUND = 20.0
LEAST_PROBABILITY = 1e-8

Level = Literal["token", "sequence", "sequence_token"]


def exp_bounded(log_ratio: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns exp(log_ratio clamped to +-20); NaN if log_ratio is not finite."""
    chex.assert_type(log_ratio, float)
    is_finite = jnp.isfinite(log_ratio)
    bounded = jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    return bounded * jnp.where(is_finite, 1.0, jnp.nan)  # a factor, so that the gradient is NaN too


def ratio(of: Float[Array, "..."], to: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the ratio e^of / e^to from two log-probs; the log-ratio is clamped as in `exp_bounded`."""
    chex.assert_equal_shape([of, to])
    return exp_bounded(of - to)


def ratio_at(
    level: Level, logp: Float[Array, "B T"], center: Float[Array, "B T"], batch: PreparedBatch
) -> Float[Array, "B T"]:
    """Returns at each token the ratio of the current policy to the policy with the log-probs `center`.

    level=token: exp(logp - center). level=sequence: s, the geometric mean of these ratios over the sequence's
    loss tokens, with a gradient to each of these tokens. level=sequence_token: the value of s, but with a
    gradient only to the token itself. GSPO and GSPO-token, Zheng et al. (arXiv:2507.18071).
    """
    if level == "token":
        return ratio(logp, center)
    if level not in ("sequence", "sequence_token"):
        raise ArealError(
            f"algorithm.loss_settings.level={level!r} is unknown; use token, sequence or sequence_token"
        )
    mean = of_sequence("mean", logp - center, batch.loss_mask, batch.segment_ids, batch.group_ids.shape[0])
    s = jnp.where(batch.loss_mask, exp_bounded(mean), 1.0)  # so that tokens off the mask do not contribute
    return (
        s if level == "sequence" else jax.lax.stop_gradient(s) * jnp.exp(logp - jax.lax.stop_gradient(logp))
    )


def total_variation(p: Float[Array, "B T"], q: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns |e^p - e^q| for a token's log-probs p and q.

    This is the total variation over two events: this token and any other.
    """
    chex.assert_equal_shape([p, q])
    return jnp.abs(jnp.exp(p) - jnp.exp(q))


def binary_kl(p: Float[Array, "B T"], q: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns KL(p | q) over two events, this token and any other; p and q are the token's log-probs.

    Probabilities are clamped to at least 1e-8. 1 - e^p is computed by expm1: for an almost certain token
    float32 subtraction would leave no correct digits.
    """
    chex.assert_equal_shape([p, q])
    (token, others), (q_token, q_others) = _log_pair(p), _log_pair(q)
    return jnp.exp(token) * (token - q_token) + jnp.exp(others) * (others - q_others)


def _log_pair(logp: Float[Array, "B T"]) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Returns the log-probs of a token and of all other tokens together, clamped as in `binary_kl`.

    `logp`: the token's log-prob; the second result is log(1 - e^logp).
    """
    least, most = math.log(LEAST_PROBABILITY), math.log1p(-LEAST_PROBABILITY)
    others = jnp.log(jnp.clip(-jnp.expm1(logp), LEAST_PROBABILITY, 1 - LEAST_PROBABILITY))
    return jnp.clip(logp, least, most), others


def widest_binary_kl(p: Float[Array, "B T"], q: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns the larger of `binary_kl(p, q)` and `binary_kl(q, p)`."""
    return jnp.maximum(binary_kl(p, q), binary_kl(q, p))


def kl_estimate(p: Float[Array, "..."], q: Float[Array, "..."], estimator: str) -> Float[Array, "..."]:
    """Returns an estimate of KL(p | q) in nats, from the log-probs p and q of a token sampled from p.

    k1 = p - q, k2 = (p - q)^2 / 2, k3 = e^d - 1 - d with d = q - p clamped to +-20. Schulman
    (joschu.net/blog/kl-approx).
    """
    chex.assert_equal_shape([p, q])
    gap = q - p
    if estimator == "k1":
        return -gap
    if estimator == "k2":
        return 0.5 * gap**2
    if estimator == "k3":
        return exp_bounded(gap) - 1 - jnp.clip(gap, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    raise ArealError(f"algorithm.kl.estimator={estimator!r} is unknown; use k1, k2 or k3")


DIVERGENCES: Mapping[str, Callable[[Array, Array], Array]] = {
    **{name: partial(kl_estimate, estimator=name) for name in ("k1", "k2", "k3")},
    "binary_kl": widest_binary_kl,
}
"""Divergences by which the off-policy weight `mask` can cut; called as f(behavior_logp, proximal_logp)."""
