"""The one log-prob function: log softmax(z / temperature) over the ids that sampling kept.

The generator calls it on the logits it samples from, the trainer on the logits of a packed row, so that the
recorded and the recomputed log-prob are the same expression. Symbols: n tokens, V vocabulary, K ids of a
support.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

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


Head = Callable[[Array, Array], Array]
"""`head(weight, hidden)`: the logits (n, V) of hidden states (n, D), float32."""

Values = Callable[[Array, Array, Array, Array, Array | None], TokenStats]
"""`values(weight, hidden, tokens, temperature, support)`: the same as token_stats of the head's logits."""


def packed_stats(
    hidden: Float[Array, "B T D"],
    tokens: Int[Array, "B T"],
    previous: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    temperature: Float[Array, "B T"],
    head: Head,
    weight: Array,
    support: Int[Array, "B T K"] | None,
    chunk: int,
    *,
    has_entropy_gradient: bool = False,
    values: Values | None = None,
) -> TokenStats:
    """`token_stats` of a packed row, (B, T) each: index t describes token t given the tokens before it.

    This is the one place where hidden states shift by a token: token t reads the hidden state at column
    `previous` of its row. Off the mask everything is 0, and a token without predecessor (-1) is off it, so
    that no segment's first token reads its neighbour's state.

    The LM head runs over about `chunk` tokens at a time, a run of columns of every row, so no (B, T, V) array
    exists, in the backward pass neither. Each row's masked tokens are moved to its front and only as many
    chunks are computed as they fill: a prompt costs nothing. Gradients flow through logp, and through entropy
    where `has_entropy_gradient`, into `hidden` and `weight`. `values`, where given, computes a chunk in the
    forward pass; gradients are those of `head` all the same.
    """
    mask = mask & (previous >= 0)
    rows, length = tokens.shape
    width = min(length, max(1, chunk // rows))
    parts = -(-length // width)
    order = jnp.argsort(~mask, axis=1, stable=True)

    def chunked(x: Array, at: Array) -> Array:  # (parts, B * width, ...)
        moved = jnp.take_along_axis(x, at.reshape(*at.shape, *(1,) * (x.ndim - 2)), axis=1)
        moved = jnp.pad(moved, ((0, 0), (0, parts * width - length), *((0, 0),) * (x.ndim - 2)))
        moved = jnp.moveaxis(moved.reshape(rows, parts, width, *x.shape[2:]), 1, 0)
        return moved.reshape(parts, rows * width, *x.shape[2:])

    before = jnp.take_along_axis(jnp.maximum(previous, 0), order, axis=1)
    inputs = HeadInputs(
        chunked(tokens, order),
        chunked(temperature, order),
        None if support is None else chunked(support, order),
        -(-mask.sum(1).max() // width),
    )
    counts = chunked(mask, order)[..., None]
    used = jnp.where(counts, chunked(hidden, before), 0.0)
    values = values or partial(_values_of, head)
    stats: Any = _head_stats(head, values, has_entropy_gradient, used, weight, inputs)
    back = jnp.argsort(order, axis=1)

    def restored(x: Array) -> Array:
        flat = jnp.moveaxis(x.reshape(parts, rows, width), 0, 1).reshape(rows, -1)
        return jnp.where(mask, jnp.take_along_axis(flat, back, axis=1), 0.0)

    return TokenStats(*map(restored, stats))


class HeadInputs(NamedTuple):
    """What the LM head needs beside hidden states and its weight; c chunks of n tokens."""

    tokens: Int[Array, "c n"]
    temperature: Float[Array, "c n"]
    support: Int[Array, "c n K"] | None
    count: Int[Array, ""]
    """Chunks that hold a token of the mask; the others' statistics are 0."""

    def of(self, i: Array) -> tuple[Array, Array, Array | None]:
        return self.tokens[i], self.temperature[i], None if self.support is None else self.support[i]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _head_stats(
    head: Head,
    values: Values,
    has_entropy_gradient: bool,
    hidden: Float[Array, "c n D"],
    weight: Array,
    inputs: HeadInputs,
) -> TokenStats:
    return _head_forward(head, values, has_entropy_gradient, hidden, weight, inputs)[0]


def _values_of(
    head: Head, weight: Array, hidden: Array, tokens: Array, temperature: Array, support: Array | None
) -> TokenStats:
    return token_stats(head(weight, hidden), tokens, temperature, support)


def _head_forward(
    head: Head, values: Values, has_entropy_gradient: bool, hidden: Array, weight: Array, inputs: HeadInputs
) -> tuple[TokenStats, tuple]:
    def one_chunk(i: Array, stats: TokenStats) -> TokenStats:
        here = values(weight, hidden[i], *inputs.of(i))
        return TokenStats(*(x.at[i].set(now) for x, now in zip(stats, here, strict=True)))

    zeros = jnp.zeros(inputs.tokens.shape, jnp.float32)
    stats = jax.lax.fori_loop(0, inputs.count, one_chunk, TokenStats(zeros, zeros, zeros))
    return stats, (hidden, weight, inputs, stats.logp)


def _head_backward(
    head: Head, values: Values, has_entropy_gradient: bool, kept: tuple, slopes: TokenStats
) -> tuple[Array, Array, None]:
    hidden, weight, inputs, logp = kept

    def one_chunk(i: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        of_hidden, of_weight = sums
        logits, pull = jax.vjp(head, weight, hidden[i])
        tokens, temperature, support = inputs.of(i)
        if support is None and not has_entropy_gradient:
            of_logits = _slope_of_logits(logits, tokens, temperature, logp[i], slopes.logp[i])
        else:
            entropy = slopes.entropy[i] if has_entropy_gradient else jnp.zeros_like(slopes.entropy[i])
            _, back = jax.vjp(lambda z: token_stats(z, tokens, temperature, support), logits)
            (of_logits,) = back(TokenStats(slopes.logp[i], entropy, jnp.zeros_like(entropy)))
        more_weight, here = pull(of_logits)
        return of_hidden.at[i].set(here), of_weight + more_weight.astype(jnp.float32)

    start = (jnp.zeros_like(hidden), jnp.zeros(weight.shape, jnp.float32))
    of_hidden, of_weight = jax.lax.fori_loop(0, inputs.count, one_chunk, start)
    return of_hidden, of_weight.astype(weight.dtype), None


_head_stats.defvjp(_head_forward, _head_backward)


def _slope_of_logits(logits: Array, tokens: Array, temperature: Array, logp: Array, slope: Array) -> Array:
    """slope * d logp / d logits = slope / temperature * (onehot - p); p from logp in a single pass."""
    scale = jnp.where(temperature > 0, temperature, 1.0)[:, None]
    z = logits / scale
    log_total = jnp.take_along_axis(z, tokens[:, None], axis=-1) - logp[:, None]
    is_token = jnp.arange(logits.shape[-1]) == tokens[:, None]
    return slope[:, None] / scale * (is_token - jnp.exp(z - log_total))
