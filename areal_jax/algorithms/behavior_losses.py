"""Losses that hold their own ratio to the behaviour policy, r = exp(logp - behavior_logp).

They correct for staleness themselves, so the off-policy weight must be 1: `off_policy: none` is demanded of
them (`presets.OWN_RATIO`); one of your own says so by the attribute `off_policy = "none"`. The contract is
that of losses.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array
from pydantic import Field

from areal_jax.algorithms.ratios import binary_kl, ratio, total_variation
from areal_jax.types import ArealError, Batch, PolicyOutputs


def cispo(
    now: PolicyOutputs, batch: Batch, *, high: Annotated[float, Field(gt=0)] = 4.0
) -> tuple[Array, dict[str, Array]]:
    """-sg(min(r, 1 + high)) A logp: the weight is clipped, never the token; no lower bound.

    MiniMax-M1 (arXiv:2506.13585), which tunes `high` and does not say to what; 1 + 4 is ScaleRL's
    (arXiv:2510.13786).
    """
    return _truncated(now, batch, 1 + high)


def aipo(
    now: PolicyOutputs, batch: Batch, *, cap: Annotated[float, Field(gt=0)] = 5.0
) -> tuple[Array, dict[str, Array]]:
    """-sg(min(r, cap)) A logp, one-sided for both signs of A. LlamaRL (arXiv:2505.24034), cap 2 to 10.

    On policy its gradient is REINFORCE's, its value is not.
    """
    return _truncated(now, batch, cap)


def _truncated(now: PolicyOutputs, batch: Batch, cap: float) -> tuple[Array, dict[str, Array]]:
    r = jax.lax.stop_gradient(ratio(now.logp, batch.behavior_logp))
    return -jnp.minimum(r, cap) * batch.advantages * now.logp, {
        "ratio": r,
        "clip_share": (r > cap).astype(r.dtype),
    }


def dppo(
    now: PolicyOutputs,
    batch: Batch,
    *,
    delta: Annotated[float, Field(gt=0)] = 0.15,
    divergence: Literal["total_variation", "binary_kl"] = "total_variation",
) -> tuple[Array, dict[str, Array]]:
    """-r A, and 0 for tokens that moved away from the behaviour policy by more than `delta` already.

    Moved away: A > 0 and r > 1, or A < 0 and r < 1. How far: |e^logp - e^behaviour|, or the binary KL
    (behaviour | current), for which the authors take delta 0.05. Qi et al. (arXiv:2602.04879).
    """
    if divergence not in ("total_variation", "binary_kl"):
        raise ArealError(f"divergence={divergence!r} of dppo: use total_variation or binary_kl")
    r = ratio(now.logp, batch.behavior_logp)
    apart = total_variation if divergence == "total_variation" else binary_kl
    is_far = jax.lax.stop_gradient(apart(batch.behavior_logp, now.logp)) > delta
    is_cut = is_far & (batch.advantages * (now.logp - batch.behavior_logp) > 0)
    return -jnp.where(is_cut, 0.0, batch.advantages) * r, {
        "ratio": r,
        "clip_share": is_cut.astype(r.dtype),
    }
