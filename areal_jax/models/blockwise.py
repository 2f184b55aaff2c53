"""Attention over packed rows by pairs of blocks: an online softmax, forward and backward.

Scores exist for one block of queries against one block of keys. Pairs of blocks in which no query sees a key
are not visited, so work grows with the segments' lengths and not with the row's. For the backward pass the
forward pass stores one number per query, the log of the softmax's denominator, instead of the weights (Dao et
al., arXiv:2205.14135; Milakov & Gimelshein, arXiv:1805.02867). Shapes: B rows, T tokens, H query heads, K kv
heads, R query heads per kv head, h head dimension, n blocks of Q tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from areal_jax.models.products import sum_dtype

NEGATIVE = -1e30
"""The score of a key that a query does not see. It is finite: the difference of two of them is 0, not NaN."""
LOWEST = -1e20
"""A query's largest score before it has seen a key: exp(NEGATIVE - LOWEST) is 0."""
KEPT = "attention"
"""Checkpoint name of the stored output and denominators: a rematerialisation policy that saves this name
spares the backward pass a second forward pass.
"""


class Sight(NamedTuple):
    """Which keys a query sees: those up to its own column that end behind it."""

    ends: Int[Array, "n B Q"]
    """For each key, the column after the last query that may see it."""
    counts: Int[Array, " n"]
    """For each block of queries the number of key blocks with keys that it sees in any row."""
    seen: Int[Array, "n n"]
    """For each block of queries these key blocks, ascending; what follows them is not read."""

    @classmethod
    def of(cls, ends: Int[Array, "B T"], size: int) -> Sight:
        """Returns what blocks of `size` queries see; `ends`: for each key, 0 for padding."""
        # A query without keys would have the output NaN: also padding sees itself, but nothing else.
        ends = _split(jnp.maximum(ends, jnp.arange(ends.shape[1]) + 1), size, jnp.iinfo(ends.dtype).max)
        blocks = jnp.arange(len(ends))
        is_seen = (ends.max((1, 2)) > blocks[:, None] * size) & (blocks <= blocks[:, None])
        return cls(ends, is_seen.sum(1), jnp.argsort(~is_seen, axis=1, stable=True))

    def visible(self, i: Array, j: Array) -> Bool[Array, "B Q Q"]:
        """Returns whether each query (axis 1) of block i sees each key (axis 2) of block j."""
        size = self.ends.shape[-1]
        queries = (i * size + jnp.arange(size))[:, None]
        return (queries < self.ends[j][:, None, :]) & (queries >= j * size + jnp.arange(size))

    def key_blocks(self, i: Array) -> tuple[Array, Callable[[Array], Array]]:
        """Returns the number of key blocks that block i sees, and a function from 0, 1, ... to them."""
        return self.counts[i], lambda number: self.seen[i, number]


class PrefixSight(struct.PyTreeNode):
    """Which keys a query behind a path sees: those of the path, and of the columns beside its own.

    The keys are `path_blocks` blocks of the path, then a block for each block of queries.
    """

    path_tokens: Int[Array, " B"]
    """Number of tokens of each row's path; later keys of the path's blocks are not seen."""
    own: Sight
    path_blocks: int = struct.field(pytree_node=False)

    def visible(self, i: Array, j: Array) -> Bool[Array, "B Q Q"]:
        """Returns whether each query (axis 1) of block i sees each key (axis 2) of block j."""
        size = self.own.ends.shape[-1]
        in_path = (j * size + jnp.arange(size) < self.path_tokens[:, None])[:, None, :]
        own = self.own.visible(i, jnp.maximum(j - self.path_blocks, 0))
        return jnp.where(j < self.path_blocks, in_path, own)

    def key_blocks(self, i: Array) -> tuple[Array, Callable[[Array], Array]]:
        """Returns the number of key blocks that block i sees, and a function from 0, 1, ... to them."""
        of_path = -(-self.path_tokens.max() // self.own.ends.shape[-1])
        count, block = self.own.key_blocks(i)

        def numbered(number: Array) -> Array:
            own = block(jnp.maximum(number - of_path, 0)) + self.path_blocks
            return jnp.where(number < of_path, number, own)

        return of_path + count, numbered


def blockwise_attention(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    ends: Int[Array, "B T"],
    *,
    block: int,
) -> Float[Array, "B T H h"]:
    """Returns softmax(q k / sqrt(h)) v over the keys that each token sees, in k's `sum_dtype`.

    The token of column i sees the keys of the columns j <= i with i < `ends[j]`, and always its own. Scores
    are computed in blocks of `block` tokens; matrix products cast their operands to k's dtype.
    """
    length = q.shape[1]
    chex.assert_equal_shape([k, v])
    chex.assert_shape(ends, q.shape[:2])
    size = min(block, length)
    return _in_blocks(q, k, v, Sight.of(ends, size), size)


def segment_ends(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Returns for each token the column after the last one of its segment; 0 for padding (segment 0)."""
    length = segment_ids.shape[1]
    after = jnp.pad(segment_ids[:, 1:], ((0, 0), (0, 1)))
    ends = jnp.where(segment_ids != after, jnp.arange(length) + 1, length)
    return jnp.where(segment_ids > 0, jax.lax.cummin(ends, axis=1, reverse=True), 0)


def path_attention(
    q: Float[Array, "B n H h"],
    k: Float[Array, "B P+n K h"],
    v: Float[Array, "B P+n K h"],
    path_tokens: Int[Array, " B"],
    ends: Int[Array, "B n"],
    *,
    block: int,
) -> Float[Array, "B n H h"]:
    """Returns softmax(q k / sqrt(h)) v for n tokens that continue each row's path, in k's `sum_dtype`.

    The first P keys and values are those of the path, of which row b has `path_tokens[b]` tokens; the others
    are those of the n tokens, of which each sees those that `blockwise_attention` lets it see by `ends`. P
    must be a multiple of the block, which has min(`block`, n) tokens.
    """
    length = q.shape[1]
    size = min(block, length)
    chex.assert_equal_shape([k, v])
    chex.assert_is_divisible(k.shape[1] - length, size)
    sight = PrefixSight(path_tokens, Sight.of(ends, size), (k.shape[1] - length) // size)
    return _in_blocks(q, k, v, sight, size)


def _split(x: Array, size: int, empty: int = 0) -> Array:
    """Returns (B, T, ...) as blocks (n, B, Q, ...) of `size` tokens, the last one padded with `empty`."""
    rows, length = x.shape[:2]
    blocks = -(-length // size)
    widths = ((0, 0), (0, blocks * size - length), *((0, 0),) * (x.ndim - 2))
    padded = jnp.pad(x, widths, constant_values=empty)
    return jnp.moveaxis(padded.reshape(rows, blocks, size, *x.shape[2:]), 1, 0)


def _in_blocks(q: Array, k: Array, v: Array, sight: Any, size: int) -> Float[Array, "B T H h"]:
    """Returns attention by pairs of blocks of `size` tokens, of which `sight` says what is visible."""
    (rows, length, heads, head_dim), kv_heads = q.shape, k.shape[2]
    chex.assert_shape([k, v], (rows, None, kv_heads, head_dim))
    repeats = heads // kv_heads  # query heads per kv head
    grouped = q.reshape(rows, length, kv_heads, repeats, head_dim)
    queries = jnp.moveaxis(_split(grouped.astype(k.dtype), size), 2, 4)
    queries = queries.reshape(-1, rows, kv_heads, repeats * size, head_dim)
    out = _attend(queries, *(jnp.moveaxis(_split(x, size), 2, 3) for x in (k, v)), sight)
    out = jnp.moveaxis(out.reshape(-1, rows, kv_heads, repeats, size, head_dim), (1, 4), (0, 2))
    return out.reshape(rows, -1, heads, head_dim)[:, :length]


@jax.custom_vjp
def _attend(
    q: Float[Array, "n B K RQ h"], k: Float[Array, "m B K Q h"], v: Float[Array, "m B K Q h"], sight: Any
) -> Float[Array, "n B K RQ h"]:
    return _forward(q, k, v, sight)[0]


def _forward(q: Array, k: Array, v: Array, sight: Any) -> tuple[Array, tuple]:
    """Returns the output, and for `_backward` the arguments, the output and logs of softmax denominators."""

    def one_block(i: Array) -> tuple[Array, Array]:
        def visit(j: Array, mask: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            largest, total, out = carry
            scores = jnp.where(mask, _scores(q[i], k[j]), NEGATIVE)
            now = jnp.maximum(largest, scores.max(-1))
            shrink = jnp.exp(largest - now)
            weights = jnp.exp(scores - now[..., None])
            mixed = _product(weights.astype(v.dtype), v[j], 3, 2)
            return now, total * shrink + weights.sum(-1), out * shrink[..., None] + mixed

        shape, dtype = q.shape[1:-1], sum_dtype(q)
        start = (jnp.full(shape, LOWEST, dtype), jnp.zeros(shape, dtype), jnp.zeros(q.shape[1:], dtype))
        largest, total, out = _over_seen(i, sight, visit, start)
        return out / total[..., None], largest + jnp.log(total)

    out, log_total = jax.lax.map(one_block, jnp.arange(len(q)))
    out, log_total = checkpoint_name(out, KEPT), checkpoint_name(log_total, KEPT)
    return out, (q, k, v, sight, out, log_total)


def _backward(kept: tuple, slope: Array) -> tuple[Array, Array, Array, None]:
    """Returns the gradients with respect to q, k and v; recomputes the weights of each pair of blocks.

    `kept` are the arrays that `_forward` stored, `slope` is the gradient with respect to the output.
    """
    q, k, v, sight, out, log_total = kept
    along = (slope * out).sum(-1)  # sum of weights x their gradients: softmax's gradient subtracts it
    slope = slope.astype(v.dtype)

    def one_block(slopes: tuple[Array, Array], i: Array) -> tuple[tuple[Array, Array], Array]:
        def visit(j: Array, mask: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            of_q, of_k, of_v = carry
            weights = jnp.where(mask, jnp.exp(_scores(q[i], k[j]) - log_total[i][..., None]), 0.0)
            of_weights = _product(slope[i], v[j], 3, 3)
            of_scores = weights * (of_weights - along[i][..., None])
            of_scores = (of_scores * q.shape[-1] ** -0.5).astype(k.dtype)
            return (
                of_q + _product(of_scores, k[j], 3, 2),
                of_k.at[j].add(_product(of_scores, q[i], 2, 2)),
                of_v.at[j].add(_product(weights.astype(v.dtype), slope[i], 2, 2)),
            )

        of_q, of_k, of_v = _over_seen(i, sight, visit, (jnp.zeros(q.shape[1:], sum_dtype(q)), *slopes))
        return (of_k, of_v), of_q.astype(q.dtype)

    zeros = (jnp.zeros(k.shape, sum_dtype(k)), jnp.zeros(v.shape, sum_dtype(v)))
    (of_k, of_v), of_q = jax.lax.scan(one_block, zeros, jnp.arange(len(q)))
    return of_q, of_k.astype(k.dtype), of_v.astype(v.dtype), None


_attend.defvjp(_forward, _backward)


def _over_seen(i: Array, sight: Any, visit: Callable, start: tuple[Array, ...]) -> tuple[Array, ...]:
    """Folds `carry = visit(j, mask, carry)` over the blocks j with keys that block i sees; returns the carry.

    It begins with `start`; j ascends, and `mask` is True where a query of block i sees a key of block j.
    """
    count, block = sight.key_blocks(i)

    def one_pair(number: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        j = block(number)
        visible = sight.visible(i, j)
        rows, size, _ = visible.shape
        repeats = start[0].shape[2] // size
        mask = jnp.broadcast_to(visible[:, None, None], (rows, 1, repeats, size, size))
        mask = mask.reshape(rows, 1, repeats * size, size)
        return visit(j, mask, carry)

    with jax.named_scope("key_blocks"):
        return jax.lax.fori_loop(0, count, one_pair, start)


def _scores(q: Array, k: Array) -> Float[Array, "B K RQ Q"]:
    # Scaled behind the product, as where tokens are decoded: the rounding is the same.
    return _product(q, k, 3, 3) * q.shape[-1] ** -0.5


def _product(left: Array, right: Array, left_axis: int, right_axis: int) -> Array:
    """Returns left times right, summed over the two axes, per row and kv head (axes 0, 1), in `sum_dtype`."""
    numbers = (((left_axis,), (right_axis,)), ((0, 1), (0, 1)))
    return jax.lax.dot_general(left, right, numbers, preferred_element_type=sum_dtype(left))
