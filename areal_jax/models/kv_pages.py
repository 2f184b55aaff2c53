"""Pages of keys and values as a pytree, with functions to write and read them.

Shapes: L layers, P pages, N slots, C tokens of a slot in one call, M entries of a slot's page table, H query
heads, K kv heads, h head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, UInt8

LARGEST = 3e38
"""Values of at least this magnitude count as not finite. It is slightly below bfloat16's largest number."""


class KVPages(struct.PyTreeNode):
    """The keys and values of all layers, in pages of `page_tokens` tokens.

    Page 0 is scratch: padding tokens are written there. On a CPU bfloat16 numbers are stored as their bits
    (uint16), because XLA casts a whole bfloat16 array when it writes into the array. int8 codes have one
    scale per token and kv head. A token with a non-finite value vector is stored with value 0 and key NaN:
    the output of a query that attends to the token is NaN; a query that masks the token is not affected.
    """

    k: Array
    """(L, P, K, page_tokens, h): float32, bfloat16 (on a CPU uint16, the bits of bfloat16) or int8."""
    v: Array
    k_scale: Float[Array, "L P K page 1"] | None = None
    v_scale: Float[Array, "L P K page 1"] | None = None
    experts: UInt8[Array, "L P K page e"] | None = None
    """The experts that each token passed through when its KV was computed, in order over the K e places, of
    which k are used; None: not kept. The axis K lets them be split and moved as keys and values are.
    """

    @classmethod
    def zeros(
        cls,
        layers: int,
        pages: int,
        page_tokens: int,
        kv_heads: int,
        head_dim: int,
        dtype: str,
        *,
        platform: str | None = None,
        experts: int = 0,
    ) -> KVPages:
        """Returns `pages` pages of zeros and the scratch page 0; `dtype` is float32, bfloat16 or int8.

        `platform`: the platform of the devices that hold the pages; None: that of jax's default device.
        `experts`: number of experts a token of which the numbers are kept.
        """
        shape = (layers, pages + 1, kv_heads, page_tokens, head_dim)
        is_cpu = (platform or jax.default_backend()) == "cpu"
        held = jnp.uint16 if dtype == "bfloat16" and is_cpu else dtype
        scales = [jnp.zeros((*shape[:-1], 1)) for _ in range(2)] if dtype == "int8" else [None, None]
        kept = jnp.zeros((*shape[:-1], -(-experts // kv_heads)), jnp.uint8) if experts else None
        return cls(jnp.zeros(shape, held), jnp.zeros(shape, held), *scales, experts=kept)

    @property
    def page_tokens(self) -> int:
        return self.k.shape[3]

    def written(
        self, layer: Any, page: Int[Array, "N C"], place: Int[Array, "N C"], k: Any, v: Any
    ) -> KVPages:
        """Returns the pages with the keys `k` and values `v`, (N, C, K, h), written into layer `layer`.

        Each token is written to index `place` within page number `page`.
        """
        # All leading axes are indexed: with heads as a slice between them, XLA:GPU may transpose the whole
        # pool to move them to the front.
        at = (layer, page[..., None], jnp.arange(self.k.shape[2]), place[..., None])
        is_finite = (jnp.abs(v) < LARGEST).all(-1, keepdims=True)
        k, v = jnp.where(is_finite, k, jnp.nan), jnp.where(is_finite, v, 0)
        (k, k_scale), (v, v_scale) = (_held(x, self.k.dtype) for x in (k, v))
        written = KVPages(k, v, k_scale, v_scale)
        pages = jax.tree.map(lambda pages, x: pages.at[at].set(x), self.kv, written)
        return pages.replace(experts=self.experts)

    @property
    def kv(self) -> KVPages:
        """The pages without experts."""
        return self.replace(experts=None)  # type: ignore[attr-defined]

    def with_experts(
        self, layer: Any, page: Int[Array, "N C"], place: Int[Array, "N C"], experts: Int[Array, "N C k"]
    ) -> KVPages:
        """Returns the pages with the numbers of each token's experts written; see `written`."""
        assert self.experts is not None
        heads, each = self.experts.shape[2], self.experts.shape[4]
        padding = heads * each - experts.shape[-1]
        x = jnp.pad(experts.astype(jnp.uint8), ((0, 0), (0, 0), (0, padding)))
        at = (layer, page[..., None], jnp.arange(heads), place[..., None])
        written = self.experts.at[at].set(x.reshape(*page.shape, heads, each))
        return self.replace(experts=written)  # type: ignore[attr-defined]

    def experts_of(self, pages: Int[Array, " M"], k: int) -> UInt8[Array, "tokens L k"]:
        """Returns the experts of the tokens in these pages, in order."""
        assert self.experts is not None
        found = jnp.moveaxis(self.experts[:, pages], (1, 3, 0), (0, 1, 2))  # (M, page, L, K, e)
        return found.reshape(-1, len(self.experts), found.shape[3] * found.shape[4])[..., :k]

    def read(self, *at: Any) -> tuple[Array, Array]:
        """Returns keys and values as floats; `at` indexes layers, pages, kv heads and tokens of a page."""
        held = jax.tree.map(lambda pages: pages[at], self.kv)
        return _floats(held.k, held.k_scale), _floats(held.v, held.v_scale)


def _held(x: Float[Array, "... h"], dtype: Any) -> tuple[Array, Array | None]:
    """Returns (`x` in the form that pages of `dtype` store, scale of int8 codes or None for other dtypes)."""
    if dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16), None
    if dtype != jnp.int8:
        return x.astype(dtype), None
    x = x.astype(jnp.float32)
    scale = jnp.abs(x).max(-1, keepdims=True) / 127
    return jnp.round(x / jnp.where(scale > 0, scale, 1.0)).astype(jnp.int8), scale


def _floats(held: Array, scale: Array | None) -> Array:
    """Returns the stored numbers as floats: int8 codes times `scale`; bfloat16 bits as float32 on a CPU."""
    if held.dtype == jnp.uint16:
        floats = jax.lax.bitcast_convert_type(held, jnp.bfloat16)
        return floats.astype(jnp.float32) if jax.default_backend() == "cpu" else floats
    return held if scale is None else held.astype(jnp.float32) * scale


PagedKernel = Callable[[Array, KVPages, Array, Array, Array], Array]
"""`kernel(q (N, C, H, h), cache, layer, table (N, M), lengths (N, C))` returns (N, C, H, h) float32: the
attention of each slot's queries over the slot's pages, each query over the first `lengths` tokens. Queries of
length 0 are padding, with undefined output.
"""
