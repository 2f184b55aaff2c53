"""Trees of parameters with adapters: splitting, joining, merging.

An adapter is the subtree `<matrix>_lora` beside a matrix of a block, {"a": (L, I..., r), "b": (L, r, O...)}
for L layers, input axes I, output axes O and rank r. It adds (alpha / rank) a b to the matrix (LoRA, Hu et
al., arXiv:2106.09685).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float

SUFFIX = "_lora"


def leaves_of(params: Any, sep: str | None = None) -> dict[Any, Any]:
    """Returns path -> leaf; a path is a tuple of names or, if `sep` is given, the names joined by `sep`."""
    return flatten_dict(params, sep=sep)


def adapters_of(params: Any) -> Any:
    """Returns only the adapters, nested as in `params`; subtrees without an adapter are left out."""
    flat = leaves_of(params)
    return unflatten_dict({path: leaf for path, leaf in flat.items() if _is_in_adapter(path)})


def base_of(params: Any) -> Any:
    """Returns the parameters without the adapters."""
    flat = leaves_of(params)
    return unflatten_dict({path: leaf for path, leaf in flat.items() if not _is_in_adapter(path)})


def _is_in_adapter(path: tuple[str, ...]) -> bool:
    return any(name.endswith(SUFFIX) for name in path)


def with_adapters(params: Any, adapters: Any) -> Any:
    """Returns a new tree of `params` with each adapter of `adapters` beside its matrix."""
    return unflatten_dict(leaves_of(params) | leaves_of(adapters))


def low_rank(a: Float[Array, "L ... r"], b: Float[Array, "L r ..."]) -> Float[Array, "L ..."]:
    """Returns the product a b of every layer, shaped like the adapted matrices, computed in full float32."""
    layers, rank = b.shape[:2]
    factors = a.reshape(layers, -1, rank), b.reshape(layers, rank, -1)
    product = jnp.matmul(*(x.astype(jnp.float32) for x in factors), precision=jax.lax.Precision.HIGHEST)
    return product.reshape(*a.shape[:-1], *b.shape[2:])


def merge_adapters(params: Any, scale: float) -> Any:
    """Returns the parameters without adapters; each matrix W with an adapter (a, b) becomes W + scale a b."""
    flat, merged = leaves_of(params), leaves_of(base_of(params))
    for path, matrix in merged.items():
        adapter = (*path[:-1], path[-1] + SUFFIX)
        if (*adapter, "a") in flat:
            merged[path] = matrix + scale * low_rank(flat[(*adapter, "a")], flat[(*adapter, "b")])
    return unflatten_dict(merged)
