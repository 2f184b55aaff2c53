"""The in-memory store: versions only grow, nothing aliases the trainer, readers see whole versions."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from areal_jax.types import VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.memory import MemoryStore, VersionGoneError, WeightsError, load_latest

HERE = jax.tree.map(
    lambda spec: NamedSharding(Mesh(np.array(jax.devices()[:1]), ("tensor",)), spec),
    {"w": PartitionSpec(None, "tensor"), "b": PartitionSpec()},
)


def value(version: int, seed: int | None = None) -> VersionedParams:
    rng = np.random.default_rng(version if seed is None else seed)
    params = {"w": jnp.asarray(rng.normal(size=(8, 4)), jnp.float32), "b": jnp.full(4, float(version))}
    return VersionedParams(version, params, digest(params))


@jax.jit
def probe(params) -> jax.Array:
    return (params["w"].astype(jnp.float32) * 0.1).sum(axis=0)


@jax.jit
def probe_less(params) -> jax.Array:
    return probe(params) * 0.9


def pointers(params) -> list[int]:
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)]


def same(one, other) -> bool:
    return all(
        np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


# --- versions -----------------------------------------------------------------------------------------------


def test_what_is_published_is_what_is_loaded():
    store = MemoryStore(probe)
    assert store.latest() is None
    given = value(0)
    wire = store.publish(given)
    assert (wire.version, wire.digest) == (0, given.digest)
    assert store.latest() == 0
    loaded = store.load(0, HERE)
    assert (loaded.version, loaded.digest) == (0, given.digest)
    assert same(loaded.params, given.params)


def test_versions_only_grow():
    store = MemoryStore(probe)
    store.publish(value(3))
    with pytest.raises(WeightsError, match=r"version 2 .* cannot be published after version 3"):
        store.publish(value(2))
    with pytest.raises(WeightsError, match=r"version 3 .* versions only grow"):
        store.publish(value(3, seed=9))
    assert store.load(3, HERE).digest == value(3).digest
    store.publish(value(7))  # gaps are no business of the store's
    assert store.latest() == 7


def test_publishing_again_with_an_equal_digest_does_nothing():
    store = MemoryStore(probe)
    first = store.publish(value(1))
    heard = []
    again = store.publish(value(1), heard.append)
    assert again is first
    assert heard == []


def test_only_the_latest_version_is_kept():
    store = MemoryStore(probe)
    with pytest.raises(VersionGoneError, match="version 0 is not in the store, which holds None"):
        store.load(0, HERE)
    with pytest.raises(VersionGoneError, match="no version could be loaded"):
        load_latest(store, HERE)
    store.publish(value(0))
    store.publish(value(1))
    with pytest.raises(VersionGoneError, match="version 0 is not in the store, which holds 1"):
        store.load(0, HERE)


def test_load_latest_survives_a_publisher_that_is_faster():
    """Between `latest` and `load` the trainer may commit: the reader takes the newer one."""

    class Hasty(MemoryStore):
        def latest(self):
            found = super().latest()
            if found is not None and found < 3:
                self.publish(value(found + 1))
            return found

    store = Hasty(probe)
    store.publish(value(0))
    assert load_latest(store, HERE).version == 3


def test_what_before_commit_hears_no_reader_can_load_yet():
    store = MemoryStore(probe, "bfloat16")
    store.publish(value(0))
    heard = []

    def before_commit(wire: VersionedParams) -> None:
        heard.append((wire.version, wire.digest, store.latest()))

    published = store.publish(value(1), before_commit)
    assert heard == [(1, published.digest, 0)]
    assert store.latest() == 1


def test_a_version_that_could_not_be_recorded_is_not_committed():
    store = MemoryStore(probe)
    store.publish(value(0))

    def full(_: VersionedParams) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        store.publish(value(1), full)
    assert store.latest() == 0
    assert same(store.load(0, HERE).params, value(0).params)


# --- buffers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_published_parameters_survive_the_donation_of_their_source(dtype):
    store = MemoryStore(probe, dtype)
    given = value(0)
    source = given.params
    expected = jax.tree.map(lambda leaf: np.array(leaf.astype(dtype)), source)
    wire = store.publish(given)
    assert not set(pointers(wire.params)) & set(pointers(source))
    loaded = store.load(0, HERE)
    update = jax.jit(lambda params: jax.tree.map(lambda leaf: leaf * 0 - 1, params), donate_argnums=0)
    jax.block_until_ready(update(source))
    assert source["w"].is_deleted()
    assert same(loaded.params, expected)
    assert same(store.load(0, HERE).params, expected)


def test_bfloat16_on_the_wire_has_the_digest_of_the_cast():
    store = MemoryStore(probe, "bfloat16")
    given = value(0)
    wire = store.publish(given)
    cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), given.params)
    assert wire.digest == digest(cast) != given.digest
    loaded = store.load(0, HERE)
    assert loaded.digest == wire.digest
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded.params)} == {jnp.dtype("bfloat16")}
    assert same(loaded.params, cast)


def test_a_reader_on_other_devices_and_another_mesh_gets_the_same_bits():
    trainer = Mesh(np.array(jax.devices()[:2]), ("fsdp",))
    host = Mesh(np.array(jax.devices()[2:4]), ("tensor",))
    given = value(0)
    sharded = jax.device_put(given.params, NamedSharding(trainer, PartitionSpec("fsdp")))
    store = MemoryStore(probe)
    store.publish(given._replace(params=sharded))
    there = {
        "w": NamedSharding(host, PartitionSpec(None, "tensor")),
        "b": NamedSharding(host, PartitionSpec()),
    }
    loaded = store.load(0, there)
    assert loaded.params["w"].sharding.device_set == set(jax.devices()[2:4])
    assert loaded.digest == given.digest
    assert same(loaded.params, given.params)


def test_an_exclusive_store_overwrites_what_is_served():
    """One serving copy: the next version takes the buffers of the one before."""
    store = MemoryStore(probe, "bfloat16", is_exclusive=True)
    store.publish(value(0))
    for version in (1, 2, 3):
        served = store.load(version - 1, HERE).params
        buffers = pointers(served)
        given = value(version)
        store.publish(given)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(served))
        after = store.load(version, HERE)
        assert pointers(after.params) == buffers
        assert same(after.params, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), given.params))
        assert not given.params["w"].is_deleted()  # the trainer's own stay


def test_a_store_with_several_readers_overwrites_nothing():
    store = MemoryStore(probe)
    store.publish(value(0))
    served = store.load(0, HERE)
    store.publish(value(1))
    assert same(served.params, value(0).params)


def test_publishing_again_overwrites_nothing_in_an_exclusive_store_either():
    store = MemoryStore(probe, is_exclusive=True)
    store.publish(value(0))
    served = store.load(0, HERE)
    store.publish(value(0))
    assert same(served.params, value(0).params)


# --- checks at load -----------------------------------------------------------------------------------------


def test_a_digest_that_is_not_that_of_the_parameters_is_caught_at_load():
    store = MemoryStore(probe)
    store.publish(value(0)._replace(digest="0" * 16))
    with pytest.raises(
        WeightsError, match=f"published with digest {'0' * 16} and arrived with {value(0).digest}"
    ):
        store.load(0, HERE)


@pytest.mark.parametrize("factor", [0.9, float("nan")])
def test_a_reader_that_computes_something_else_is_caught_by_the_canary(factor):
    calls = []

    def lies_later(params) -> jax.Array:
        calls.append(params)
        return probe(params) * (1.0 if len(calls) == 1 else factor)

    store = MemoryStore(lies_later)
    store.publish(value(0))
    with pytest.raises(WeightsError, match="canary's log-prob under version 0 differs by"):
        store.load(0, HERE)


# --- threads ------------------------------------------------------------------------------------------------


def test_concurrent_readers_never_see_half_a_version():
    """Every load is one published version, whole, with its digest; none is older than the one before."""
    values = [value(version) for version in range(12)]
    digests = {v.version: v.digest for v in values}
    store = MemoryStore(probe)
    store.publish(values[0])
    problems, seen = [], [0, 0]

    def read(who: int) -> None:
        while seen[who] < 11:
            loaded = load_latest(store, HERE)
            marks = set(np.asarray(loaded.params["b"]).tolist())
            if marks != {float(loaded.version)} or loaded.digest != digests[loaded.version]:
                problems.append(loaded.version)
            if loaded.version < seen[who]:
                problems.append((seen[who], loaded.version))
            seen[who] = loaded.version

    readers = [threading.Thread(target=read, args=(who,), daemon=True) for who in range(2)]
    for reader in readers:
        reader.start()
    for one in values[1:]:
        store.publish(one)
    for reader in readers:
        reader.join(30)
    assert seen == [11, 11]
    assert problems == []
