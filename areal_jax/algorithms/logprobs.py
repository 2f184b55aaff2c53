"""The log-prob of a token: log softmax(logits / temperature) over the ids that sampling kept (the support).

The generator computes log-probs from the logits from which it samples, the trainer from the logits of packed
rows; generator and trainer use `token_stats`. Symbols: n tokens, V vocabulary, K ids of a support.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class TokenStats(NamedTuple):
    """Each token's log-prob and the entropy (nats) of the distribution that it was drawn from."""

    logp: Array
    entropy: Array
    outside: Array
    """Total probability, before renormalisation, of the ids outside the support; 0 without a support."""


def token_stats(
    logits: Float[Array, "n V"],
    tokens: Int[Array, " n"],
    temperature: Float[Array, " n"],
    support: Int[Array, "n K"] | None = None,
) -> TokenStats:
    """Returns the statistics of softmax(logits / temperature), renormalised over `support` if it is given.

    A row of `support` lists the ids that sampling kept for a token, padded with -1; a row of only -1 keeps
    all ids. At temperature 0 (greedy sampling) the statistics are computed as at temperature 1.
    """
    chex.assert_rank([logits, tokens, temperature], [2, 1, 1])
    chex.assert_equal_shape_prefix([logits, tokens, temperature, *([] if support is None else [support])], 1)
    chex.assert_type([logits, tokens, temperature], [float, int, float])
    z = logits.astype(_wide(logits)) / jnp.where(temperature > 0, temperature, 1.0)[:, None]
    chosen = jnp.take_along_axis(z, tokens[:, None], axis=-1)[:, 0]
    log_total = _log_sum_exp(z)
    entropy = _entropy(z, log_total)
    if support is None:
        return TokenStats(chosen - log_total, entropy, jnp.zeros_like(log_total))
    kept = jnp.where(support >= 0, jnp.take_along_axis(z, jnp.maximum(support, 0), axis=-1), -jnp.inf)
    has_support = (support >= 0).any(-1)
    # Rows without support would be -inf throughout, and their entropy and gradients NaN.
    safe = jnp.where(has_support[:, None], kept, 0.0)
    log_kept = jnp.where(has_support, jax.nn.logsumexp(safe, axis=-1), log_total)
    entropy = jnp.where(has_support, _entropy(safe, log_kept), entropy)
    return TokenStats(chosen - log_kept, entropy, 1.0 - jnp.exp(log_kept - log_total))


def _wide(x: Array) -> Any:
    """Returns the dtype of statistics of `x`, and of sums over it: float64 for float64, else float32."""
    return jnp.promote_types(x.dtype, jnp.float32)


def _log_sum_exp(z: Float[Array, "n V"]) -> Float[Array, " n"]:
    """Returns log(sum(exp(z))) over the vocabulary, -inf where all of z is.

    On GPUs and TPUs one pass over z finds the largest value and the sum together; a CPU is faster with a pass
    for each.
    """
    return jax.lax.platform_dependent(z, cpu=partial(jax.nn.logsumexp, axis=-1), default=_in_one_pass)


@jax.custom_jvp
def _in_one_pass(z: Float[Array, "n V"]) -> Float[Array, " n"]:
    """Returns `_log_sum_exp`: joins parts of z that are each described by their largest value, and by their
    sum relative to it (Milakov & Gimelshein, arXiv:1805.02867)."""

    def joined(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        largest = jnp.maximum(left[0], right[0])
        return largest, left[1] * jnp.exp(left[0] - largest) + right[1] * jnp.exp(right[0] - largest)

    # The least value is finite, since -inf - -inf is not a number.
    least, none = jnp.asarray(jnp.finfo(z.dtype).min, z.dtype), jnp.zeros((), z.dtype)
    largest, total = jax.lax.reduce((z, jnp.ones_like(z)), (least, none), joined, (1,))
    return largest + jnp.log(total)


@_in_one_pass.defjvp
def _(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    (z,), (slope,) = primals, tangents
    total = _in_one_pass(z)
    return total, (jnp.exp(z - total[:, None]) * slope).sum(-1)


def _entropy(z: Float[Array, "n V"], log_total: Float[Array, " n"]) -> Float[Array, " n"]:
    """Returns the entropy of softmax(z), with 0 log 0 = 0; `log_total` is logsumexp(z).

    The sum is over p log p, since log_total - sum p z would lose digits by cancellation.
    """
    logp = z - log_total[:, None]
    p = jnp.exp(logp)
    return -jnp.where(p > 0, p * jnp.where(p > 0, logp, 0.0), 0.0).sum(-1)


Head = Callable[[Array, Array], Array]
"""Called as `head(weight, hidden)`; returns the logits (n, V), at least float32, of `hidden` (n, D)."""

Values = Callable[[Array, Array, Array, Array, Array | None], TokenStats]
"""Called as `values(weight, hidden, tokens, temperature, support)`; returns the TokenStats of n tokens."""


class PackedTokens(NamedTuple):
    """Packed rows of tokens; `mask` selects the tokens for which statistics are computed."""

    tokens: Int[Array, "B T"]
    previous: Int[Array, "B T"]
    """Column, in the same row, of the preceding token of the sample; -1 for a first token."""
    mask: Bool[Array, "B T"]
    temperature: Float[Array, "B T"]
    support: Int[Array, "B T K"] | None = None


def packed_stats(
    head: Head,
    weight: Array,
    hidden: Float[Array, "B T D"],
    asked: PackedTokens,
    chunk: int,
    *,
    dtype: str | None = None,
    has_entropy_gradient: bool = False,
    values: Values | None = None,
) -> TokenStats:
    """Returns `token_stats` of packed rows, (B, T): entry t describes token t given the tokens before it.

    `head(weight, hidden)` returns logits; `asked` has the tokens, and the mask of the tokens to describe.
    Results off the mask are 0. A token's logits come from the hidden state of the sample's token before it,
    in column `asked.previous`. A first token (previous -1) counts as off the mask, so it never reads the
    state of another segment.

    The LM head runs over about `chunk` tokens at a time, so no (B, T, V) array exists, not even in the
    backward pass. Each row's tokens on the mask are moved to the row's front, and chunks without such a token
    are skipped, so prompts cost nothing. Gradients flow into `hidden` and `weight` through logp, and through
    entropy if `has_entropy_gradient`. `dtype`: in which the head reads `weight`, so that it is cast once and
    not for each chunk; the gradient keeps the weight's own dtype. `values`, if given, computes the results in
    place of `head` and `token_stats`, from which the gradients are still computed.
    """
    chex.assert_rank([hidden, asked.tokens], [3, 2])
    chex.assert_equal_shape([asked.tokens, asked.previous, asked.mask, asked.temperature])
    chex.assert_equal_shape_prefix([hidden, asked.tokens], 2)
    chex.assert_type([hidden, asked.tokens, asked.previous, asked.mask], [float, int, int, bool])
    mask = asked.mask & (asked.previous >= 0)
    rows, length = mask.shape
    width = min(length, max(1, chunk // rows))
    parts = -(-length // width)
    # Masked tokens first, in their order.
    order = jnp.argsort(~mask, axis=1, stable=True)

    def chunked(x: Array, at: Array = order) -> Array:  # (parts, B * width, ...)
        moved = jnp.take_along_axis(x, at.reshape(*at.shape, *(1,) * (x.ndim - 2)), axis=1)
        moved = jnp.pad(moved, ((0, 0), (0, parts * width - length), *((0, 0),) * (x.ndim - 2)))
        moved = jnp.moveaxis(moved.reshape(rows, parts, width, *x.shape[2:]), 1, 0)
        return moved.reshape(parts, rows * width, *x.shape[2:])

    before = jnp.take_along_axis(jnp.maximum(asked.previous, 0), order, axis=1)
    about = jax.tree.map(chunked, (asked.tokens, asked.temperature, asked.support))
    count = -(-mask.sum(1).max() // width)
    used = jnp.where(chunked(mask)[..., None], chunked(hidden, before), 0.0)
    values = values or partial(_values_of, head)
    cast = weight.astype(dtype or weight.dtype)
    stats: Any = _head_stats(head, values, has_entropy_gradient, used, (weight, cast), (about, count))
    back = jnp.argsort(order, axis=1)

    def restored(x: Array) -> Array:
        flat = jnp.moveaxis(x.reshape(parts, rows, width), 0, 1).reshape(rows, -1)
        return jnp.where(mask, jnp.take_along_axis(flat, back, axis=1), 0.0)

    return TokenStats(*map(restored, stats))


Chunks = Any
"""((tokens (c, n), temperature (c, n), support (c, n, K) or None), count): c chunks of n tokens.

Only the first `count` chunks contain tokens on the mask; the statistics of the other chunks are 0.
"""


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _head_stats(
    head: Head,
    values: Values,
    has_entropy_gradient: bool,
    hidden: Float[Array, "c n D"],
    weights: tuple[Array, Array],
    chunks: Chunks,
) -> TokenStats:
    """Returns the statistics, (c, n). `weights`: the weight, and as products read it, without a gradient."""
    return _head_forward(head, values, has_entropy_gradient, hidden, weights, chunks)[0]


def _values_of(
    head: Head, weight: Array, hidden: Array, tokens: Array, temperature: Array, support: Array | None
) -> TokenStats:
    return token_stats(head(weight, hidden), tokens, temperature, support)


def _head_forward(
    head: Head,
    values: Values,
    has_entropy_gradient: bool,
    hidden: Array,
    weights: tuple[Array, Array],
    chunks: Chunks,
) -> tuple[TokenStats, tuple]:
    (about, count), (weight, cast) = chunks, weights
    like = jnp.empty(0, weight.dtype)

    def one_chunk(i: Array, stats: TokenStats) -> TokenStats:
        here = values(cast.astype(like.dtype), hidden[i], *jax.tree.map(lambda x: x[i], about))
        return TokenStats(*(x.at[i].set(now) for x, now in zip(stats, here, strict=True)))

    zeros = jnp.zeros(hidden.shape[:2], _wide(hidden))
    with jax.named_scope("head_chunks"):
        stats = jax.lax.fori_loop(0, count, one_chunk, TokenStats(zeros, zeros, zeros))
    return stats, (hidden, like, cast, chunks, stats.logp)


def _head_backward(
    head: Head, values: Values, has_entropy_gradient: bool, kept: tuple, slopes: TokenStats
) -> tuple[Array, tuple[Array, None], None]:
    """Returns the gradients with respect to `hidden` and the weight; recomputes the logits of each chunk.

    `kept` are the results that the forward pass stored, `slopes` the gradients with respect to the
    statistics.
    """
    hidden, like, cast, (about, count), logp = kept

    def one_chunk(i: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        of_hidden, of_weight = sums
        # XLA drops a cast to more bits and back, so the products read `cast` itself.
        logits, pull = jax.vjp(head, cast.astype(like.dtype), hidden[i])
        tokens, temperature, support = jax.tree.map(lambda x: x[i], about)
        if support is None and not has_entropy_gradient:
            of_logits = _slope_of_logits(logits, tokens, temperature, logp[i], slopes.logp[i])
        else:
            entropy = slopes.entropy[i] if has_entropy_gradient else jnp.zeros_like(slopes.entropy[i])
            _, back = jax.vjp(lambda z: token_stats(z, tokens, temperature, support), logits)
            (of_logits,) = back(TokenStats(slopes.logp[i], entropy, jnp.zeros_like(entropy)))
        more_weight, here = pull(of_logits)
        return of_hidden.at[i].set(here), of_weight + more_weight.astype(of_weight.dtype)

    # The weight's gradient is summed over chunks in float32, also for bfloat16 weights.
    start = (jnp.zeros_like(hidden), jnp.zeros(cast.shape, _wide(like)))
    with jax.named_scope("head_chunks"):
        of_hidden, of_weight = jax.lax.fori_loop(0, count, one_chunk, start)
    return of_hidden, (of_weight.astype(like.dtype), None), None


_head_stats.defvjp(_head_forward, _head_backward)


def _slope_of_logits(logits: Array, tokens: Array, temperature: Array, logp: Array, slope: Array) -> Array:
    """Returns the gradient with respect to the logits: slope / temperature * (onehot(token) - p).

    `slope` is the gradient with respect to `logp`, the tokens' log-probs. p = softmax(logits / temperature)
    is computed from `logp` in one pass over the logits, without another sum over the vocabulary.
    """
    scale = jnp.where(temperature > 0, temperature, 1.0)[:, None]
    z = logits / scale
    log_total = jnp.take_along_axis(z, tokens[:, None], axis=-1) - logp[:, None]
    is_token = jnp.arange(logits.shape[-1]) == tokens[:, None]
    return slope[:, None] / scale * (is_token - jnp.exp(z - log_total))
