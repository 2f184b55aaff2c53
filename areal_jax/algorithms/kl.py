"""KL to the reference policy as a loss term, weighted so that its gradient is right off-policy too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from areal_jax.algorithms.losses import LOG_RATIO_BOUND, ratio


def kl_loss(
    logp: Float[Array, "B T"],
    ref_logp: Float[Array, "B T"],
    behavior_logp: Float[Array, "B T"],
    estimator: str,
) -> Float[Array, "B T"]:
    """Token estimates of KL(current | reference), their gradient exact in expectation under the behaviour.

    k2 = (logp - ref)^2 / 2 weighted by sg(exp(logp - behaviour)); k3 = e^d - 1 - d, d = ref - logp, weighted
    by exp(logp - behaviour), differentiated through. Schulman (joschu.net/blog/kl-approx), arXiv:2510.01555,
    arXiv:2512.21852.
    """
    weight = ratio(logp, behavior_logp)
    if estimator == "k2":
        return jax.lax.stop_gradient(weight) * 0.5 * (logp - ref_logp) ** 2
    gap = jnp.clip(ref_logp - logp, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return weight * (jnp.exp(gap) - 1 - gap)
