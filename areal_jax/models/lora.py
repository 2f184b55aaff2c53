"""Trees of parameters with adapters: splitting, joining, merging.

An adapter is the subtree `<matrix>_lora` beside a matrix of a block, {"a": (L, I..., r), "b": (L, r, O...)}
for L layers, input axes I, output axes O and rank r. It adds (alpha / rank) a b to the matrix (LoRA, Hu et
al., arXiv:2106.09685).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

SUFFIX = "_lora"


def adapters_of(params: Any) -> Any:
    """Returns only the adapters, nested as in `params`; subtrees without an adapter are left out."""
    if not isinstance(params, dict):
        return params
    parts = {
        name: child if name.endswith(SUFFIX) else adapters_of(child)
        for name, child in params.items()
        if isinstance(child, dict)
    }
    return {name: part for name, part in parts.items() if part}


def base_of(params: Any) -> Any:
    """Returns the parameters without the adapters."""
    if not isinstance(params, dict):
        return params
    return {name: base_of(child) for name, child in params.items() if not name.endswith(SUFFIX)}


def with_adapters(params: Any, adapters: Any) -> Any:
    """Returns a new tree of `params` with each adapter of `adapters` beside its matrix."""
    both = {name: with_adapters(child, adapters[name]) for name, child in params.items() if name in adapters}
    return params | adapters | both


def low_rank(a: Float[Array, "L ... r"], b: Float[Array, "L r ..."]) -> Float[Array, "L ..."]:
    """Returns the product a b of every layer, shaped like the adapted matrices, computed in full float32."""
    layers, rank = b.shape[:2]
    factors = a.reshape(layers, -1, rank), b.reshape(layers, rank, -1)
    product = jnp.matmul(*(x.astype(jnp.float32) for x in factors), precision=jax.lax.Precision.HIGHEST)
    return product.reshape(*a.shape[:-1], *b.shape[2:])


def merge_adapters(params: Any, scale: float) -> Any:
    """Returns the parameters without adapters; each matrix W with an adapter (a, b) becomes W + scale a b."""
    if not isinstance(params, dict):
        return params
    merged = {}
    for name, child in params.items():
        if name.endswith(SUFFIX):
            continue
        adapter = params.get(name + SUFFIX)
        merged[name] = (
            merge_adapters(child, scale) if adapter is None else child + scale * low_rank(**adapter)
        )
    return merged
