"""The one log-prob function: log softmax(z / temperature) over the ids that sampling kept.

The generator calls it on the logits it samples from, the trainer on the logits of a packed row, so that the
recorded and the recomputed log-prob are the same expression. Symbols: n tokens, V vocabulary, K ids of a
support.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class TokenStats(NamedTuple):
    """What a distribution says of one token; all float32."""

    logp: Array
    entropy: Array
    outside: Array
    """Probability mass outside the sampler's support, at its temperature."""


def token_stats(
    logits: Float[Array, "n V"],
    tokens: Int[Array, " n"],
    temperature: Float[Array, " n"],
    support: Int[Array, "n K"] | None = None,
) -> TokenStats:
    """Log-prob and entropy of softmax(logits / temperature), renormalised over `support` where one is given.

    `support` rows hold the kept ids, -1 beyond them; a row that keeps nothing (-1 throughout) keeps
    everything. Temperature 0 is the greedy limit, whose log-prob is reported at temperature 1.
    """
    z = logits.astype(jnp.float32) / jnp.where(temperature > 0, temperature, 1.0)[:, None]
    chosen = jnp.take_along_axis(z, tokens[:, None], axis=-1)[:, 0]
    log_total = jax.nn.logsumexp(z, axis=-1)
    entropy = _entropy(z, log_total)
    if support is None:
        return TokenStats(chosen - log_total, entropy, jnp.zeros_like(log_total))
    kept = jnp.where(support >= 0, jnp.take_along_axis(z, jnp.maximum(support, 0), axis=-1), -jnp.inf)
    has_support = (support >= 0).any(-1)
    safe = jnp.where(has_support[:, None], kept, 0.0)
    log_kept = jnp.where(has_support, jax.nn.logsumexp(safe, axis=-1), log_total)
    entropy = jnp.where(has_support, _entropy(safe, log_kept), entropy)
    return TokenStats(chosen - log_kept, entropy, 1.0 - jnp.exp(log_kept - log_total))


def _entropy(z: Float[Array, "n V"], log_total: Float[Array, " n"]) -> Float[Array, " n"]:
    """-sum_v p_v log p_v, with 0 log 0 = 0; free of the cancellation in log_total - sum_v p_v z_v."""
    logp = z - log_total[:, None]
    p = jnp.exp(logp)
    return -jnp.where(p > 0, p * jnp.where(p > 0, logp, 0.0), 0.0).sum(-1)


def packed_stats(
    hidden: Float[Array, "B T D"],
    tokens: Int[Array, "B T"],
    previous: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    temperature: Float[Array, "B T"],
    logits: Callable[[Float[Array, "n D"]], Float[Array, "n V"]],
    support: Int[Array, "B T K"] | None,
    chunk: int,
) -> TokenStats:
    """`token_stats` of a packed row, (B, T) each: index t describes token t given the tokens before it.

    This is the one place where hidden states shift by a token: token t reads the hidden state at column
    `previous` of its row. Off the mask everything is 0, and a token without predecessor (-1) is off it, so
    that no segment's first token reads its neighbour's state. The LM head runs over `chunk` tokens at a
    time, or a column of the rows if that is more, so no (B, T, V) array exists, in the backward pass neither;
    each chunk has its share of every row, so that devices which hold different rows all have work.
    """
    mask = mask & (previous >= 0)
    before = jnp.take_along_axis(hidden, jnp.maximum(previous, 0)[..., None], axis=1)
    before = jnp.where(mask[..., None], before, 0.0)
    rows, length = tokens.shape
    columns = min(max(chunk // rows, 1), length)
    chunks = -(-length // columns)

    def chunked(x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, chunks * columns - length), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(padded.reshape(rows, chunks, columns, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def one_chunk(args: tuple[Array, ...]) -> TokenStats:
        h, ids, temperatures, *kept = (x.reshape(rows * columns, *x.shape[2:]) for x in args)
        stats = token_stats(logits(h), ids, temperatures, *kept)
        return TokenStats(*(x.reshape(rows, columns) for x in stats))

    args = (before, tokens, temperature) if support is None else (before, tokens, temperature, support)
    stats = jax.lax.map(one_chunk, tuple(chunked(x) for x in args))
    each = (jnp.moveaxis(x, 0, 1).reshape(rows, -1)[:, :length] for x in stats)
    return TokenStats(*(jnp.where(mask, x, 0.0) for x in each))
