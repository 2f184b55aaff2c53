"""The KL to the reference policy, for its two uses: as a term of the loss, or as a part of the reward."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from areal_jax.algorithms.ratios import kl_estimate, ratio


def kl_loss(
    logp: Float[Array, "B T"],
    ref_logp: Float[Array, "B T"],
    behavior_logp: Float[Array, "B T"],
    estimator: str,
) -> Float[Array, "B T"]:
    """Returns each token's estimate of KL(current | reference), times w = exp(logp - behavior_logp).

    `estimator` is k1, k2 or k3 (`ratios.kl_estimate`). The behaviour policy sampled the tokens; w corrects
    for this, so that the gradients of k2 and k3 are in expectation the gradient of the KL. Only with k3 does
    the gradient flow through w. A config with k1 is refused, because the expectation of its gradient is 0: as
    a loss it only adds noise. arXiv:2510.01555, arXiv:2512.21852.
    """
    chex.assert_type([logp, ref_logp, behavior_logp], float)
    if estimator == "k3":
        return _weighted_k3(logp, ref_logp, behavior_logp)
    weight = jax.lax.stop_gradient(ratio(logp, behavior_logp))
    return weight * kl_estimate(logp, ref_logp, estimator)


@jax.custom_jvp
def _weighted_k3(logp: Array, ref_logp: Array, behavior_logp: Array) -> Array:
    return ratio(logp, behavior_logp) * kl_estimate(logp, ref_logp, "k3")


@_weighted_k3.defjvp
def _slope_of_weighted_k3(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    """Returns the weighted k3, w (e^d - 1 - d), and its tangent: logp's tangent times w (logp - ref_logp).

    w = exp(logp - behavior_logp), d = ref_logp - logp. Automatic differentiation would instead subtract two
    terms of size w e^d, and from about d = 15 on float32 cannot represent the difference.
    """
    logp, ref_logp, behavior_logp = primals
    gap = logp - ref_logp
    gap = jnp.where(jnp.isfinite(gap), gap, jnp.nan)
    return _weighted_k3(*primals), tangents[0] * ratio(logp, behavior_logp) * gap


def kl_reward(
    behavior_logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"], estimator: str = "k1"
) -> Float[Array, "B T"]:
    """Returns each token's estimate of KL(behaviour | reference), without a gradient.

    The caller multiplies the estimate by the KL's coefficient and subtracts the product from the token
    rewards. Only with k1 is the resulting policy gradient the gradient of the KL; k2 and k3 are biased, and a
    config with them is refused.
    """
    return jax.lax.stop_gradient(kl_estimate(behavior_logp, ref_logp, estimator))
