"""Versions small enough to publish by the dozen, and a stand-in for the engine's canary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from areal_jax.types import VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.store import ParamReader, load_newer

DEADLINE_S = 30.0

SPECS = {"w": PartitionSpec(None, "tensor"), "b": PartitionSpec()}


def on(*devices: int) -> dict[str, NamedSharding]:
    mesh = Mesh(np.array([jax.devices()[i] for i in devices]), ("tensor",))
    return {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}


HERE = on(0)
"""Where the publisher's parameters lie."""

THERE = on(2, 3)
"""A reader's two devices."""


def value(version: int, seed: int | None = None) -> VersionedParams:
    rng = np.random.default_rng(version if seed is None else seed)
    params = {"w": jnp.asarray(rng.normal(size=(8, 4)), jnp.float32), "b": jnp.full(4, float(version))}
    return VersionedParams(version, params, digest(params))


@jax.jit
def probe(params) -> jax.Array:
    return (params["w"].astype(jnp.float32) * 0.1).sum(axis=0)


def newest(store: ParamReader, shardings) -> VersionedParams:
    """The newest version that can be loaded; there is one."""
    found = load_newer(store, shardings)
    assert found is not None
    return found


def pointers(params) -> list[int]:
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)]


def same(one, other) -> bool:
    return all(
        np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )
