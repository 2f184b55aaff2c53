"""A digest of a parameter tree that does not depend on how it is sharded, computed where the parameters are.

Per leaf: the sum over its elements of mix(bits xor mix(global index)) mod 2^32. `mix` is a bijection, so one
changed element always changes the sum; it is not linear, so elements that change places do too but for one
chance in 2^32. The leaves' sums, their names, shapes and dtypes are hashed into 16 hex digits.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROWS = 64
"""Most rows of a matrix that make a slice on a CPU."""


def digest(params: Any) -> str:
    """16 hex digits of the tree's names, shapes, dtypes and bits."""
    return combine(leaf_digests(params))


def leaf_digests(params: Any) -> dict[str, str]:
    """Each leaf's own digest by path, `dtype[shape]:sum`; what a manifest holds."""
    return name_sums(params, leaf_sums(params))


def leaf_sums(params: Any) -> jax.Array:
    """The leaves' sums, uint32, in the tree's order; on their way when this returns."""
    return _sums(jax.tree.leaves(params))


def name_sums(params: Any, sums: jax.Array) -> dict[str, str]:
    """`leaf_digests` of sums that `leaf_sums` gave for these leaves, or for others with the same bits."""
    named = jax.tree_util.tree_leaves_with_path(params)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): f"{leaf.dtype}{list(leaf.shape)}:{total:08x}"
        for (path, leaf), total in zip(named, np.asarray(sums), strict=True)
    }


def combine(leaves: dict[str, str]) -> str:
    text = "\n".join(f"{name}={value}" for name, value in sorted(leaves.items()))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@jax.jit
def _sums(leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack([_sum(on_device(leaf)) for leaf in leaves])


def on_device(leaf: jax.Array) -> jax.Array:
    """Inside jit: the leaf in the device's memory, wherever it lies."""
    if jax.typeof(leaf).memory_space == jax.memory.Space.Device:
        return leaf
    return jax.device_put(leaf, jax.memory.Space.Device)


def _sum(leaf: jax.Array) -> jax.Array:
    return jax.lax.platform_dependent(leaf, cpu=_sum_by_slices, default=_sum_at_once)


def _sum_at_once(leaf: jax.Array) -> jax.Array:
    places = (jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) for axis in range(leaf.ndim))
    return jnp.sum(_contributions(leaf, leaf.shape, *places), dtype=jnp.uint32)


def _sum_by_slices(leaf: jax.Array) -> jax.Array:
    """The same sum, added up elementwise over slices of an axis that no mesh shards: the layers, or
    neighbouring rows of a matrix. XLA's CPU backend reduces integers to a scalar on one core, unvectorised.
    """
    axis = 0
    if leaf.ndim == 2:
        rows = math.gcd(leaf.shape[0], ROWS)
        leaf, axis = leaf.reshape(leaf.shape[0] // rows, rows, leaf.shape[1]), 1
    if leaf.ndim < 3:
        return _sum_at_once(leaf)
    shape = leaf.shape[:axis] + leaf.shape[axis + 1 :]

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_index_in_dim(leaf, i, axis, keepdims=False)
        places = [jax.lax.broadcasted_iota(jnp.uint32, shape, other) for other in range(len(shape))]
        places.insert(axis, i.astype(jnp.uint32))
        return total + _contributions(part, leaf.shape, *places)

    sums = jax.lax.fori_loop(0, leaf.shape[axis], add, jnp.zeros(shape, jnp.uint32))
    return jnp.sum(sums, dtype=jnp.uint32)


def _contributions(part: jax.Array, shape: tuple[int, ...], *places: jax.Array) -> jax.Array:
    """Of each element of `part`, which stands at `places` in a leaf of `shape`, whatever the sharding."""
    width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[part.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(part, width).astype(jnp.uint32)
    index = jnp.uint32(0)
    for place, size in zip(places, shape, strict=True):
        index = index * jnp.uint32(size) + place
    return _mix(bits ^ _mix(index))


def _mix(x: jax.Array) -> jax.Array:
    """MurmurHash3's finaliser (A. Appleby): a bijection of uint32 in which every bit moves all others."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
