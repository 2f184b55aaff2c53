"""Attention for the one model definition: over packed rows, or over pages of KV.

An attention is called once a layer with that layer's queries, keys and values, and threads a cache through.
The two forms compute the same softmax; only where keys and values live differs. Shapes: B rows, T tokens, H
query heads, K kv heads, R = H / K, h head dimension, N slots, C tokens a slot gets in this call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from areal_jax.models.attention_kernels import Kernel, over_mesh
from areal_jax.models.blockwise import NEGATIVE, blockwise_attention

BLOCK = 256
"""Queries, and keys, of a packed row whose scores exist at once."""
CPU_BLOCK = 64
"""The same on a CPU, where the scores of a block should stay in its cache."""
KV_BLOCK = 64
"""Tokens of KV that paged attention visits at once, in whole pages; larger pages one by one."""
LARGEST = 3e38
"""Of the values that pages hold; a little less than what bfloat16 holds."""


class Attention(Protocol):
    def __call__(
        self,
        layer: Int[Array, ""],
        q: Float[Array, "B T H h"],
        k: Float[Array, "B T K h"],
        v: Float[Array, "B T K h"],
        cache: Any,
    ) -> tuple[Float[Array, "B T H h"], Any]: ...


class KVPages(struct.PyTreeNode):
    """Every layer's keys and values, in pages; page 0 is scratch, written by slots that do not count.

    A CPU holds bfloat16 as its bits, which it moves as memory; int8 codes have a scale a token and kv head.
    Values are finite: a token with others has zeros for them and keys that are no number, so that whoever
    sees it computes none, and whoever masks its scores multiplies the values by 0 and adds 0.
    """

    k: Array
    """(L, P, K, page, h): float32, bfloat16 (on a CPU uint16, its bits) or int8."""
    v: Array
    k_scale: Float[Array, "L P K page 1"] | None = None
    v_scale: Float[Array, "L P K page 1"] | None = None

    @classmethod
    def zeros(
        cls, layers: int, pages: int, page_tokens: int, kv_heads: int, head_dim: int, dtype: str
    ) -> KVPages:
        """`pages` of them, and the scratch page; `dtype` float32, bfloat16 or int8."""
        shape = (layers, pages + 1, kv_heads, page_tokens, head_dim)
        held = jnp.uint16 if dtype == "bfloat16" and jax.default_backend() == "cpu" else dtype
        scales = [jnp.zeros((*shape[:-1], 1)) for _ in range(2)] if dtype == "int8" else [None, None]
        return cls(jnp.zeros(shape, held), jnp.zeros(shape, held), *scales)

    @property
    def page_tokens(self) -> int:
        return self.k.shape[3]

    def written(
        self, layer: Any, page: Int[Array, "N C"], place: Int[Array, "N C"], k: Any, v: Any
    ) -> KVPages:
        """With keys and values (N, C, K, h) of the tokens at `place` in their pages."""
        # All leading axes by index: were heads a slice between them, XLA:GPU may move the whole pool to have
        # them in front.
        at = (layer, page[..., None], jnp.arange(self.k.shape[2]), place[..., None])
        is_finite = (jnp.abs(v) < LARGEST).all(-1, keepdims=True)
        k, v = jnp.where(is_finite, k, jnp.nan), jnp.where(is_finite, v, 0)
        (k, k_scale), (v, v_scale) = (_held(x, self.k.dtype) for x in (k, v))
        pages = KVPages(self.k.at[at].set(k), self.v.at[at].set(v), self.k_scale, self.v_scale)
        if self.k_scale is None or self.v_scale is None:
            return pages
        return pages.replace(
            k_scale=self.k_scale.at[at].set(k_scale), v_scale=self.v_scale.at[at].set(v_scale)
        )

    def read(self, *at: Any) -> tuple[Array, Array]:
        """Keys and values at these indices into (L, P, K, page), as products read them."""
        scales = [None if scale is None else scale[at] for scale in (self.k_scale, self.v_scale)]
        return _floats(self.k[at], scales[0]), _floats(self.v[at], scales[1])


def _held(x: Float[Array, "... h"], dtype: Any) -> tuple[Array, Array | None]:
    """`x` as pages of `dtype` hold it, and its scale."""
    if dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16), None
    if dtype != jnp.int8:
        return x.astype(dtype), None
    x = x.astype(jnp.float32)
    scale = jnp.abs(x).max(-1, keepdims=True) / 127
    return jnp.round(x / jnp.where(scale > 0, scale, 1.0)).astype(jnp.int8), scale


def _floats(held: Array, scale: Array | None) -> Array:
    """What `held` stands for: bfloat16 where that is held, but on a CPU, whose products want float32."""
    if held.dtype == jnp.uint16:
        floats = jax.lax.bitcast_convert_type(held, jnp.bfloat16)
        return floats.astype(jnp.float32) if jax.default_backend() == "cpu" else floats
    return held if scale is None else held.astype(jnp.float32) * scale


PagedKernel = Callable[[Array, KVPages, Array, Array, Array], Array]
"""`kernel(q (N, H, h), cache, layer, table (N, M), lengths (N,)) -> (N, H, h)` float32: a slot's query over
the first `lengths` tokens of its pages; nothing in particular where that is 0."""


class PackedAttention(struct.PyTreeNode):
    """Causal attention inside each segment of a packed row; scores exist for a pair of blocks at a time.

    A token also sees the whole segment that `context_ids` names, which lies before it in its row: the prompt
    that its group shares. 0 names none.
    """

    segment_ids: Int[Array, "B T"]
    context_ids: Int[Array, "B T"] | None = None
    kernel: Kernel | None = struct.field(pytree_node=False, default=None)
    """What computes it where no context is given; pairs of blocks otherwise, and without one."""
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)
    """Over which the rows lie, as a trainer's do; None: on one device, or however it comes."""

    def __call__(self, layer: Any, q: Any, k: Any, v: Any, cache: None) -> tuple[Array, None]:
        if self.kernel is not None and self.context_ids is None:
            return self.kernel(q.astype(k.dtype), k, v, self.segment_ids).astype(jnp.float32), None
        rows, length, heads, head_dim = q.shape
        kv_heads = k.shape[2]
        if jax.default_backend() == "cpu":  # whose products want float32, over pages too
            k, v = k.astype(jnp.float32), v.astype(jnp.float32)
        grouped = q.reshape(rows, length, kv_heads, heads // kv_heads, head_dim)
        block = CPU_BLOCK if jax.default_backend() == "cpu" else BLOCK
        ids = [self.segment_ids, *([] if self.context_ids is None else [self.context_ids])]
        attend: Any = partial(blockwise_attention, block=block)
        if self.mesh is not None:
            attend = over_mesh(attend, self.mesh, kv_heads, len(ids))
        return attend(grouped, k, v, *ids).reshape(q.shape), None


class PagedAttention(struct.PyTreeNode):
    """Causal attention of N slots over their own pages; first writes the call's C tokens into them.

    Keys are visited in blocks of as many pages as make KV_BLOCK tokens, in ascending order with an online
    softmax, so that the number of visited blocks changes no bit: a block beyond a slot's tokens multiplies by
    1 and adds 0.
    """

    table: Int[Array, "N M"]
    """Page of each slot's m-th run of page_tokens tokens."""
    positions: Int[Array, "N C"]
    is_written: Bool[Array, "N C"]
    """False: the token is padding; its KV goes to the scratch page and its output means nothing."""
    kernel: PagedKernel | None = struct.field(pytree_node=False, default=None)
    """What computes calls of one token a slot; blocks otherwise, and without one."""

    def __call__(self, layer: Any, q: Any, k: Any, v: Any, cache: KVPages) -> tuple[Array, KVPages]:
        slots, tokens, heads, head_dim = q.shape
        size, kv_heads = cache.page_tokens, k.shape[2]
        page = jnp.take_along_axis(self.table, self.positions // size, axis=1)
        cache = cache.written(layer, jnp.where(self.is_written, page, 0), self.positions % size, k, v)
        if self.kernel is not None and tokens == 1:
            lengths = jnp.where(self.is_written, self.positions + 1, 0)[:, 0]
            return self.kernel(q[:, 0], cache, layer, self.table, lengths)[:, None], cache
        joined = max(1, KV_BLOCK // size)  # pages of a block
        table = jnp.pad(self.table, ((0, 0), (0, -self.table.shape[1] % joined)))
        q = q.reshape(slots, tokens, kv_heads, -1, head_dim)
        head = jnp.arange(kv_heads)[None, :, None]

        def visit(block: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            largest, total, out = carry
            pages = jax.lax.dynamic_slice_in_dim(table, block * joined, joined, axis=1)
            # Heads in front of pages: so a block's tokens lie in order without being moved once more.
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
            # A product, of more than a column: XLA's other sums have an order that depends on how many rows
            # there are, and then a token fed alone would not get the bits that it gets in a chunk.
            added = jnp.einsum("nkrqt,nkto->nkrqo", weights, jnp.ones((slots, kv_heads, joined * size, 2)))
            mixed = jnp.einsum(
                "nkrqt,nkth->nkrqh", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
            )
            return now, total * shrink + added[..., 0], out * shrink[..., None] + mixed

        shape = (slots, kv_heads, heads // kv_heads, tokens)
        start = (jnp.full(shape, NEGATIVE), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))
        last = jnp.where(self.is_written, self.positions, 0).max()
        _, total, out = jax.lax.fori_loop(0, last // (joined * size) + 1, visit, start)
        out = out / total[..., None]
        return jnp.moveaxis(out, 3, 1).reshape(slots, tokens, heads, head_dim), cache


def _scores(q: Float[Array, "N C K R h"], k: Float[Array, "N K T h"], visible: Bool[Array, "N C T"]) -> Array:
    """Masked, scaled scores (N, K, R, C, T) in float32."""
    scores = jnp.einsum("nqkrh,nkth->nkrqt", q.astype(k.dtype), k, preferred_element_type=jnp.float32)
    return jnp.where(visible[:, None, None], scores * q.shape[-1] ** -0.5, NEGATIVE)
