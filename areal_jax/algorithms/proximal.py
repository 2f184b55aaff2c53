"""The proximal policy where nothing is recomputed: between behaviour and current policy, by a token's age.

proximal = sg(behaviour + mix (current - behaviour)) in log-probs. mix 1 is the current policy itself: exact
with one minibatch, whose update begins where the proximal policy stands.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def proximal_mix(ages: Int[Array, "B T"], minibatches: int, form: str) -> Float[Array, "B T"]:
    """The mix of every token; minibatch k owns the k-th of `minibatches` equal runs of rows.

    reuse: 1. loglinear: the parameters moved from version s - age to s + k / n, n minibatches, so s lies at
    age / (age + k / n); 1 at k = 0, and 0 for age 0 after it. loglinear_published: 1 - 1 / age, 0 for age 0
    (A-3PO, arXiv:2512.06547), which takes the step's first minibatch to be a version further than it is.
    """
    age = ages.astype(jnp.float32)
    if form == "reuse":
        return jnp.ones_like(age)
    if form == "loglinear_published":
        return jnp.where(age > 0, 1 - 1 / jnp.maximum(age, 1), 0.0)
    if form == "loglinear":
        minibatch = jnp.repeat(jnp.arange(minibatches), ages.shape[0] // minibatches)[:, None]  # (B, 1)
        return jnp.where(minibatch == 0, 1.0, age / (age + jnp.maximum(minibatch, 1) / minibatches))
    raise ValueError(f"no proximal form {form!r} is a mix")
