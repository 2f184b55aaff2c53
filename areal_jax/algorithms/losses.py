"""Policy losses: pure functions `loss(now, batch, *, settings) -> (token_loss, metrics)`.

`now` (PolicyOutputs) carries the gradients; arrays are (B, T) float32, unreduced, to be minimised. The
framework multiplies by `batch.weights * batch.off_policy_weight` and adds up; what a function returns off the
loss mask is ignored. Metrics are (B, T) arrays, averaged over the loss mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from areal_jax.types import Batch, PolicyOutputs

Loss = Callable[..., tuple[Array, dict[str, Array]]]

LOG_RATIO_BOUND = 20.0


def ratio(of: Float[Array, "..."], to: Float[Array, "..."]) -> Float[Array, "..."]:
    """exp(of - to), the log-ratio clamped to +-20 so that neither value nor gradient overflows."""
    return jnp.exp(jnp.clip(of - to, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def ppo_clip(
    now: PolicyOutputs, batch: Batch, *, low: float = 0.2, high: float = 0.2, dual: float | None = None
) -> tuple[Array, dict[str, Array]]:
    """-min(u A, clip(u, 1 - low, 1 + high) A), u = exp(logp - proximal_logp).

    `dual` > 1 bounds the loss of negative advantages: -max(..., dual A). Centred on the proximal policy it is
    decoupled PPO's trust region. PPO, Schulman et al. (arXiv:1707.06347); asymmetric clip, DAPO
    (arXiv:2503.14476); decoupled, Hilton et al. (arXiv:2110.00641), AReaL (arXiv:2505.24298); dual clip, Ye
    et al. (arXiv:1912.09729).
    """
    u = ratio(now.logp, batch.proximal_logp)
    clipped = jnp.clip(u, 1 - low, 1 + high) * batch.advantages
    gain = jnp.minimum(u * batch.advantages, clipped)
    if dual is not None:
        gain = jnp.where(batch.advantages < 0, jnp.maximum(gain, dual * batch.advantages), gain)
    return -gain, {"ratio": u, "clip_share": (clipped < u * batch.advantages).astype(jnp.float32)}


def policy_gradient(now: PolicyOutputs, batch: Batch) -> tuple[Array, dict[str, Array]]:
    """-A logp: the plain policy gradient; maximum likelihood where A = 1."""
    return -batch.advantages * now.logp, {"nll": -now.logp}


LOSSES: Mapping[str, Any] = {"ppo_clip": ppo_clip, "policy_gradient": policy_gradient}
