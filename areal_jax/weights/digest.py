"""A digest of a parameter tree that does not depend on its sharding, computed on the parameters' devices.

A leaf's checksum is the sum, mod 2^32, of mix(bits xor mix(index in the leaf)) over the leaf's elements.
`mix` is a bijection, so one changed element always changes the checksum. `mix` is not linear, so exchanging
two elements changes the checksum too, except with probability 2^-32. The digest is a hash, of 16 hex digits,
of the leaves' checksums, names, shapes and dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from areal_jax.weights.manifest import combine

ROWS = 64
"""Largest number of slices into which `_sum_by_slices` splits a matrix."""


def digest(params: Any) -> str:
    """Returns a hash of the tree's leaf names, shapes, dtypes and bits, as 16 hex digits."""
    return combine(leaf_digests(params))


def leaf_digests(params: Any) -> dict[str, str]:
    """Returns leaf path -> digest of the leaf: the text `dtype[shape]:sum`, with the checksum in hex."""
    return name_sums(params, leaf_sums(params))


def leaf_sums(params: Any) -> jax.Array:
    """Returns the checksum of each leaf, uint32, in tree order; the devices may still be computing them.

    Waits for them if the leaves are on several meshes.
    """
    leaves = jax.tree.leaves(params)
    groups = _by_devices(leaves)
    if len(groups) < 2:
        return _sums(leaves)
    sums = np.zeros(len(leaves), np.uint32)
    for places in groups:
        sums[places] = _sums([leaves[place] for place in places])
    return jnp.asarray(sums)


def _by_devices(leaves: Sequence[Any]) -> list[list[int]]:
    """Returns the indices of the leaves, grouped by devices: one program takes arrays of one mesh only."""
    groups: dict[Any, list[int]] = {}
    for place, leaf in enumerate(leaves):
        is_there = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
        groups.setdefault(frozenset(leaf.sharding.device_set) if is_there else None, []).append(place)
    return list(groups.values())


def name_sums(params: Any, sums: jax.Array) -> dict[str, str]:
    """Returns `leaf_digests(params)` from `sums`, which `leaf_sums` returned for these or equal params."""
    return {
        name: f"{leaf.dtype}{list(leaf.shape)}:{total:08x}"
        for (name, leaf), total in zip(to_plain(params).items(), np.asarray(sums), strict=True)
    }


def to_plain(tree: Any) -> dict[str, Any]:
    """Returns the tree as a flat dict, leaf path -> leaf, as versions are stored: any tool can read it."""
    named = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in named}


@jax.jit
def _sums(leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack([_sum(on_device(leaf)) for leaf in leaves])


def on_device(leaf: jax.Array) -> jax.Array:
    """Inside jit: returns the leaf in device memory; moves it there if it is in host memory."""
    if jax.typeof(leaf).memory_space == jax.memory.Space.Device:
        return leaf
    return jax.device_put(leaf, jax.memory.Space.Device)


def _sum(leaf: jax.Array) -> jax.Array:
    # Addition modulo 2^32 is exact in any order, so both functions, and every sharding, give the same sum.
    return jax.lax.platform_dependent(leaf, cpu=_sum_by_slices, default=_sum_at_once)


def _sum_at_once(leaf: jax.Array) -> jax.Array:
    places = (jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) for axis in range(leaf.ndim))
    return jnp.sum(_contributions(leaf, leaf.shape, *places), dtype=jnp.uint32)


def _sum_by_slices(leaf: jax.Array) -> jax.Array:
    """Returns the same checksum as `_sum_at_once`, faster on a CPU: it adds slices of the leaf elementwise.

    The slices are taken along an axis that no mesh shards: the layers of a stacked leaf, or up to ROWS
    neighbouring rows of a matrix. Without slices, XLA's CPU backend would add all integers on one core, one
    by one.
    """
    axis = 0
    if leaf.ndim == 2:
        # A divisor of the number of rows: the matrix splits into groups of so many neighbouring rows.
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
    """Returns what each element of `part`, a part of a leaf, adds to the leaf's checksum.

    `shape`: the shape of the whole leaf. `places`: for each axis of the leaf, the elements' indices along
    that axis.
    """
    width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[part.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(part, width).astype(jnp.uint32)
    # The index in the whole array: without it, elements that swap places would not change the sum. It wraps
    # in leaves of more than 2^32 elements: two elements exactly that far apart share an index.
    index = jnp.uint32(0)
    for place, size in zip(places, shape, strict=True):
        index = index * jnp.uint32(size) + place
    return _mix(bits ^ _mix(index))


def _mix(x: jax.Array) -> jax.Array:
    """MurmurHash3's finaliser (A. Appleby): a bijection of uint32 in which every bit affects all others."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
