"""`numerics: exact`: the generator's and the trainer's log-probs are equal in every bit.

XLA chooses the order of a sum by the arrays' shapes and by the operations that it fuses, so two programs with
the same formula may give different bits. Here the forward pass therefore computes in tiles of TILE tokens: a
loop over the tiles runs the same program on each tile. Optimisation barriers around the loop body's inputs
and outputs keep XLA from fusing the body with other code. Prefill, decode, the prefill after a change of
weights and the trainer's packed forward pass differ only in the number of tiles and in where keys are stored.
The number of tiles is computed at run time, because XLA would inline a loop with a constant count of 1.

Gradients come from the computation without tiles, which is called bounded here. Shapes: n rows (tokens), B x
T of packed rows or N slots x C tokens; H query heads, K kv heads, h head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from areal_jax.models.attention import Attention, PackedAttention, PagedAttention
from areal_jax.models.blockwise import NEGATIVE
from areal_jax.models.config import EXPERT_PROJECTIONS, PROJECTIONS
from areal_jax.models.kv_pages import KVPages

TILE = 8
"""Rows (tokens) per tile: enough for fast bfloat16 products on a CPU."""
KV_BLOCK = 32
"""Keys that a row attends to per step; the first block begins at the first token of the row's sample."""

MATRICES = frozenset((*PROJECTIONS, *EXPERT_PROJECTIONS, *(f"{name}_lora" for name in PROJECTIONS)))


# --- tiles --------------------------------------------------------------------------------------------------


def in_tiles(f: Callable[..., Any], *rows: Any, is_live: Bool[Array, " n"] | None = None) -> Any:
    """Returns `f(*rows)`, computed TILE rows at a time; `rows` are trees of arrays with n as the first axis.

    Row i of the result of `f` must depend only on row i of `rows`. `is_live`: mask of the rows that have to
    be computed (None: all). A tile without a live row is skipped; the results of its rows are 0.
    """
    count = len(jax.tree.leaves(rows)[0])
    tiles = -(-count // TILE)

    def split(x: Array) -> Array:
        padded = jnp.pad(x, ((0, tiles * TILE - count), *((0, 0),) * (x.ndim - 1)))
        return padded.reshape(tiles, TILE, *x.shape[1:])

    parts = jax.tree.map(split, rows)
    used = jnp.ones(tiles, bool) if is_live is None else split(is_live).any(1)
    # Tiles with live rows first.
    order = jnp.argsort(~used, stable=True)
    # The barrier hides a constant count from XLA, which would inline a loop of one iteration.
    visits = jax.lax.optimization_barrier(used.sum())

    def one_tile(i: Array, out: Any) -> Any:
        at = order[i]
        here = jax.lax.optimization_barrier(jax.tree.map(lambda x: x[at], parts))
        found = jax.lax.optimization_barrier(f(*here))
        return jax.tree.map(lambda whole, part: whole.at[at].set(_bits(part)), out, found)

    like = jax.eval_shape(f, *jax.tree.map(lambda x: x[0], parts))
    out = jax.tree.map(lambda leaf: _bits(jnp.zeros((tiles, *leaf.shape), leaf.dtype)), like)
    out = jax.lax.fori_loop(0, visits, one_tile, out)
    out = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], out)
    return jax.tree.map(
        lambda x, leaf: x if x.dtype == leaf.dtype else jax.lax.bitcast_convert_type(x, leaf.dtype), out, like
    )


def _bits(x: Array) -> Array:
    """Returns a bfloat16 array as its bits (uint16), any other array unchanged.

    Writing into a bfloat16 array is slow on a CPU, because XLA casts the whole array to float32 and back.
    """
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


# --- rounding -----------------------------------------------------------------------------------------------


def rounded(x: Float[Array, "..."], dtype: str) -> Float[Array, "..."]:
    """Returns float32 `x` rounded to values of `dtype`, still as float32; returns any other `x` unchanged.

    A cast to `dtype` and back is no substitute, because XLA may remove both casts.
    """
    if dtype == "float32" or x.dtype != jnp.float32:
        return x
    bits = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, bits.nexp, bits.nmant)


def with_matrices_in(params: Any, dtype: str) -> Any:
    """Returns a layer's parameters with float32 projections and adapters cast to `dtype`.

    The cast is made here once per layer, instead of once per tile.
    """

    def one(path: Any, leaf: Array) -> Array:
        names = {getattr(key, "key", getattr(key, "name", None)) for key in path}
        if leaf.dtype != jnp.float32 or not names & MATRICES or names & {"scale"}:
            return leaf
        return rounded(leaf, dtype).astype(dtype)

    return jax.tree_util.tree_map_with_path(one, params)


# --- attention ----------------------------------------------------------------------------------------------


class ExactPackedAttention(struct.PyTreeNode):
    """`PackedAttention` with exact numerics: tiles of TILE queries read KV_BLOCK keys per step, in order."""

    bounded: PackedAttention
    """The same attention without tiles, from which gradients are computed."""
    positions: Int[Array, "B T"]
    own: Int[Array, "B T"]
    """The segment's token at position p of its sample has index `own` + p among all B T tokens."""
    start: Int[Array, "B T"]
    """Position of the segment's first token; tokens before it are in the segments of shared prefixes."""
    parent: Int[Array, "B T"]
    """Index, among all B T tokens, of the token before the segment's first; read only if `start` > 0."""

    @classmethod
    def of(
        cls, bounded: PackedAttention, positions: Int[Array, "B T"], previous: Int[Array, "B T"] | None
    ) -> ExactPackedAttention:
        """Returns the attention that computes `bounded` with exact numerics.

        `positions`: each token's position in its sample. `previous`: column of the token before it in the
        sample; may be None if no prefix is shared.
        """
        rows, length = positions.shape
        columns = jnp.arange(length)[None]
        row = length * jnp.arange(rows)[:, None]
        own, none = row + columns - positions, jnp.zeros_like(positions)
        if bounded.subtree_ends is None:
            return cls(bounded, positions, own, none, none)
        assert previous is not None, "a batch with shared prefixes has previous=None; pass Batch.previous"
        ids = bounded.segment_ids
        is_first = ids != jnp.pad(ids[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
        first = jax.lax.cummax(jnp.where(is_first, columns, 0), axis=1)
        start, before = (jnp.take_along_axis(x, first, axis=1) for x in (positions, previous))
        return cls(bounded, positions, own, start, row + before)

    @property
    def is_live(self) -> Bool[Array, "B T"]:
        return self.bounded.is_live

    def rows(self, f: Callable[..., Any], *args: Any) -> Any:
        return _by_rows(f, args, self.is_live)

    def __call__(self, layer: Any, q: Any, k: Any, v: Any, cache: Any) -> tuple[Array, Any]:
        keys, values = (x.reshape(-1, *x.shape[2:]).astype(jnp.float32) for x in (k, v))
        segments = self.own.ravel(), self.start.ravel(), self.parent.ravel()

        def climb(seen: Array, place: Any) -> Any:
            """Returns `place`, or that of the segment before if the position `seen` comes before `place`."""
            _, start, parent = place
            before = (x[jnp.where(seen < start, parent, 0)] for x in segments)
            return tuple(jnp.where(seen < start, x, y) for x, y in zip(before, place, strict=True))

        def fetch(place: Any, seen: Array) -> tuple[Array, Array]:
            place = tuple(jnp.broadcast_to(x[:, None], (len(x), len(seen))) for x in place)
            own, _, _ = jax.lax.while_loop(lambda at: (seen < at[1]).any(), partial(climb, seen), place)
            at = jnp.clip(own + seen, 0, len(keys) - 1)
            return keys[at], values[at]

        place = self.own, self.start, self.parent
        return self.rows(partial(_attend, fetch), q, self.positions, place), cache


class ExactPagedAttention(PagedAttention):
    """`PagedAttention` with exact numerics: tiles of TILE queries read KV_BLOCK keys per step; no kernel."""

    def rows(self, f: Callable[..., Any], *args: Any) -> Any:
        return _by_rows(f, args, self.is_live)

    def __call__(self, layer: Any, q: Any, k: Any, v: Any, cache: KVPages) -> tuple[Array, KVPages]:
        size = cache.page_tokens
        cache = self.extended(layer, cache, k, v)
        last = self.table.shape[1] * size - 1

        def fetch(pages_of: Array, seen: Array) -> tuple[Array, Array]:
            seen = jnp.minimum(seen, last)
            keys, values = cache.read(layer, pages_of[:, seen // size], slice(None), seen % size)
            return keys.astype(jnp.float32), values.astype(jnp.float32)

        table = jnp.broadcast_to(self.table[:, None], (*self.positions.shape, self.table.shape[1]))
        return self.rows(partial(_attend, fetch), q, self.positions, table), cache


def _by_rows(f: Callable[..., Any], args: tuple, is_live: Bool[Array, "B T"]) -> Any:
    """Returns `f(*args)`, computed in tiles: `args` are (B, T, ...), and `f` gets parts (1, TILE, ...).

    A tile in which `is_live` is False at every token is skipped, with result 0.
    """

    def one(*rows: Any) -> Any:
        found = f(*jax.tree.map(lambda x: x[None], rows))
        return jax.tree.map(lambda x: x[0], found)

    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), args)
    out = in_tiles(one, *flat, is_live=is_live.reshape(-1))
    return jax.tree.map(lambda x: x.reshape(*is_live.shape, *x.shape[1:]), out)


def _attend(
    fetch: Callable[[Any, Array], tuple[Array, Array]],
    q: Float[Array, "1 n H h"],
    positions: Array,
    place: Any,
) -> Float[Array, "1 n H h"]:
    """Returns the causal attention output, float32, of one tile of n queries `q` at `positions`.

    `fetch(place, seen)` returns the keys and values, (n, KV_BLOCK, K, h) each, at the positions `seen` of
    each query's sample; `place` tells where the samples' keys are stored. Keys at later positions than a
    query's change no bit of the query's output.
    """
    rows, heads, head_dim = q.shape[1:]
    positions, place = positions[0], jax.tree.map(lambda x: x[0], place)
    kv_heads = jax.eval_shape(fetch, place, jnp.arange(KV_BLOCK))[0].shape[2]
    q = q[0].reshape(rows, kv_heads, heads // kv_heads, head_dim) * head_dim**-0.5

    def visit(block: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        largest, total, out = carry
        seen = block * KV_BLOCK + jnp.arange(KV_BLOCK)
        keys, values = jax.lax.optimization_barrier(fetch(place, seen))
        scores = jnp.einsum("nkrh,ntkh->nkrt", q, keys, preferred_element_type=jnp.float32)
        scores = jnp.where((seen <= positions[:, None])[:, None, None], scores, NEGATIVE)
        now = jnp.maximum(largest, scores.max(-1))
        shrink = jnp.exp(largest - now)
        weights = jnp.exp(scores - now[..., None])
        mixed = jnp.einsum("nkrt,ntkh->nkrh", weights, values, preferred_element_type=jnp.float32)
        return now, total * shrink + weights.sum(-1), out * shrink[..., None] + mixed

    start = (jnp.full(q.shape[:-1], NEGATIVE), jnp.zeros(q.shape[:-1]), jnp.zeros(q.shape))
    _, total, out = jax.lax.fori_loop(0, positions.max() // KV_BLOCK + 1, visit, start)
    return (out / total[..., None]).reshape(1, rows, heads, head_dim)


# --- in a model --------------------------------------------------------------------------------------------


def is_exact(attend: Attention) -> TypeGuard[ExactPackedAttention | ExactPagedAttention]:
    return isinstance(attend, (ExactPackedAttention, ExactPagedAttention))


def rows_of(attend: Attention) -> Callable[..., Any]:
    """Returns a function `rows(f, *args)` that returns f(*args), computed in tiles if `attend` is exact."""
    return attend.rows if is_exact(attend) else lambda f, *args: f(*args)


def as_attended(
    run: Callable[..., Any], attend: Attention, fixed: tuple, x: Array, others: Any, kept: str | None = None
) -> Any:
    """Returns `run(attend, fixed, x, others)`, with gradients with respect to `x` and `others`.

    `fixed`: a pair of anything without a gradient, and of choices, which are integers; None: `run` chooses.
    `run` returns a result and the choices that it made or was given. If `attend` is exact attention over
    packed rows, the gradients are those of `attend.bounded`, without tiles. They, and those of any attention
    if `kept` is given, come from a second run of the computation with the same choices: the first one stores
    its arguments and choices alone, `x` as `kept` (None: as it is).
    """
    if kept is None and not isinstance(attend, ExactPackedAttention):
        return run(attend, fixed, x, others)
    return _run_again(run, kept, attend, fixed, x, others)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run_again(run: Any, kept: str | None, attend: Attention, fixed: tuple, x: Array, others: Any) -> Any:
    return run(attend, fixed, x, others)


def _stored(
    run: Any, kept: str | None, attend: Any, fixed: tuple, x: Array, others: Any
) -> tuple[Any, tuple]:
    result, choices = run(attend, fixed, x, others)
    return (result, choices), (attend, (fixed[0], choices), x.astype(kept or x.dtype), others)


def _slopes(run: Any, kept: str | None, stored: tuple, slope: Any) -> tuple:
    attend, fixed, x, others = stored
    bounded = attend.bounded if isinstance(attend, ExactPackedAttention) else attend

    def again(x: Array, others: Any) -> Any:
        return run(bounded, fixed, x, others)[0]

    of_x, of_others = jax.vjp(again, x.astype(jnp.float32), others)[1](slope[0])
    return None, None, of_x, of_others


_run_again.defvjp(_stored, _slopes)
