"""The adaptive coefficient of the KL to the reference policy."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

LARGEST_ERROR = 0.2


class KLControl(struct.PyTreeNode):
    """The coefficient, and the KL and loss tokens of the version's minibatches so far."""

    coef: Float[Array, ""]
    kl: Float[Array, ""]
    tokens: Float[Array, ""]

    @classmethod
    def first(cls, coef: float) -> KLControl:
        return cls(jnp.float32(coef), jnp.float32(0), jnp.float32(0))

    def after(
        self,
        kl: Float[Array, ""],
        tokens: Float[Array, ""],
        is_last: Bool[Array, ""],
        target: float,
        horizon: float,
    ) -> KLControl:
        """With a minibatch's sums; at the version's last the coefficient moves and counting starts anew.

        coef *= 1 + clip(KL / target - 1, +-0.2) min(tokens / horizon, 1), KL a token's mean over the version.
        Ziegler et al. (arXiv:1909.08593), Eq. 4 and 5; that a batch counts as a horizon at most keeps the
        coefficient above 0 however long the batch.
        """
        kl, tokens = self.kl + kl, self.tokens + tokens
        error = kl / jnp.maximum(tokens, 1) / target - 1
        error = jnp.clip(error, -LARGEST_ERROR, LARGEST_ERROR)
        moved = self.coef * (1 + error * jnp.minimum(tokens / horizon, 1.0))
        zero = jnp.zeros_like(kl)
        return KLControl(
            jnp.where(is_last, moved, self.coef),
            jnp.where(is_last, zero, kl),
            jnp.where(is_last, zero, tokens),
        )
