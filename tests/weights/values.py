"""Versions small enough to publish by the dozen, and a stand-in for the engine's canary."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from areal_jax.types import PolicyVersion, VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.errors import WeightsError
from areal_jax.weights.publishing import PublisherSettings
from areal_jax.weights.store import ParamReader, Probe, load_newer
from areal_jax.weights.transfer.publisher import TransferStore
from areal_jax.weights.transfer.reader import TransferReader
from tests.hangs import HANG_S

DEADLINE_S = HANG_S

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


@Probe
@jax.jit
def probe(params) -> jax.Array:
    return (params["w"].astype(jnp.float32) * 0.1).sum(axis=0)


class Transferred:
    """A TransferStore and a reader of it, as one store: `wait` is until the reader has heard."""

    def __init__(self, probe: Probe = probe, dtype: str = "float32") -> None:
        self.store = TransferStore(PublisherSettings(probe, dtype, DEADLINE_S))
        self.reader = TransferReader(self.store.address, probe, DEADLINE_S)
        self.publish, self.load = self.store.publish, self.reader.load

    def wait(self, deadline_s: float) -> None:
        self.store.wait(deadline_s)
        wait_for(lambda: self.reader.latest() == self.store.latest(), deadline_s)

    def latest(self) -> PolicyVersion | None:
        return self.reader.latest()

    def close(self, deadline_s: float = DEADLINE_S) -> None:
        self.reader.close()
        with suppress(WeightsError):  # the test's own
            self.store.close(deadline_s)


def wait_for(is_so: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    end_s = time.monotonic() + deadline_s
    while not is_so():
        assert time.monotonic() < end_s, "it did not come"
        time.sleep(0.001)


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
