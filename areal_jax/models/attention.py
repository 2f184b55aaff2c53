"""Causal attention for `models.transformer`, over packed rows (trainer) or over pages of KV (generator).

Each layer calls the attention with its queries, keys, values and the cache (pages of KV; over packed rows
what routers did, or None), and gets the output and the updated cache. Both forms compute the same softmax and
differ only in where keys and values are stored. Shapes: B rows, T tokens, H query heads, K kv heads, R = H /
K, h head dimension, N slots (samples generated at once), C tokens of a slot in one call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from areal_jax.models.blockwise import NEGATIVE, blockwise_attention, segment_ends
from areal_jax.models.experts import RouterSums, Routes
from areal_jax.models.kernels.packed_attention import Kernel, over_mesh
from areal_jax.models.kv_pages import KVPages, PagedKernel
from areal_jax.models.products import sum_dtype
from areal_jax.parallel.mesh import platform_of

BLOCK = 256
"""Tokens per block of a packed row: at any time, scores are in memory for BLOCK queries and BLOCK keys."""
CPU_BLOCK = 64
"""`BLOCK` on a CPU: small enough for the scores of one block to stay in the CPU's cache."""
KV_BLOCK = 64
"""Tokens of KV that paged attention reads per step, in whole pages; at least one page."""


Attention = Callable[[Array, Array, Array, Array, Any], tuple[Array, Any]]
"""`attend(layer, q (B, T, H, h), k (B, T, K, h), v, cache)` returns the attention output (B, T, H, h) of the
queries `q` of layer number `layer`, and the updated cache. Over pages, `k` and `v` are first written into the
cache; over packed rows the cache is returned as it is.
"""


def live_tokens(attend: Attention, x: Array) -> Bool[Array, "B T"]:
    """Returns which of the tokens `x` (B, T, D) are not padding; an attention that does not say has none."""
    found = getattr(attend, "is_live", None)
    return jnp.ones(x.shape[:2], bool) if found is None else found


def with_routes(attend: Attention, layer: Any, cache: Any, routes: Routes) -> Any:
    """Returns the cache with what the router of layer number `layer` did, if the cache takes it."""
    if isinstance(cache, RouterSums):
        return cache.adding(layer, routes, live_tokens(attend, routes.weights))
    if isinstance(cache, KVPages) and cache.experts is not None:
        assert isinstance(attend, PagedAttention)
        return cache.with_experts(layer, *attend.places(cache), routes.experts)
    return cache


class PackedAttention(struct.PyTreeNode):
    """Causal attention inside each segment (one sample) of a packed row, or along its prefix tree.

    If the samples of a row share prefixes, their tokens lie depth first: what follows a shared token in any
    sample is the range of columns after it up to its entry in `subtree_ends`. Tokens in this range see it.
    """

    segment_ids: Int[Array, "B T"]
    subtree_ends: Int[Array, "B T"] | None = None
    """None: a token is seen up to the end of its segment."""
    kernel: Kernel | None = struct.field(pytree_node=False, default=None)
    """Used if `subtree_ends` is None; otherwise, and if the kernel is None, JAX code computes block pairs."""
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)
    """The trainer's mesh: each device computes its own rows. None: XLA chooses the split over devices."""

    @property
    def is_live(self) -> Bool[Array, "B T"]:
        return self.segment_ids > 0

    def __call__(
        self, layer: Any, q: Any, k: Any, v: Any, cache: RouterSums | None
    ) -> tuple[Array, RouterSums | None]:
        if self.kernel is not None and self.subtree_ends is None:
            return self.kernel(q.astype(k.dtype), k, v, self.segment_ids).astype(jnp.float32), cache
        is_cpu = platform_of(self.mesh) == "cpu"
        if is_cpu:  # its products read float32 (or float64), also over pages
            k, v = k.astype(sum_dtype(k)), v.astype(sum_dtype(v))
        block = CPU_BLOCK if is_cpu else BLOCK
        ends = segment_ends(self.segment_ids) if self.subtree_ends is None else self.subtree_ends
        attend: Any = partial(blockwise_attention, block=block)
        if self.mesh is not None:
            attend = over_mesh(attend, self.mesh, k.shape[2])
        return attend(q, k, v, ends), cache


class PagedAttention(struct.PyTreeNode):
    """Causal attention of N slots over their own pages, after writing the call's C tokens into the pages.

    A slot holds one sample. Without a kernel, keys are read in ascending order, KV_BLOCK tokens per step,
    with an online softmax. Steps beyond a slot's last token change no bit of its output: they multiply by 1
    and add 0.
    """

    table: Int[Array, "N M"]
    """Page table: entry m of a slot is the page that stores its tokens from m * page_tokens on."""
    positions: Int[Array, "N C"]
    is_written: Bool[Array, "N C"]
    """False for padding tokens: their KV goes to the scratch page, and their output is undefined."""
    kernel: PagedKernel | None = struct.field(pytree_node=False, default=None)
    """Computes the attention; None: JAX code does, over blocks of keys."""
    ends_early: bool = struct.field(pytree_node=False, default=True)
    """Without a kernel: whether the steps end with the longest slot's last token; otherwise all pages of
    `table` are read. A GPU copies the condition of a loop that ends early to the host at each of its steps.
    """

    @property
    def is_live(self) -> Bool[Array, "N C"]:
        return self.is_written

    def extended(self, layer: Any, cache: KVPages, k: Any, v: Any) -> KVPages:
        """Returns the cache with this call's keys `k` and values `v` written to the layer's pages."""
        return cache.written(layer, *self.places(cache), k, v)

    def places(self, cache: KVPages) -> tuple[Int[Array, "N C"], Int[Array, "N C"]]:
        """Returns the page of each token and its index there; padding tokens are in the scratch page."""
        page = jnp.take_along_axis(self.table, self.positions // cache.page_tokens, axis=1)
        return jnp.where(self.is_written, page, 0), self.positions % cache.page_tokens

    def __call__(self, layer: Any, q: Any, k: Any, v: Any, cache: KVPages) -> tuple[Array, KVPages]:
        slots, tokens, heads, head_dim = q.shape
        chex.assert_equal_shape([k, v])
        chex.assert_shape([self.positions, self.is_written], (slots, tokens))
        chex.assert_shape(self.table, (slots, None))
        size, kv_heads = cache.page_tokens, k.shape[2]
        cache = self.extended(layer, cache, k, v)
        if self.kernel is not None:
            lengths = jnp.where(self.is_written, self.positions + 1, 0)
            return self.kernel(q, cache.kv, layer, self.table, lengths), cache
        joined = max(1, KV_BLOCK // size)  # pages of a block
        table = jnp.pad(self.table, ((0, 0), (0, -self.table.shape[1] % joined)))
        q = q.reshape(slots, tokens, kv_heads, -1, head_dim)
        head = jnp.arange(kv_heads)[None, :, None]

        def visit(block: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            largest, total, out = carry
            pages = jax.lax.dynamic_slice_in_dim(table, block * joined, joined, axis=1)
            # Heads come before pages, so that a block's tokens lie in order without another copy.
            keys, values = (
                x.reshape(slots, kv_heads, joined * size, head_dim)
                for x in cache.read(layer, pages[:, None], head)
            )
            seen = block * joined * size + jnp.arange(joined * size)
            visible = self.positions[:, :, None] >= seen  # (N, C, block)
            scores = _scores(q, keys, visible)
            now = jnp.maximum(largest, scores.max(-1))
            shrink = jnp.exp(largest - now)
            weights = jnp.exp(scores - now[..., None])
            # Summed by a product with two columns: the order of XLA's other sums depends on the number of
            # rows, and a token fed alone would not get the bits that it gets in a chunk.
            added = jnp.einsum("nkrqt,nkto->nkrqo", weights, jnp.ones((slots, kv_heads, joined * size, 2)))
            mixed = jnp.einsum(
                "nkrqt,nkth->nkrqh", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
            )
            return now, total * shrink + added[..., 0], out * shrink[..., None] + mixed

        shape = (slots, kv_heads, heads // kv_heads, tokens)
        start = (jnp.full(shape, NEGATIVE), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))
        blocks = table.shape[1] // joined
        if self.ends_early:
            blocks = jnp.where(self.is_written, self.positions, 0).max() // (joined * size) + 1
        with jax.named_scope("kv_blocks"):
            _, total, out = jax.lax.fori_loop(0, blocks, visit, start)
        out = out / total[..., None]
        return jnp.moveaxis(out, 3, 1).reshape(slots, tokens, heads, head_dim), cache


def _scores(q: Float[Array, "N C K R h"], k: Float[Array, "N K T h"], visible: Bool[Array, "N C T"]) -> Array:
    """Returns q k / sqrt(h) as (N, K, R, C, T) float32, with -1e30 where `visible` is False."""
    scores = jnp.einsum("nqkrh,nkth->nkrqt", q.astype(k.dtype), k, preferred_element_type=jnp.float32)
    return jnp.where(visible[:, None, None], scores * q.shape[-1] ** -0.5, NEGATIVE)
