"""Policy losses: pure functions `loss(now, batch, *, settings) -> (token_loss, metrics)`.

Gradients flow through `now` (PolicyOutputs). `token_loss` is (B, T) float32, one value per token, to be
minimised; the framework sums `token_loss * batch.loss_weights * batch.off_policy_weight`. Values off the loss
mask are ignored. Metrics are (B, T) arrays, which the framework averages over the loss mask. The settings are
the keyword-only arguments, with annotations that limit the valid values.

The losses here compare the current with the proximal policy, and the off-policy weight corrects for the
proximal policy's distance from the behaviour policy. The losses in `behavior_losses` compare the current with
the behaviour policy and have no off-policy weight.
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
from areal_jax.algorithms.shapes import check_batch
from areal_jax.types import PolicyOutputs, PreparedBatch

Loss = Callable[..., tuple[Array, dict[str, Array]]]


def ppo_clip(
    now: PolicyOutputs,
    batch: PreparedBatch,
    *,
    low: Annotated[float, Field(ge=0)] = 0.2,
    high: Annotated[float, Field(ge=0)] = 0.2,
    dual: Annotated[float, Field(gt=1)] | None = None,
    level: Level = "token",
) -> tuple[Array, dict[str, Array]]:
    """Returns -min(u A, clip(u, 1 - low, 1 + high) A), u: ratio of current to proximal policy at `level`.

    A is the advantage, `ratio_at` explains `level`. With `dual`, the loss is at most -dual A where A < 0.
    PPO, Schulman et al. (arXiv:1707.06347); asymmetric clip, DAPO (arXiv:2503.14476); proximal policy, Hilton
    et al. (arXiv:2110.00641), AReaL (arXiv:2505.24298); dual clip, Ye et al. (arXiv:1912.09729); sequence
    levels, GSPO (arXiv:2507.18071), with low and high of some thousandths.
    """
    check_batch(batch, *now)
    u = ratio_at(level, now.logp, batch.proximal_logp, batch)
    free = u * batch.advantages
    gain = jnp.minimum(free, jnp.clip(u, 1 - low, 1 + high) * batch.advantages)
    if dual is not None:
        gain = jnp.where(batch.advantages < 0, jnp.maximum(gain, dual * batch.advantages), gain)
    return -gain, {"ratio": u, "clip_share": (gain != free).astype(u.dtype)}


def sapo(
    now: PolicyOutputs,
    batch: PreparedBatch,
    *,
    tau_positive: Annotated[float, Field(gt=0)] = 1.0,
    tau_negative: Annotated[float, Field(gt=0)] = 1.05,
) -> tuple[Array, dict[str, Array]]:
    """Returns -(4 / tau) sigmoid(tau (u - 1)) A, u = exp(logp - proximal_logp): a soft gate, not a clip.

    tau is `tau_positive` if A > 0, else `tau_negative`; the gate's slope at u = 1 is 1. Gao et al.
    (arXiv:2511.20347).
    """
    check_batch(batch, *now)
    u = ratio(now.logp, batch.proximal_logp)
    tau = jnp.where(batch.advantages > 0, tau_positive, tau_negative)
    return -4 / tau * jax.nn.sigmoid(tau * (u - 1)) * batch.advantages, {"ratio": u}


def importance(
    now: PolicyOutputs, batch: PreparedBatch, *, level: Level = "token"
) -> tuple[Array, dict[str, Array]]:
    """Returns -u A, without a clip; u: ratio of current to proximal policy at `level` (see `ratio_at`)."""
    check_batch(batch, *now)
    u = ratio_at(level, now.logp, batch.proximal_logp, batch)
    return -u * batch.advantages, {"ratio": u}


def policy_gradient(now: PolicyOutputs, batch: PreparedBatch) -> tuple[Array, dict[str, Array]]:
    """Returns -A logp: the policy gradient of Williams (1992), or maximum likelihood if A = 1."""
    check_batch(batch, *now)
    return -batch.advantages * now.logp, {"nll": -now.logp}


LOSSES: Mapping[str, Any] = {
    loss.__name__: loss for loss in (ppo_clip, sapo, importance, policy_gradient, cispo, aipo, dppo)
}
"""The built-in losses by their names in a config, which are the names of the functions."""
