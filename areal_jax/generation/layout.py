"""How parameters and pages lie while a host decodes: in the form that its device reads fastest.

On a CPU, XLA copies a layer's slice of stacked bfloat16 weights, and gathers bfloat16 pages, element by
element: there weights are held as their bits, which are copied as memory, and pages in float32. Elsewhere
they lie as they are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from areal_jax.models.model import Model, Params


def serving_layout(model: Model, params: Params, platform: str) -> Params:
    """The parameters for decoding on `platform`; on a CPU, stacked bfloat16 matrices as uint16 bits."""
    if platform != "cpu" or all(leaf.dtype != jnp.bfloat16 for leaf in jax.tree.leaves(params)):
        return params
    axes = jax.tree.leaves(model.logical_axes, is_leaf=lambda names: isinstance(names, jax.P))
    leaves, tree = jax.tree.flatten(params)
    return tree.unflatten(
        _bits(leaf)
        if leaf.dtype == jnp.bfloat16 and leaf.ndim > 2 and {"layers", "embed"} <= set(names)
        else leaf
        for leaf, names in zip(leaves, axes, strict=True)
    )


def pages_dtype(dtype: str, platform: str) -> str:
    """What KV pages of a model that computes in `dtype` are held in."""
    return "float32" if platform == "cpu" else dtype


@jax.jit
def _bits(leaf: jax.Array) -> Any:
    return jax.lax.bitcast_convert_type(leaf, jnp.uint16)
