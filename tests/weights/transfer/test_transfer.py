"""From device to device: changed leaves alone, each proved, and nobody waits for anybody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from areal_jax.types import VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.errors import PublisherLostError, VersionDamagedError, VersionGoneError, WeightsError
from areal_jax.weights.publishing import PublisherSettings
from areal_jax.weights.store import Probe, load_newer
from areal_jax.weights.transfer import pulling
from areal_jax.weights.transfer.arrays import Incoming, start_server
from areal_jax.weights.transfer.channel import Channel, ChannelError
from areal_jax.weights.transfer.publisher import TransferStore
from areal_jax.weights.transfer.pulling import Pull
from areal_jax.weights.transfer.reader import TransferReader
from areal_jax.weights.writer import OnFailure
from tests.hangs import ends
from tests.weights.values import DEADLINE_S, HERE, THERE, newest, pointers, probe, same, value, wait_for

W_BYTES = 8 * 4 * 4


@pytest.fixture
def make() -> Iterator[Callable[..., Any]]:
    """`make(publisher or TransferReader, ...)`: closed in the end."""
    made = []

    def one(kind: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        made.append(kind(*args, **{"deadline_s": DEADLINE_S, **settings}))
        return made[-1]

    yield one
    for each in reversed(made):
        each.close() if isinstance(each, TransferReader) else each.close(DEADLINE_S)


def publisher(
    probe: Probe, deadline_s: float, on_failure: OnFailure | None = None, **rest: Any
) -> TransferStore:
    settings = PublisherSettings(probe, deadline_s=deadline_s, on_failure=on_failure)
    return TransferStore(settings, **rest)


def publish(store: TransferStore, *values: VersionedParams) -> None:
    for one in values:
        store.publish(one)
    store.wait(DEADLINE_S)


def reader_of(make: Callable[..., Any], store: TransferStore, **settings: Any) -> TransferReader:
    reader = make(TransferReader, store.address, probe, **settings)
    wait_for(lambda: reader.latest() == store.latest())
    return reader


def next_version(before: VersionedParams, **changed: Any) -> VersionedParams:
    params = {**before.params, **changed}
    return VersionedParams(before.version + 1, params, digest(params))


# --- what travels -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("onto", [HERE, THERE], ids=["one device", "two"])
def test_leaves_that_did_not_change_stay_where_they_are(make, onto):
    store = make(publisher, probe)
    publish(store, value(0))
    reader = reader_of(make, store)
    first = reader.load(0, onto)
    assert reader.pulled_bytes == W_BYTES + 16
    given = next_version(value(0), b=jnp.full(4, 7.0))
    publish(store, given)
    wait_for(lambda: reader.latest() == 1)
    second = reader.load(1, onto)
    assert reader.pulled_bytes == W_BYTES + 16 + 16
    assert same(second.params, given.params) and second.digest == given.digest
    shards = [leaf.addressable_shards for leaf in (first.params["w"], second.params["w"])]
    assert pointers([s.data for s in shards[0]]) == pointers([s.data for s in shards[1]])
    assert second.params["w"].sharding == onto["w"]


def test_a_leaf_that_its_holder_gave_away_is_pulled_again(make):
    store = make(publisher, probe)
    publish(store, value(0))
    reader = reader_of(make, store)
    first = reader.load(0, HERE)
    first.params["w"].delete()
    publish(store, next_version(value(0), b=jnp.full(4, 7.0)))
    wait_for(lambda: reader.latest() == 1)
    assert same(reader.load(1, HERE).params, {"w": value(0).params["w"], "b": jnp.full(4, 7.0)})
    assert reader.pulled_bytes == 2 * (W_BYTES + 16)


def test_what_stays_the_same_is_held_for_a_host_that_holds_it_not(make):
    """A host that decodes with another layout drops what it loaded: frozen leaves travel twice in all."""
    store = make(publisher, probe)
    publish(store, value(0))
    reader = reader_of(make, store)
    travelled = []
    for version in range(4):
        before = reader.pulled_bytes
        if version:
            publish(
                store,
                VersionedParams(
                    version, p := {**value(0).params, "b": jnp.full(4, 7.0 + version)}, digest(p)
                ),
            )
        wait_for(lambda version=version: reader.latest() == version)
        reader.load(version, HERE)  # and let go at once
        travelled.append(reader.pulled_bytes - before)
    assert travelled == [W_BYTES + 16, W_BYTES + 16, 16, 16]


def test_empty_leaves_and_scalars_travel_too(make):
    params = {
        "w": value(0).params["w"],
        "b": jnp.zeros((0, 4)),
        "c": jnp.float32(2.5),
        "d": jnp.ones(3, jnp.int8),
    }
    given = VersionedParams(0, params, digest(params))
    store = make(publisher, probe)
    publish(store, given)
    loaded = reader_of(make, store).load(0, jax.tree.map(lambda _: HERE["b"], params))
    assert same(loaded.params, params)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), loaded.params) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), params
    )


def test_several_readers_at_once_each_on_its_own_devices(make):
    store = make(publisher, probe)
    readers = [make(TransferReader, store.address, probe) for _ in range(3)]
    found: dict[int, list[VersionedParams]] = {i: [] for i in range(3)}

    def follow(i: int) -> None:
        onto = [HERE, THERE, HERE][i]
        while not found[i] or found[i][-1].version < 8:
            if (newer := load_newer(readers[i], onto, found[i][-1].version if found[i] else -1)) is not None:
                found[i].append(newer)

    threads = [threading.Thread(target=follow, args=(i,), daemon=True) for i in found]
    for thread in threads:
        thread.start()
    for version in range(9):
        publish(store, value(version))
    for thread in threads:
        thread.join(DEADLINE_S)
    for versions in found.values():
        assert [one.version for one in versions] == sorted({one.version for one in versions})
        assert versions[-1].version == 8
        assert all(same(one.params, value(one.version).params) for one in versions)


# --- proof --------------------------------------------------------------------------------------------------


@pytest.fixture
def flipped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """While it holds anything, one bit of each w that arrives is another."""
    assemble, when = pulling.assemble, [1]

    def flip(shape, dtype, sharding, pieces):
        whole = assemble(shape, dtype, sharding, pieces)
        if not when or len(shape) != 2:
            return whole
        bits = jax.lax.bitcast_convert_type(whole, jnp.uint32).at[3, 1].set(whole.view(jnp.uint32)[3, 1] ^ 4)
        return jax.device_put(jax.lax.bitcast_convert_type(bits, dtype), sharding)

    monkeypatch.setattr(pulling, "assemble", flip)
    return when


def test_a_flipped_bit_is_refused_by_leaf_and_version(make, flipped):
    store = make(publisher, probe)
    publish(store, value(0))
    reader = reader_of(make, store)
    with pytest.raises(
        VersionDamagedError, match=r"version 0 was damaged .* leaf w has digest float32\[8, 4\]"
    ):
        reader.load(0, HERE)
    assert reader.latest() is None and load_newer(reader, HERE) is None
    flipped.clear()
    publish(store, value(1))
    wait_for(lambda: reader.latest() == 1)
    assert same(reader.load(1, HERE).params, value(1).params)


def test_a_damaged_version_leaves_the_one_before_in_force(make, flipped, caplog):
    flipped.clear()
    store = make(publisher, probe)
    publish(store, value(0))
    reader = reader_of(make, store)
    reader.load(0, HERE)
    flipped.append(1)
    publish(store, value(1))
    wait_for(lambda: reader.latest() == 1)
    assert load_newer(reader, HERE, than=0) is None
    assert "version 1 was damaged" in caplog.text and reader.latest() is None


def test_a_reader_that_computes_something_else_refuses_at_load(make):
    factor = [1.0]
    store = make(publisher, probe)
    publish(store, value(0))
    reader = make(TransferReader, store.address, Probe(lambda params: probe(params) * factor[0]))
    newest_of = lambda: load_newer(reader, THERE)  # noqa: E731
    wait_for(lambda: reader.latest() == 0)
    assert newest_of() is not None
    factor[0] = 1.2
    publish(store, value(1))
    wait_for(lambda: reader.latest() == 1)
    with pytest.raises(WeightsError, match="canary's log-prob under version 1 differs by"):
        reader.load(1, THERE)


def test_another_models_tree_is_refused(make):
    store = make(publisher, Probe(lambda params: jnp.zeros(1)))
    params = {"w": jnp.zeros((8, 4)), "other": jnp.zeros(4)}
    publish(store, VersionedParams(0, params, digest(params)))
    reader = reader_of(make, store)
    with pytest.raises(
        VersionDamagedError, match="other parameters than this reader's model: b, other are in only one"
    ):
        reader.load(0, HERE)


# --- publishers and readers that come and go ----------------------------------------------------------------


def test_a_version_that_is_pruned_while_it_is_pulled(make, monkeypatch):
    """While another reader pulls an older one, the reader hears so, and takes the next; else it goes on."""
    start = Pull._start

    def slow(self, *args):
        monkeypatch.setattr(Pull, "_start", start)
        publish(store, value(self.version + 1))
        return start(self, *args)

    store = make(publisher, probe)
    publish(store, value(0))
    reader = reader_of(make, store)
    monkeypatch.setattr(Pull, "_start", slow)
    assert same(reader.load(0, HERE).params, value(0).params)
    with pytest.raises(VersionGoneError):
        Pull(store.address, None, 0, DEADLINE_S)  # no reader holds version 0 any more

    with closing(Pull(store.address, None, 1, DEADLINE_S)):
        publish(store, value(2))
        wait_for(lambda: reader.latest() == 2)
        monkeypatch.setattr(Pull, "_start", slow)
        with pytest.raises(VersionGoneError, match="version 2 is not in the store; the newest there is 3"):
            reader.load(2, HERE)
        wait_for(lambda: reader.latest() == 3)
        assert newest(reader, HERE).version == 3


def test_a_slow_reader_holds_neither_the_publisher_nor_its_memory(make):
    """It was granted a pull and does not pull; versions go on, and what it may still pull is one portion."""
    store = make(publisher, probe)
    publish(store, value(0))
    with closing(Channel(store.address, None, DEADLINE_S)) as slow:
        address = slow.ask({"ask": "describe", "version": 0, "wait_s": 0.0})["transfer"]
        number = slow.ask({"ask": "pull", "leaves": ["w"]})["number"]
        publish(store, *(value(version) for version in range(1, 6)))
        assert store.latest() == 5 and set(store._versions) == {0, 5}
        server = start_server("127.0.0.1")
        link = server.connect(address)
        like = [jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=SingleDeviceSharding(jax.devices()[1]))]
        assert same(link.pull(number, like), [value(0).params["w"]])
        abandoned = slow.ask({"ask": "pull", "leaves": ["w"]})["number"]
    wait_for(lambda: set(store._versions) == {5})
    with pytest.raises(jax.errors.JaxRuntimeError):
        jax.block_until_ready(link.pull(abandoned, like))


def test_a_publisher_that_is_gone_leaves_what_is_in_force(make, caplog):
    store = make(publisher, probe)
    publish(store, value(0))
    reader, late = reader_of(make, store), reader_of(make, store)
    loaded = reader.load(0, THERE)
    store.close(DEADLINE_S)
    wait_for(lambda: reader.trouble is not None)
    assert store.address in str(reader.trouble)
    assert reader.latest() is None and load_newer(reader, THERE, than=0) is None
    assert same(loaded.params, value(0).params)
    wait_for(lambda: late.latest() is None)
    with pytest.raises(PublisherLostError, match=rf"version 0 could not be pulled from {store.address}"):
        late.load(0, THERE)


def test_a_reader_follows_a_publisher_that_moved(make):
    first, second = make(publisher, probe), make(publisher, probe)
    publish(first, value(0))
    reader = reader_of(make, first)
    reader.load(0, HERE)
    publish(first, value(1, seed=9))
    wait_for(lambda: reader.latest() == 1)
    first.close(DEADLINE_S)
    publish(second, value(0))
    reader.move_to(second.address)
    wait_for(lambda: reader.latest() == 0)  # the former publisher's 1 is forgotten
    publish(second, value(1))
    wait_for(lambda: reader.latest() == 1)
    assert same(reader.load(1, HERE).params, value(1).params)
    assert reader.trouble is None


def test_a_publisher_that_hangs_is_given_up_at_the_deadline(make, monkeypatch):
    """It grants the pull and never serves it."""
    store = make(publisher, probe)
    publish(store, value(0))
    reader = reader_of(make, store, deadline_s=1.0)
    ask, pull, waited_for = Pull._ask, Incoming.pull, []

    def noted(self, *request):
        waited_for[:] = pull(self, *request)
        return list(waited_for)

    other_number = lambda self, channel, **request: ask(self, channel, **request) | {"number": 12345}  # noqa: E731
    monkeypatch.setattr(Pull, "_ask", other_number)
    monkeypatch.setattr(Incoming, "pull", noted)
    started = time.monotonic()
    with pytest.raises(PublisherLostError, match=r"version 0 could not be pulled .* within 1 s: timed out"):
        ends(lambda: reader.load(0, HERE))
    assert time.monotonic() - started > 0.9
    wait_for(waited_for[0].is_ready)  # it ended by an error, and lets go of its memory
    with pytest.raises(jax.errors.JaxRuntimeError):
        waited_for[0].block_until_ready()
    assert reader.latest() == 0 and load_newer(reader, HERE) is None  # which is to wait, and ask again
    monkeypatch.setattr(Pull, "_ask", ask)
    monkeypatch.setattr(Incoming, "pull", pull)
    assert same(reader.load(0, HERE).params, value(0).params)  # over a new connection


def test_only_who_knows_the_secret_reads(make):
    store = make(publisher, probe, secret="ours")
    publish(store, value(0))
    stranger = make(TransferReader, store.address, probe, secret="theirs")
    wait_for(lambda: stranger.trouble is not None)
    assert "the secrets differ" in str(stranger.trouble) and "ours" not in str(stranger.trouble)
    assert stranger.latest() is None
    with pytest.raises(PublisherLostError, match="the secrets differ"):
        stranger.load(0, HERE)
    friend = reader_of(make, store, secret="ours")
    assert same(friend.load(0, HERE).params, value(0).params)


def test_a_publisher_without_a_secret_stays_on_its_machine():
    with pytest.raises(ChannelError, match=r"192\.0\.2\.7:0' without a secret .* AREAL_JAX_SECRET"):
        TransferStore(PublisherSettings(probe), "192.0.2.7:0")


# --- the publisher ------------------------------------------------------------------------------------------


def test_publishing_waits_for_room_and_for_no_reader(make):
    gate, told = threading.Event(), []
    store = make(publisher, probe, deadline_s=0.2)

    def slow(wire: VersionedParams) -> None:
        assert gate.wait(DEADLINE_S)
        told.append(wire.version)

    store.publish(value(0), slow)
    store.publish(value(1), slow)
    with pytest.raises(WeightsError, match=r"committing versions for readers took longer than 0.2 s"):
        store.publish(value(2), slow)
    assert store.latest() is None
    gate.set()
    store.wait(DEADLINE_S)
    assert told == [0, 1] and store.latest() == 1


def test_a_version_that_could_not_be_committed_is_heard_of_at_once(make):
    heard = []
    store = make(publisher, probe, on_failure=heard.append)
    store.publish(value(0)._replace(digest="0" * 16))
    wait_for(lambda: heard)
    assert "before its commit" in str(heard[0]) and store.latest() is None
    with pytest.raises(WeightsError, match=f"published with digest {'0' * 16}"):
        store.wait(DEADLINE_S)
    np.testing.assert_array_equal(np.asarray(store.publish(value(0)).params["b"]), np.zeros(4))
