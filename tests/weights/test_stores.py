"""What every store promises: versions only grow, nothing aliases the trainer, readers see whole versions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from areal_jax.types import VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.errors import VersionGoneError, WeightsError
from areal_jax.weights.memory import MemoryStore
from areal_jax.weights.orbax import OrbaxStore
from areal_jax.weights.publishing import PublisherSettings
from areal_jax.weights.store import ParamStore, Probe, load_newer
from tests.hangs import HANG_S
from tests.weights.values import (
    DEADLINE_S,
    HERE,
    THERE,
    Transferred,
    newest,
    pointers,
    probe,
    same,
    value,
)

Make = Callable[..., ParamStore]


@pytest.fixture(params=["memory", "orbax", "transfer"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """`make(probe, dtype)`: a store that keeps the latest version alone, as the one in memory does."""
    with ExitStack() as made:

        def store(probe=probe, dtype: str = "float32") -> ParamStore:
            if request.param == "memory":
                return MemoryStore(probe, dtype)
            if request.param == "orbax":
                return OrbaxStore(tmp_path / "weights", PublisherSettings(probe, dtype, DEADLINE_S), keep=1)
            return made.enter_context(closing(Transferred(probe, dtype)))

        yield store


def publish(store: ParamStore, given: VersionedParams, before_commit=None) -> VersionedParams:
    """Until readers can load it."""
    wire = store.publish(given, before_commit)
    store.wait(DEADLINE_S)
    return wire


# --- versions -----------------------------------------------------------------------------------------------


def test_what_is_published_is_what_is_loaded(make: Make):
    store = make()
    assert store.latest() is None
    given = value(0)
    wire = publish(store, given)
    assert (wire.version, wire.digest) == (0, given.digest)
    assert store.latest() == 0
    loaded = store.load(0, HERE)
    assert (loaded.version, loaded.digest) == (0, given.digest)
    assert same(loaded.params, given.params)


def test_versions_only_grow(make: Make):
    store = make()
    publish(store, value(3))
    with pytest.raises(WeightsError, match=r"version 2 .* cannot be published after version 3"):
        publish(store, value(2))
    with pytest.raises(WeightsError, match=r"version 3 .* versions only grow"):
        publish(store, value(3, seed=9))
    assert store.load(3, HERE).digest == value(3).digest
    publish(store, value(7))  # gaps are no business of the store's
    assert store.latest() == 7


def test_publishing_again_with_an_equal_digest_does_nothing(make: Make):
    store = make()
    first = publish(store, value(1))
    heard = []
    again = publish(store, value(1), heard.append)
    assert (again.version, again.digest) == (first.version, first.digest)
    assert heard == []


def test_only_the_latest_version_is_kept(make: Make):
    store = make()
    with pytest.raises(VersionGoneError, match="version 0 is not in the store; the newest there is None"):
        store.load(0, HERE)
    assert load_newer(store, HERE) is None
    publish(store, value(0))
    publish(store, value(1))
    with pytest.raises(VersionGoneError, match="version 0 is not in the store; the newest there is 1"):
        store.load(0, HERE)


def test_load_latest_survives_a_publisher_that_is_faster(make: Make):
    """Between `latest` and `load` the trainer may commit: the reader takes the newer one."""
    store = make()
    latest = store.latest

    def hasty() -> int | None:
        found = latest()
        if found is not None and found < 3:
            publish(store, value(found + 1))
        return found

    store.latest = hasty  # type: ignore[method-assign]
    publish(store, value(0))
    assert newest(store, HERE).version == 3


def test_nothing_newer_is_nothing_to_load(make: Make):
    store = make()
    assert load_newer(store, HERE) is None
    publish(store, value(4))
    assert load_newer(store, HERE, than=4) is None
    loaded = load_newer(store, HERE, than=3)
    assert loaded is not None and loaded.version == 4


def test_what_before_commit_hears_no_reader_can_load_yet(make: Make):
    store = make(dtype="bfloat16")
    publish(store, value(0))
    heard = []

    def before_commit(wire: VersionedParams) -> None:
        heard.append((wire.version, wire.digest, store.latest()))

    published = publish(store, value(1), before_commit)
    assert heard == [(1, published.digest, 0)]
    assert store.latest() == 1


def test_a_version_that_could_not_be_recorded_is_not_committed(make: Make):
    store = make()
    publish(store, value(0))

    def full(_: VersionedParams) -> None:
        raise OSError("disk full")

    with pytest.raises((OSError, WeightsError), match="disk full"):
        publish(store, value(1), full)
    assert store.latest() == 0
    assert same(store.load(0, HERE).params, value(0).params)
    publish(store, value(1))
    assert store.latest() == 1


# --- buffers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_published_parameters_survive_the_donation_of_their_source(make: Make, dtype):
    store = make(dtype=dtype)
    given = value(0)
    source = given.params
    expected = jax.tree.map(lambda leaf: np.array(leaf.astype(dtype)), source)
    wire = publish(store, given)
    assert not set(pointers(wire.params)) & set(pointers(source))
    loaded = store.load(0, HERE)
    update = jax.jit(lambda params: jax.tree.map(lambda leaf: leaf * 0 - 1, params), donate_argnums=0)
    jax.block_until_ready(update(source))
    assert source["w"].is_deleted()
    assert same(loaded.params, expected)
    assert same(store.load(0, HERE).params, expected)


def test_bfloat16_on_the_wire_has_the_digest_of_the_cast(make: Make):
    store = make(dtype="bfloat16")
    given = value(0)
    wire = publish(store, given)
    cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), given.params)
    assert wire.digest == digest(cast) != given.digest
    loaded = store.load(0, HERE)
    assert loaded.digest == wire.digest
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded.params)} == {jnp.dtype("bfloat16")}
    assert same(loaded.params, cast)


def test_a_reader_on_other_devices_and_another_mesh_gets_the_same_bits(make: Make):
    trainer = Mesh(np.array(jax.devices()[:2]), ("fsdp",))
    given = value(0)
    sharded = jax.device_put(given.params, NamedSharding(trainer, PartitionSpec("fsdp")))
    store = make()
    publish(store, given._replace(params=sharded))
    loaded = store.load(0, THERE)
    assert loaded.params["w"].sharding.device_set == set(jax.devices()[2:4])
    assert loaded.digest == given.digest
    assert same(loaded.params, given.params)


def test_a_store_with_several_readers_overwrites_nothing(make: Make):
    store = make()
    publish(store, value(0))
    served = store.load(0, HERE)
    publish(store, value(1))
    assert same(served.params, value(0).params)


# --- checks at load -----------------------------------------------------------------------------------------


def test_a_digest_that_is_not_that_of_the_parameters_is_caught(make: Make):
    """In memory on the way to other devices, on disk before it is written."""
    store = make()
    with pytest.raises(WeightsError, match=f"published with digest {'0' * 16}, .* {value(0).digest}"):
        publish(store, value(0)._replace(digest="0" * 16))
        store.load(0, THERE)


@pytest.mark.parametrize("factor", [0.9, float("nan")])
def test_a_reader_that_computes_something_else_is_caught_by_the_canary(make: Make, factor):
    calls = []

    def lies_later(params) -> jax.Array:
        calls.append(params)
        return probe(params) * (1.0 if len(calls) == 1 else factor)

    store = make(Probe(lies_later))
    publish(store, value(0))
    with pytest.raises(WeightsError, match="canary's log-prob under version 0 differs by"):
        store.load(0, THERE)


@pytest.mark.parametrize(
    ("gaps", "is_rounding"),
    [([0.19, 0, 0, 0], True), ([0.21, 0, 0, 0], False), ([0.06] * 4, False), ([0.04] * 4, True)],
)
def test_the_probe_says_which_gaps_are_rounding(make: Make, gaps: list[float], is_rounding: bool):
    """At most 0.2 for each token and 0.05 in the mean of four; both bounds hold in every store."""
    calls = []

    def differs_later(params) -> jax.Array:
        calls.append(params)
        return probe(params) + (0.0 if len(calls) == 1 else 1.0) * jnp.asarray(gaps)

    store = make(Probe(differs_later, largest=0.2, mean=0.05))
    publish(store, value(0))
    if is_rounding:
        assert same(store.load(0, THERE).params, value(0).params)
    else:
        with pytest.raises(WeightsError, match=r"differs by .* at most 0\.2 \(mean 0\.05\) is rounding"):
            store.load(0, THERE)


# --- threads ------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax, its files pruned
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_concurrent_readers_never_see_half_a_version(make: Make):
    """Every load is one published version, whole, with its digest; none is older than the one before."""
    values = [value(version) for version in range(12)]
    digests = {v.version: v.digest for v in values}
    store = make()
    publish(store, values[0])
    problems, seen = [], [0, 0]

    def read(who: int) -> None:
        while seen[who] < 11:
            loaded = newest(store, HERE)
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
        publish(store, one)
    for reader in readers:
        reader.join(HANG_S)
    assert seen == [11, 11]
    assert problems == []
    store.close(DEADLINE_S)
