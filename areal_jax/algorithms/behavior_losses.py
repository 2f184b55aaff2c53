"""Losses that use the ratio r = exp(logp - behavior_logp) of the current to the behaviour policy.

Such a loss itself corrects for tokens that an older policy sampled, so an off-policy weight would correct for
them twice. Therefore the losses in `presets.OWN_RATIO` require the setting `off_policy: none`; a user's loss
function requires this setting by having the attribute `off_policy = "none"`. The module `losses` describes
arguments and results. A is the advantage; sg stops gradients.
"""

from __future__ import annotations

from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array
from pydantic import Field

from areal_jax.algorithms.ratios import binary_kl, ratio, total_variation
from areal_jax.algorithms.shapes import check_batch
from areal_jax.types import ArealError, PolicyOutputs, PreparedBatch


def cispo(
    now: PolicyOutputs, batch: PreparedBatch, *, high: Annotated[float, Field(gt=0)] = 4.0
) -> tuple[Array, dict[str, Array]]:
    """Returns -sg(min(r, 1 + high)) A logp, r = exp(logp - behavior_logp), advantage A; sg stops gradients.

    So every token has a gradient, with a bounded weight. MiniMax-M1 (arXiv:2506.13585) tunes `high` without
    publishing its value; the default 4 is ScaleRL's (arXiv:2510.13786).
    """
    return _truncated(now, batch, 1 + high)


def aipo(
    now: PolicyOutputs, batch: PreparedBatch, *, cap: Annotated[float, Field(gt=0)] = 5.0
) -> tuple[Array, dict[str, Array]]:
    """Returns -sg(min(r, cap)) A logp, r = exp(logp - behavior_logp), advantage A; sg stops gradients.

    The bound on r is the same for either sign of A. LlamaRL (arXiv:2505.24034), with cap 2 to 10. On policy,
    where r = 1, the gradient is REINFORCE's gradient.
    """
    return _truncated(now, batch, cap)


def _truncated(now: PolicyOutputs, batch: PreparedBatch, cap: float) -> tuple[Array, dict[str, Array]]:
    check_batch(batch, *now)
    r = jax.lax.stop_gradient(ratio(now.logp, batch.behavior_logp))
    return -jnp.minimum(r, cap) * batch.advantages * now.logp, {
        "ratio": r,
        "clip_share": (r > cap).astype(r.dtype),
    }


def dppo(
    now: PolicyOutputs,
    batch: PreparedBatch,
    *,
    delta: Annotated[float, Field(gt=0)] = 0.15,
    divergence: Literal["total_variation", "binary_kl"] = "total_variation",
) -> tuple[Array, dict[str, Array]]:
    """Returns -r A, r = exp(logp - behavior_logp), but 0 for a token that moved too far in A's direction.

    A is the advantage. A token moved too far if A > 0 and r > 1, or A < 0 and r < 1, and the current policy's
    `divergence` from the behaviour policy exceeds `delta`: total_variation is |e^logp - e^behavior_logp|,
    binary_kl is KL(behaviour | current) over two events, this token and any other, for which the authors set
    delta 0.05. Qi et al. (arXiv:2602.04879).
    """
    if divergence not in ("total_variation", "binary_kl"):
        raise ArealError(
            f"algorithm.loss_settings.divergence={divergence!r} is unknown to the loss dppo; use "
            "total_variation or binary_kl"
        )
    check_batch(batch, *now)
    r = ratio(now.logp, batch.behavior_logp)
    apart = total_variation if divergence == "total_variation" else binary_kl
    is_far = jax.lax.stop_gradient(apart(batch.behavior_logp, now.logp)) > delta
    is_cut = is_far & (batch.advantages * (now.logp - batch.behavior_logp) > 0)
    return -jnp.where(is_cut, 0.0, batch.advantages) * r, {
        "ratio": r,
        "clip_share": is_cut.astype(r.dtype),
    }
