"""Attention for the one model definition: over packed rows, or over pages of KV.

An attention is called once a layer with that layer's queries, keys and values, and threads a cache through.
The two forms compute the same softmax; only where keys and values live differs. Shapes: B rows, T tokens, H
query heads, K kv heads, R = H / K, h head dimension, N slots, C tokens a slot gets in this call.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from areal_jax.models.attention_kernels import Kernel
from areal_jax.models.blockwise import NEGATIVE, blockwise_attention

BLOCK = 256
"""Queries, and keys, of a packed row whose scores exist at once."""
CPU_BLOCK = 64
"""The same on a CPU, where the scores of a block should stay in its cache."""


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
    """Every layer's keys and values, in pages; page 0 is scratch, written by slots that do not count."""

    k: Float[Array, "L P page K h"]
    v: Float[Array, "L P page K h"]

    @classmethod
    def zeros(
        cls, layers: int, pages: int, page_tokens: int, kv_heads: int, head_dim: int, dtype: str
    ) -> KVPages:
        """`pages` of them, and the scratch page."""
        shape = (layers, pages + 1, page_tokens, kv_heads, head_dim)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    @property
    def page_tokens(self) -> int:
        return self.k.shape[2]


class PackedAttention(struct.PyTreeNode):
    """Causal attention inside each segment of a packed row; scores exist for a pair of blocks at a time.

    A token also sees the whole segment that `context_ids` names, which lies before it in its row: the prompt
    that its group shares. 0 names none.
    """

    segment_ids: Int[Array, "B T"]
    context_ids: Int[Array, "B T"] | None = None
    kernel: Kernel | None = struct.field(pytree_node=False, default=None)
    """What computes it where no context is given; pairs of blocks otherwise, and without one."""

    def __call__(self, layer: Any, q: Any, k: Any, v: Any, cache: None) -> tuple[Array, None]:
        if self.kernel is not None and self.context_ids is None:
            return self.kernel(q.astype(k.dtype), k, v, self.segment_ids).astype(jnp.float32), None
        rows, length, heads, head_dim = q.shape
        kv_heads = k.shape[2]
        grouped = q.reshape(rows, length, kv_heads, heads // kv_heads, head_dim)
        block = CPU_BLOCK if jax.default_backend() == "cpu" else BLOCK
        out = blockwise_attention(grouped, k, v, self.segment_ids, self.context_ids, block)
        return out.reshape(q.shape), None


class PagedAttention(struct.PyTreeNode):
    """Causal attention of N slots over their own pages; first writes the call's C tokens into them.

    Pages are visited in ascending order with an online softmax, so that the number of visited pages changes
    no bit: a page beyond a slot's tokens multiplies by 1 and adds 0.
    """

    table: Int[Array, "N M"]
    """Page of each slot's m-th run of page_tokens tokens."""
    positions: Int[Array, "N C"]
    is_written: Bool[Array, "N C"]
    """False: the token is padding; its KV goes to the scratch page and its output means nothing."""

    def __call__(self, layer: Any, q: Any, k: Any, v: Any, cache: KVPages) -> tuple[Array, KVPages]:
        slots, tokens, heads, head_dim = q.shape
        page_tokens, kv_heads = cache.page_tokens, k.shape[2]
        page = jnp.take_along_axis(self.table, self.positions // page_tokens, axis=1)
        page = jnp.where(self.is_written, page, 0)
        at = (layer, page, self.positions % page_tokens)
        keys, values = k.astype(cache.k.dtype), v.astype(cache.v.dtype)
        cache = KVPages(cache.k.at[at].set(keys), cache.v.at[at].set(values))
        q = q.reshape(slots, tokens, kv_heads, heads // kv_heads, head_dim)

        def visit(block: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            largest, total, out = carry
            pages = self.table[:, block]
            seen = block * page_tokens + jnp.arange(page_tokens)
            visible = self.positions[:, :, None] >= seen[None, None, :]  # (N, C, page)
            scores = _scores(q, cache.k[layer, pages], visible)
            now = jnp.maximum(largest, scores.max(-1))
            shrink = jnp.exp(largest - now)
            weights = jnp.exp(scores - now[..., None])
            values = cache.v[layer, pages]
            mixed = jnp.einsum(
                "bkrqt,btkh->bkrqh", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
            )
            return now, total * shrink + weights.sum(-1), out * shrink[..., None] + mixed

        shape = (slots, kv_heads, heads // kv_heads, tokens)
        start = (jnp.full(shape, NEGATIVE), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))
        used = jnp.where(self.is_written, self.positions, 0).max() // page_tokens + 1
        _, total, out = jax.lax.fori_loop(0, used, visit, start)
        out = out / total[..., None]
        return jnp.moveaxis(out, 3, 1).reshape(slots, tokens, heads, head_dim), cache


def _scores(q: Float[Array, "B Q K R h"], k: Float[Array, "B T K h"], visible: Bool[Array, "B Q T"]) -> Array:
    """Masked, scaled scores (B, K, R, Q, T) in float32."""
    scores = jnp.einsum("bqkrh,btkh->bkrqt", q.astype(k.dtype), k, preferred_element_type=jnp.float32)
    return jnp.where(visible[:, None, None], scores * q.shape[-1] ** -0.5, NEGATIVE)
