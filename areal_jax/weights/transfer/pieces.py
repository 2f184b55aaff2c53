"""How an array is split into pieces on one mesh, and assembled on another.

A box is a piece's position in its array: one (start, stop) per axis.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

Box = tuple[tuple[int, int], ...]
Device = Any
"""A jax.Device, one of the devices that hold a part of an array."""


def own_pieces(array: jax.Array) -> list[tuple[Box, jax.Array]]:
    """Returns (box, data) for each piece of `array` that this process owns; box: the piece's position.

    Exactly one process owns a piece, even if several processes hold copies of its data.
    """
    # Replicas hold the same bits: only the first one of each box counts, in whichever process it is.
    return [
        (_box(shard.index, array.shape), shard.data)
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]


def places(sharding: Sharding, shape: tuple[int, ...]) -> dict[Device, Box]:
    """Returns device -> position (box) of the part of an array that the device holds.

    The array has the given sharding and shape. Only devices of this process are listed.
    """
    found = sharding.addressable_devices_indices_map(shape)
    return {device: _box(index, shape) for device, index in found.items() if index is not None}


def size_of(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def are_whole(boxes: Iterable[Box], shape: Sequence[int]) -> bool:
    """Whether pieces with these boxes, which must not overlap, cover an array of this shape completely."""
    return sum(map(size_of, boxes)) == math.prod(shape)


def landing(box: Box, wanted: Mapping[Device, Box]) -> Device:
    """Returns the device onto which the piece at position `box` is pulled: the one that needs most of it.

    `wanted`: device -> position (box) of the part of the array that the device needs. If several devices need
    equally much of the piece, the device with the smallest part is returned.
    """
    return max(wanted, key=lambda device: (_overlap(box, wanted[device]), -size_of(wanted[device])))


def assemble(
    shape: tuple[int, ...],
    dtype: Any,
    sharding: Sharding,
    pieces: Sequence[tuple[Box, jax.Array]],
) -> jax.Array:
    """Returns the array laid out by `sharding`, made of pieces (box, data) on any devices of this process.

    A piece is used without a copy if it lies on the device that needs it and has exactly that device's box.
    """
    shards = [_shard(box, device, dtype, pieces) for device, box in places(sharding, shape).items()]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _shard(box: Box, device: Device, dtype: Any, pieces: Sequence[tuple[Box, jax.Array]]) -> jax.Array:
    # The usual case costs no program and no copy: a piece that is exactly this device's part.
    for there, piece in pieces:
        if there == box:
            return jax.device_put(piece, device)
    sizes = tuple(stop - start for start, stop in box)
    whole = jnp.zeros(sizes, dtype, device=device)
    for there, piece in pieces:
        if (common := _common(there, box)) is not None:
            extent = tuple(stop - start for start, stop in common)
            part = piece if common == there else cut(piece, _from(common, there), extent)
            whole = _lay(whole, jax.device_put(part, device), _from(common, box))
    return whole


@functools.partial(jax.jit, static_argnames="sizes")
def cut(piece: jax.Array, at: list[int], sizes: tuple[int, ...]) -> jax.Array:
    """Returns the part of `piece` with these `sizes` that starts at the indices `at`, one per axis."""
    return jax.lax.dynamic_slice(piece, at, sizes)


@functools.partial(jax.jit, donate_argnums=0)
def _lay(whole: jax.Array, part: jax.Array, at: list[int]) -> jax.Array:
    return jax.lax.dynamic_update_slice(whole, part, at)


def _from(inner: Box, outer: Box) -> list[int]:
    return [start - origin for (start, _), (origin, _) in zip(inner, outer, strict=True)]


def _common(one: Box, other: Box) -> Box | None:
    box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return box if all(start < stop for start, stop in box) else None


def _overlap(one: Box, other: Box) -> int:
    common = _common(one, other)
    return size_of(common) if common is not None else 0


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
