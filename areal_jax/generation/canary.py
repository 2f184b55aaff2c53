"""Log-probs of a fixed sequence: what publisher and readers of weights compare at each adoption."""

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
    """`canary(params) -> (TOKENS - 1,)` float32, compiled at its first use."""

    def log_probs(params: Params) -> Float[Array, " n"]:
        tokens = (jnp.arange(TOKENS) * 7 % model.tokenizer.vocab_size)[None]
        positions = jnp.arange(TOKENS)[None]
        hidden, _ = model.hidden(params, tokens, positions, PackedAttention(jnp.ones_like(tokens)))
        logits = model.logits(params, hidden[0, :-1])
        return token_stats(logits, tokens[0, 1:], jnp.ones(TOKENS - 1)).logp

    return jax.jit(log_probs)
