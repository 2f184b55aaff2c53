"""The canary: log-probs of a fixed token sequence, which show whether a host got the trainer's weights.

The process that publishes a weights version and each process that reads the version compute the canary; the
results must agree up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from areal_jax.algorithms.logprobs import token_stats
from areal_jax.models.attention import PackedAttention
from areal_jax.models.model import Model, Params

TOKENS = 16


def canary(model: Model) -> Callable[[Any], jax.Array]:
    """Returns a jitted function: parameters -> float32 log-probs of a fixed token sequence, (TOKENS - 1,)."""

    def log_probs(params: Params) -> Float[Array, " n"]:
        tokens = (jnp.arange(TOKENS) * 7 % model.tokenizer.vocab_size)[None]
        positions = jnp.arange(TOKENS)[None]
        hidden, _ = model.hidden(params, tokens, positions, PackedAttention(jnp.ones_like(tokens)))
        logits = model.logits(params, hidden[0, :-1])
        return token_stats(logits, tokens[0, 1:], jnp.ones(TOKENS - 1)).logp

    return jax.jit(log_probs)
