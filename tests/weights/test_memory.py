"""The in-memory store alone: what it shares with its readers, what it overwrites, what it need not check."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp

from areal_jax.weights.memory import MemoryStore
from areal_jax.weights.store import Probe
from tests.weights.values import HERE, THERE, pointers, probe, same, value


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


def test_publishing_again_overwrites_nothing_in_an_exclusive_store_either():
    store = MemoryStore(probe, is_exclusive=True)
    store.publish(value(0))
    served = store.load(0, HERE)
    store.publish(value(0))
    assert same(served.params, value(0).params)


def test_a_reader_where_the_parameters_lie_gets_the_published_arrays():
    """The very same buffers: no digest, no canary, no copy; on other devices both are checked."""
    calls = []

    def counted(params) -> jax.Array:
        calls.append(params)
        return probe(params)

    store = MemoryStore(Probe(counted))
    wire = store.publish(value(0))
    assert pointers(store.load(0, HERE).params) == pointers(wire.params)
    assert calls == []
    store.load(0, THERE)
    store.load(0, THERE)
    assert len(calls) == 3  # the publisher's once, the reader's at each adoption


def test_a_sharded_trainers_canary_is_computed_while_it_publishes():
    """A reader's thread would start its collectives beside those of the trainer's next update."""
    computed: list[tuple[int, int]] = []

    def counted(params) -> jax.Array:
        computed.append((len(params["w"].sharding.device_set), threading.get_ident()))
        return probe(params)

    store, given = MemoryStore(Probe(counted)), value(0)
    publishing = threading.Thread(
        target=lambda: store.publish(given._replace(params=jax.device_put(given.params, THERE)))
    )
    publishing.start()
    ident = publishing.ident
    publishing.join()
    store.load(0, HERE)
    assert computed == [(2, ident), (1, threading.get_ident())]
