"""A digest of a parameter tree that does not depend on how it is sharded, computed where the parameters are.

Per leaf: the sum over its elements of mix(bits xor mix(global index)) mod 2^32. `mix` is a bijection, so one
changed element always changes the sum; it is not linear, so elements that change places do too but for one
chance in 2^32. The leaves' sums, their names, shapes and dtypes are hashed into 16 hex digits.
"""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def digest(params: Any) -> str:
    """16 hex digits of the tree's names, shapes, dtypes and bits."""
    return combine(leaf_digests(params))


def leaf_digests(params: Any) -> dict[str, str]:
    """Each leaf's own digest by path, `dtype[shape]:sum`; what a checkpoint's manifest holds."""
    sums = np.asarray(_sums(jax.tree.leaves(params)))
    named = jax.tree_util.tree_leaves_with_path(params)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): f"{leaf.dtype}{list(leaf.shape)}:{total:08x}"
        for (path, leaf), total in zip(named, sums, strict=True)
    }


def combine(leaves: dict[str, str]) -> str:
    text = "\n".join(f"{name}={value}" for name, value in sorted(leaves.items()))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@jax.jit
def _sums(leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack([_sum(leaf) for leaf in leaves])


def _sum(leaf: jax.Array) -> jax.Array:
    width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(leaf, width).astype(jnp.uint32)
    index = jnp.zeros(leaf.shape, jnp.uint32)
    for axis, size in enumerate(leaf.shape):  # the row-major index, whatever the sharding
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
    return jnp.sum(_mix(bits ^ _mix(index)), dtype=jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    """MurmurHash3's finaliser (A. Appleby): a bijection of uint32 in which every bit moves all others."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
