"""Trees of parameters with adapters: taken apart, put together, merged.

An adapter is the subtree `<matrix>_lora` beside a matrix of a block, {"a": (L, I..., r), "b": (L, r, O...)},
and stands for (alpha / rank) a b added to it (LoRA, Hu et al., arXiv:2106.09685).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

SUFFIX = "_lora"


def adapters_of(params: Any) -> Any:
    """The adapters alone, in nested dicts as they lie in `params`."""
    if not isinstance(params, dict):
        return params
    parts = {
        name: child if name.endswith(SUFFIX) else adapters_of(child)
        for name, child in params.items()
        if isinstance(child, dict)
    }
    return {name: part for name, part in parts.items() if part}


def base_of(params: Any) -> Any:
    """All but the adapters."""
    if not isinstance(params, dict):
        return params
    return {name: base_of(child) for name, child in params.items() if not name.endswith(SUFFIX)}


def with_adapters(params: Any, adapters: Any) -> Any:
    """One tree of both; neither is changed."""
    both = {name: with_adapters(child, adapters[name]) for name, child in params.items() if name in adapters}
    return params | adapters | both


def low_rank(a: Float[Array, "L ... r"], b: Float[Array, "L r ..."]) -> Float[Array, "L ..."]:
    """a b of every layer, float32 and as exact as that is, in the shape of the matrices beside it."""
    layers, rank = b.shape[:2]
    factors = a.reshape(layers, -1, rank), b.reshape(layers, rank, -1)
    product = jnp.matmul(*(x.astype(jnp.float32) for x in factors), precision=jax.lax.Precision.HIGHEST)
    return product.reshape(*a.shape[:-1], *b.shape[2:])


def merge_adapters(params: Any, scale: float) -> Any:
    """The base with every W replaced by W + scale a b."""
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
