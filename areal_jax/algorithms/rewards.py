"""What is added to a sequence's reward before an estimator sees it."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def overlong_penalty(lengths: Float[Array, " S"], max_tokens: float, margin: float) -> Float[Array, " S"]:
    """0 up to `max_tokens - margin` loss tokens, then falling to -1 at `max_tokens`, and -1 beyond.

    ((Lm - Lc) - L) / Lc between the two: DAPO, Yu et al. (arXiv:2503.14476), Eq. 13.
    """
    return jnp.clip((max_tokens - margin - lengths) / margin, -1.0, 0.0)
