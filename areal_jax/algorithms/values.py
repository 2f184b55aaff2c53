"""What a critic minimises, and what it is judged by."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def value_loss(
    value: Float[Array, "B T"],
    arrived: Float[Array, "B T"],
    returns: Float[Array, "B T"],
    clip: float | None,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """max((V - R)^2, (V_a + clamp(V - V_a, +-clip) - R)^2) / 2, and where the second is the larger.

    V_a (`arrived`) is the value when the batch arrived: moving further than `clip` from it lowers the loss no
    more. Without `clip` (V - R)^2 / 2. PPO's clipped value loss (Schulman et al., arXiv:1707.06347; openai/
    baselines).
    """
    plain = 0.5 * (value - returns) ** 2
    if clip is None:
        return plain, jnp.zeros_like(plain, bool)
    clipped = 0.5 * (arrived + jnp.clip(value - arrived, -clip, clip) - returns) ** 2
    return jnp.maximum(plain, clipped), clipped > plain
