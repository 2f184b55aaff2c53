"""KL to the reference policy: as a loss term whose gradient is right off-policy too, and as a reward."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float

from areal_jax.algorithms.ratios import kl_estimate, ratio


def kl_loss(
    logp: Float[Array, "B T"],
    ref_logp: Float[Array, "B T"],
    behavior_logp: Float[Array, "B T"],
    estimator: str,
) -> Float[Array, "B T"]:
    """Token estimates of KL(current | reference), weighted by w = exp(logp - behaviour).

    k3 is differentiated through w, k1 and k2 are not. In expectation under the behaviour policy the gradients
    of k2 and k3 are the KL's own, on policy and off; k1's is 0, so that as a loss it does nothing but add
    noise (`algorithm.kl.allow_biased`). arXiv:2510.01555, arXiv:2512.21852.
    """
    weight = ratio(logp, behavior_logp)
    weight = weight if estimator == "k3" else jax.lax.stop_gradient(weight)
    return weight * kl_estimate(logp, ref_logp, estimator)


def kl_reward(
    behavior_logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"], estimator: str = "k1"
) -> Float[Array, "B T"]:
    """Token estimates of KL(behaviour | reference) of the sampler's own log-probs, without gradient.

    Subtracted from the rewards. Only k1's policy gradient is the KL's; k2 and k3 need
    `algorithm.kl.allow_biased`.
    """
    return jax.lax.stop_gradient(kl_estimate(behavior_logp, ref_logp, estimator))
