"""The canary: log-probs of a fixed token sequence, which show whether a host got the trainer's weights.

The process that publishes a weights version and each process that reads the version compute the canary; the
results must agree up to rounding, which depends on the dtype of the model's matrix products.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from areal_jax.algorithms.logprobs import token_stats
from areal_jax.models.attention import PackedAttention
from areal_jax.models.model import Model, Params
from areal_jax.weights.store import Probe

TOKENS = 16

ACCEPTED: dict[str, tuple[float, float]] = {"float32": (1e-3, 1e-3), "bfloat16": (0.2, 0.05)}
"""model.dtype -> the largest and the mean difference between publisher and reader that count as rounding, in
nats.

In bfloat16 a mesh that splits products rounds other partial sums: 0.016 and 0.006 were measured. Two heads
exchanged in every layer change the log-probs by 0.7 and 0.3 at least (docs/decisions.md).
"""


def canary(model: Model) -> Probe:
    """Returns the model's canary: parameters -> float32 log-probs of a fixed sequence, (TOKENS - 1,)."""

    def log_probs(params: Params) -> Float[Array, " n"]:
        tokens = (jnp.arange(TOKENS) * 7 % model.tokenizer.vocab_size)[None]
        positions = jnp.arange(TOKENS)[None]
        hidden, _ = model.hidden(params, tokens, positions, PackedAttention(jnp.ones_like(tokens)))
        logits = model.logits(params, hidden[0, :-1])
        return token_stats(logits, tokens[0, 1:], jnp.ones(TOKENS - 1)).logp

    return Probe(jax.jit(log_probs), *ACCEPTED[model.config.dtype])
