"""The proximal policy without recomputation: interpolated between behaviour and current policy by token age.

proximal = sg(behaviour + mix (current - behaviour)) in log-probs; sg stops gradients, age is in versions.
With mix 1 the result is the current policy. This is exact if the batch is one minibatch, because proximal and
current policy are equal before the batch's only update.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def proximal_mix(ages: Int[Array, "B T"], minibatches: int, form: str) -> Float[Array, "B T"]:
    """Returns each token's `mix`: where the proximal policy lies from behaviour (0) to current policy (1).

    `ages` is the trainer's version s minus the version that sampled the token. `form` is
    `algorithm.proximal`. The n = `minibatches` minibatches k = 0, 1, ... are equal, consecutive parts of the
    rows.

    reuse: mix is 1. loglinear: mix is age / (age + k / n), and 1 for k = 0; in version numbers this is where
    the proximal policy (s) lies between the behaviour policy (s - age) and the current policy (s + k / n).
    loglinear_published: mix is 1 - 1 / age, and 0 for age 0, as published (A-3PO, arXiv:2512.06547); the
    proximal policy is then one version before the current policy.
    """
    chex.assert_rank(ages, 2)
    chex.assert_type(ages, int)
    chex.assert_is_divisible(ages.shape[0], minibatches)
    age = ages.astype(float)  # float32, or float64 if jax enables it
    if form == "reuse":
        return jnp.ones_like(age)
    if form == "loglinear_published":
        return jnp.where(age > 0, 1 - 1 / jnp.maximum(age, 1), 0.0)
    if form == "loglinear":
        minibatch = jnp.repeat(jnp.arange(minibatches), ages.shape[0] // minibatches)[:, None]  # (B, 1)
        return jnp.where(minibatch == 0, 1.0, age / (age + jnp.maximum(minibatch, 1) / minibatches))
    raise ValueError(
        f"algorithm.proximal={form!r} has no mixing weights; use reuse, loglinear or loglinear_published"
    )


def mixed_logp(
    behavior: Float[Array, "B T"], current: Float[Array, "B T"], mix: Float[Array, "B T"]
) -> Float[Array, "B T"]:
    """Returns the proximal log-probs behavior + mix (current - behavior), without a gradient."""
    chex.assert_equal_shape([behavior, current, mix])
    current = jax.lax.stop_gradient(current)
    return jnp.where(mix == 1, current, behavior + mix * (current - behavior))  # no rounding at mix 1
