"""`numerics: exact`: what makes the generator's log-probs and the trainer's equal in every bit.

XLA chooses the order of a reduction by shapes and by what it fuses, so equal mathematics does not give equal
bits: equal programs do. Here all arithmetic of the forward pass runs TILE rows at a time as the body of one
loop, with its inputs and outputs fenced off. Prefill, decode, the rebuild of KV after a swap and the packed
forward of the trainer differ in how many tiles they run and in where keys lie, never in a tile's program.
The number of tiles is a value and no constant, or a loop that turns once would be dissolved into its
surroundings. Only the forward pass has to agree: gradients are those of the untiled computation. Shapes: n
rows (tokens), B x T of a packed row or N slots x C tokens; H query heads, K kv heads, h head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from areal_jax.models.attention import Attention, KVPages, PackedAttention, PagedAttention, PagedKernel
from areal_jax.models.attention_kernels import Kernel
from areal_jax.models.blockwise import NEGATIVE
from areal_jax.models.config import PROJECTIONS, ModelConfig

TILE = 8
"""Rows whose arithmetic is one program: enough for fast products of bfloat16 on a CPU."""
KV_BLOCK = 32
"""Keys a row attends to at a time, counted from its sample's first token."""

MATRICES = frozenset((*PROJECTIONS, *(f"{name}_lora" for name in PROJECTIONS)))


# --- tiles --------------------------------------------------------------------------------------------------


def in_tiles(f: Callable[..., Any], *rows: Any, is_live: Bool[Array, " n"] | None = None) -> Any:
    """`f(*rows)` of trees of arrays with n rows in front, computed TILE rows at a time.

    Row i of the results has to be a function of row i alone. A tile without a live row is not computed; its
    results are 0.
    """
    count = len(jax.tree.leaves(rows)[0])
    tiles = -(-count // TILE)

    def split(x: Array) -> Array:
        padded = jnp.pad(x, ((0, tiles * TILE - count), *((0, 0),) * (x.ndim - 1)))
        return padded.reshape(tiles, TILE, *x.shape[1:])

    parts = jax.tree.map(split, rows)
    used = jnp.ones(tiles, bool) if is_live is None else split(is_live).any(1)
    order = jnp.argsort(~used, stable=True)
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
    """A bfloat16's bits: to write a part of an array of them, a CPU casts all of it to float32 and back."""
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def forward_as(exact: Callable[..., Any], bounded: Callable[..., Any], fixed: Any, inputs: Any) -> Any:
    """`exact(fixed, inputs)` with the gradient by `inputs` of `bounded`, a fast form of the same function.

    `bounded` is computed again in the backward pass: nothing but the inputs is kept.
    """
    return exact(fixed, inputs)


def _keep_inputs(exact: Any, bounded: Any, fixed: Any, inputs: Any) -> tuple[Any, Any]:
    return exact(fixed, inputs), (fixed, inputs)


def _slopes_of_bounded(exact: Any, bounded: Any, kept: Any, slope: Any) -> tuple[None, Any]:
    fixed, inputs = kept
    return None, jax.vjp(partial(bounded, fixed), inputs)[1](slope)[0]


forward_as.defvjp(_keep_inputs, _slopes_of_bounded)


# --- rounding -----------------------------------------------------------------------------------------------


def rounded(x: Float[Array, "..."], dtype: str) -> Float[Array, "..."]:
    """`x`, in the dtype it has, to the nearest values of `dtype`: XLA may drop a cast there and back."""
    if dtype == "float32" or x.dtype != jnp.float32:
        return x
    bits = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, bits.nexp, bits.nmant)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def as_published(params: Any, dtype: str) -> Any:
    """Parameters as hosts read them that are sent in `dtype`; gradients pass through."""
    return jax.tree.map(lambda leaf: rounded(leaf, dtype), params)


as_published.defvjp(
    lambda params, dtype: (as_published(params, dtype), None), lambda dtype, _, slope: (slope,)
)


def with_matrices_in(params: Any, dtype: str) -> Any:
    """A layer's parameters with its matrices in `dtype`, once for all tiles."""

    def one(path: Any, leaf: Array) -> Array:
        names = {getattr(key, "key", getattr(key, "name", None)) for key in path}
        if leaf.dtype != jnp.float32 or not names & MATRICES or names & {"scale"}:
            return leaf
        return rounded(leaf, dtype).astype(dtype)

    return jax.tree_util.tree_map_with_path(one, params)


# --- attention ----------------------------------------------------------------------------------------------


class ExactPackedAttention(struct.PyTreeNode):
    """`PackedAttention` of which every query reads its sample's keys from the first one on, in KV_BLOCKs."""

    bounded: PackedAttention
    """What gradients are of."""
    positions: Int[Array, "B T"]
    own: Int[Array, "B T"]
    """Where, among all B T tokens, the sample's token 0 lies, or would if it had its prompt before it."""
    shared: Int[Array, "B T"]
    """How many first tokens of the sample are another segment's: the prompt that its group shares."""
    context: Int[Array, "B T"]
    """Where the first of those lies."""

    @classmethod
    def of(
        cls, bounded: PackedAttention, positions: Int[Array, "B T"], previous: Int[Array, "B T"] | None
    ) -> ExactPackedAttention:
        """`previous` as in `Batch`; needed where rows share prompts."""
        rows, length = positions.shape
        columns = jnp.arange(length)[None]
        row = length * jnp.arange(rows)[:, None]
        own, none = row + columns - positions, jnp.zeros_like(positions)
        if bounded.context_ids is None:
            return cls(bounded, positions, own, none, none)
        assert previous is not None, "rows that share prompts need to know each token's predecessor"
        ids = bounded.segment_ids
        is_first = ids != jnp.pad(ids[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
        first = jax.lax.cummax(jnp.where(is_first, columns, 0), axis=1)
        before = jnp.take_along_axis(previous, first, axis=1)
        shared = jnp.where(bounded.context_ids > 0, jnp.take_along_axis(positions, first, axis=1), 0)
        return cls(bounded, positions, own, shared, jnp.where(shared > 0, row + before - shared + 1, 0))

    def rows(self, f: Callable[..., Any], *args: Any) -> Any:
        return _by_rows(f, args, self.bounded.segment_ids > 0)

    def __call__(self, layer: Any, q: Any, k: Any, v: Any, cache: None) -> tuple[Array, None]:
        keys, values = (x.reshape(-1, *x.shape[2:]).astype(jnp.float32) for x in (k, v))

        def fetch(place: Any, seen: Array) -> tuple[Array, Array]:
            own, shared, context = (x[:, None] for x in place)
            at = jnp.where(seen < shared, context, own) + seen
            at = jnp.clip(at, 0, len(keys) - 1)
            return keys[at], values[at]

        place = self.own, self.shared, self.context
        return self.rows(partial(_attend, fetch), q, self.positions, place), None


class ExactPagedAttention(struct.PyTreeNode):
    """`PagedAttention`, a row at a time over KV_BLOCKs, whatever a page's size."""

    table: Int[Array, "N M"]
    positions: Int[Array, "N C"]
    is_written: Bool[Array, "N C"]

    def rows(self, f: Callable[..., Any], *args: Any) -> Any:
        return _by_rows(f, args, self.is_written)

    def __call__(self, layer: Any, q: Any, k: Any, v: Any, cache: KVPages) -> tuple[Array, KVPages]:
        size = cache.page_tokens
        page = jnp.take_along_axis(self.table, self.positions // size, axis=1)
        cache = cache.written(layer, jnp.where(self.is_written, page, 0), self.positions % size, k, v)
        last = self.table.shape[1] * size - 1

        def fetch(pages_of: Array, seen: Array) -> tuple[Array, Array]:
            seen = jnp.minimum(seen, last)
            keys, values = cache.read(layer, pages_of[:, seen // size], slice(None), seen % size)
            return keys.astype(jnp.float32), values.astype(jnp.float32)

        table = jnp.broadcast_to(self.table[:, None], (*self.positions.shape, self.table.shape[1]))
        return self.rows(partial(_attend, fetch), q, self.positions, table), cache


def _by_rows(f: Callable[..., Any], args: tuple, is_live: Bool[Array, "B T"]) -> Any:
    """`f(*args)` in tiles; `f` sees (1, TILE) rows where the arguments have (B, T)."""

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
    """Causal attention of one tile in float32; `fetch(place, seen)` gives keys and values (n, KV_BLOCK, K, h)
    of the tokens `seen` of each row's own sample. A block behind a row's last token changes no bit of it.
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


# --- by the config ------------------------------------------------------------------------------------------


def packed_attention(
    config: ModelConfig,
    segment_ids: Int[Array, "B T"],
    context_ids: Int[Array, "B T"] | None,
    positions: Int[Array, "B T"],
    previous: Int[Array, "B T"],
    kernel: Kernel | None,
    mesh: Mesh | None = None,
) -> Attention:
    """Attention over packed rows, in the numerics of the model; `mesh` as PackedAttention has it."""
    bounded = PackedAttention(segment_ids, context_ids, kernel, mesh)
    return bounded if config.numerics == "bounded" else ExactPackedAttention.of(bounded, positions, previous)


def paged_attention(
    config: ModelConfig,
    table: Int[Array, "N M"],
    positions: Int[Array, "N C"],
    is_written: Bool[Array, "N C"],
    kernel: PagedKernel | None = None,
) -> Attention:
    """Attention over pages of KV, in the numerics of the model; exact ones use no kernel."""
    if config.numerics == "exact":
        return ExactPagedAttention(table, positions, is_written)
    return PagedAttention(table, positions, is_written, kernel)


def is_exact(attend: Attention) -> TypeGuard[ExactPackedAttention | ExactPagedAttention]:
    return isinstance(attend, (ExactPackedAttention, ExactPagedAttention))


def rows_of(attend: Attention) -> Callable[..., Any]:
    """`rows(f, *args)`: f(*args), in tiles where the attention is an exact one."""
    return attend.rows if is_exact(attend) else lambda f, *args: f(*args)


def as_attended(run: Callable[..., Any], attend: Attention, fixed: Any, inputs: Any) -> Any:
    """`run(attend, fixed, inputs)`; over exact packed rows with the gradient of the bounded attention."""
    if not isinstance(attend, ExactPackedAttention):
        return run(attend, fixed, inputs)

    def exact(fixed: Any, inputs: Any) -> Any:
        return run(*fixed, inputs)

    def bounded(fixed: Any, inputs: Any) -> Any:
        return run(fixed[0].bounded, fixed[1], inputs)

    return forward_as(exact, bounded, (attend, fixed), inputs)
