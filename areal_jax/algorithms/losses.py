"""Policy losses: pure functions `loss(now, batch, *, settings) -> (token_loss, metrics)`.

`now` (PolicyOutputs) carries the gradients; arrays are (B, T) float32, unreduced, to be minimised. The
framework multiplies by `batch.weights * batch.off_policy_weight` and adds up; what a function returns off the
loss mask is ignored. Metrics are (B, T) arrays, averaged over the loss mask. Keyword-only arguments are the
settings, and their annotations what a value may be.

Here stand the losses around the proximal policy, which the off-policy weight corrects for; those that hold a
ratio of their own to the behaviour policy stand in behavior_losses.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array
from pydantic import Field

from areal_jax.algorithms.behavior_losses import aipo, cispo, dppo
from areal_jax.algorithms.ratios import Level, ratio, ratio_at
from areal_jax.types import Batch, PolicyOutputs

Loss = Callable[..., tuple[Array, dict[str, Array]]]


def ppo_clip(
    now: PolicyOutputs,
    batch: Batch,
    *,
    low: Annotated[float, Field(ge=0)] = 0.2,
    high: Annotated[float, Field(ge=0)] = 0.2,
    dual: Annotated[float, Field(gt=1)] | None = None,
    level: Level = "token",
) -> tuple[Array, dict[str, Array]]:
    """-min(u A, clip(u, 1 - low, 1 + high) A), u = exp(logp - proximal_logp) at `level`.

    `dual` > 1 bounds the loss of negative advantages: -max(..., dual A). Centred on the proximal policy it is
    decoupled PPO's trust region. PPO, Schulman et al. (arXiv:1707.06347); asymmetric clip, DAPO
    (arXiv:2503.14476); decoupled, Hilton et al. (arXiv:2110.00641), AReaL (arXiv:2505.24298); dual clip, Ye
    et al. (arXiv:1912.09729); sequence levels, GSPO (arXiv:2507.18071), whose clip is some thousandths wide.
    """
    u = ratio_at(level, now.logp, batch.proximal_logp, batch)
    free = u * batch.advantages
    gain = jnp.minimum(free, jnp.clip(u, 1 - low, 1 + high) * batch.advantages)
    if dual is not None:
        gain = jnp.where(batch.advantages < 0, jnp.maximum(gain, dual * batch.advantages), gain)
    return -gain, {"ratio": u, "clip_share": (gain != free).astype(u.dtype)}


def sapo(
    now: PolicyOutputs,
    batch: Batch,
    *,
    tau_positive: Annotated[float, Field(gt=0)] = 1.0,
    tau_negative: Annotated[float, Field(gt=0)] = 1.05,
) -> tuple[Array, dict[str, Array]]:
    """-(4 / tau) sigmoid(tau (u - 1)) A, u = exp(logp - proximal_logp): a gate that closes softly.

    tau is `tau_positive` where A > 0, else `tau_negative`; the gate's slope at u = 1 is 1. Gao et al.
    (arXiv:2511.20347).
    """
    u = ratio(now.logp, batch.proximal_logp)
    tau = jnp.where(batch.advantages > 0, tau_positive, tau_negative)
    return -4 / tau * jax.nn.sigmoid(tau * (u - 1)) * batch.advantages, {"ratio": u}


def importance(now: PolicyOutputs, batch: Batch, *, level: Level = "token") -> tuple[Array, dict[str, Array]]:
    """-u A, u = exp(logp - proximal_logp) at `level`: the importance-weighted policy gradient, unclipped."""
    u = ratio_at(level, now.logp, batch.proximal_logp, batch)
    return -u * batch.advantages, {"ratio": u}


def policy_gradient(now: PolicyOutputs, batch: Batch) -> tuple[Array, dict[str, Array]]:
    """-A logp: the plain policy gradient, Williams (1992); maximum likelihood where A = 1."""
    return -batch.advantages * now.logp, {"nll": -now.logp}


LOSSES: Mapping[str, Any] = {
    "ppo_clip": ppo_clip,
    "sapo": sapo,
    "importance": importance,
    "policy_gradient": policy_gradient,
    "cispo": cispo,
    "aipo": aipo,
    "dppo": dppo,
}
