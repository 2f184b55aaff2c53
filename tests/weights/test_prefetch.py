"""Loaded ahead: on one device nothing is read, checked or laid out in the thread that decodes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import jax
import pytest

from areal_jax.types import VersionedParams
from areal_jax.weights import digest as digests
from areal_jax.weights.errors import PublisherLostError, VersionDamagedError, VersionGoneError, WeightsError
from areal_jax.weights.memory import MemoryStore
from areal_jax.weights.orbax import OrbaxStore
from areal_jax.weights.prefetch import Prefetcher
from areal_jax.weights.publishing import PublisherSettings
from areal_jax.weights.store import ParamStore, Probe, load_newer
from tests.weights.values import (
    DEADLINE_S,
    HERE,
    THERE,
    Transferred,
    newest,
    on,
    probe,
    same,
    value,
    wait_for,
)

ALONE = on(2)
"""A reader's one device."""
AHEAD = "loading weights ahead"


@pytest.fixture(params=["memory", "orbax", "transfer"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ParamStore]:
    with ExitStack() as made:
        if request.param == "memory":
            yield MemoryStore(probe)
        elif request.param == "orbax":
            yield OrbaxStore(tmp_path / "weights", PublisherSettings(probe, deadline_s=DEADLINE_S), keep=2)
        else:
            yield made.enter_context(closing(Transferred(probe)))


Ahead = Callable[..., Prefetcher]


@pytest.fixture
def ahead() -> Iterator[Ahead]:
    """`ahead(store, lay_out, shardings)`; closed in the end."""
    made: list[Prefetcher] = []

    def one(store, lay_out=lambda value: value, shardings=ALONE) -> Prefetcher:
        made.append(Prefetcher(store, shardings, lay_out))
        return made[-1]

    yield one
    for each in made:
        each.close(DEADLINE_S)


def publish(store: ParamStore, *values: VersionedParams) -> None:
    for one in values:
        store.publish(one)
    store.wait(DEADLINE_S)


def doubled(value: VersionedParams) -> VersionedParams:
    """A layout that can be told from none."""
    return value._replace(params=jax.tree.map(lambda leaf: leaf * 2, value.params))


class Scripted:
    """A reader whose versions are what `say(version)` returns or raises."""

    def __init__(self, say: Callable[[int], VersionedParams]) -> None:
        self.newest, self.loads, self._say = 0, [], say

    def latest(self) -> int:
        return self.newest

    def fetch(self, version: int, shardings: object) -> Callable[[], VersionedParams]:
        return lambda: self.load(version, shardings)

    def load(self, version: int, shardings: object) -> VersionedParams:
        self.loads.append((version, threading.current_thread().name))
        return self._say(version)


def test_a_version_is_here_and_laid_out_before_it_is_asked_for(store, ahead):
    """And to hand it over needs neither store nor layout."""
    laid_out: list[str] = []

    def lay_out(value: VersionedParams) -> VersionedParams:
        laid_out.append(threading.current_thread().name)
        return doubled(value)

    mine = ahead(store, lay_out)
    assert mine.latest() is None and load_newer(mine, ALONE) is None
    for version in (0, 1):
        publish(store, value(version))
        wait_for(lambda version=version: mine.latest() == version)
        before = len(laid_out)
        loaded = mine.load(version, ALONE)
        assert same(loaded.params, doubled(value(version)).params) and loaded.version == version
        assert loaded.params["w"].sharding.device_set == ALONE["w"].device_set
        assert len(laid_out) == before
    assert set(laid_out) == {AHEAD}
    assert mine.latest() == 1 and load_newer(mine, ALONE, than=1) is None


def test_one_version_waits_and_the_next_is_the_newest(store, ahead):
    publish(store, value(0))
    mine = ahead(store)
    wait_for(lambda: mine.latest() == 0)
    publish(store, value(1), value(2), value(3))
    assert mine.latest() == 0
    mine.load(0, ALONE)
    wait_for(lambda: mine.latest() == 3)
    assert same(mine.load(3, ALONE).params, value(3).params)


def test_what_waits_is_all_there_is(store, ahead):
    publish(store, value(0))
    mine = ahead(store)
    wait_for(lambda: mine.latest() == 0)
    with pytest.raises(VersionGoneError, match="version 1 is not prefetched"):
        mine.load(1, ALONE)
    with pytest.raises(WeightsError, match="only with the shardings that it was given"):
        mine.load(0, HERE)
    mine.load(0, ALONE)
    with pytest.raises(VersionGoneError):
        mine.load(0, ALONE)


@pytest.mark.parametrize("store", ["orbax", "transfer"], indirect=True)
def test_programs_on_several_devices_start_in_the_hosts_thread(store, ahead, monkeypatch: pytest.MonkeyPatch):
    """Beside the decode loop, two devices could begin with collectives of different threads, and hang."""
    started: list[tuple[str, str]] = []

    def noting(name: str, program: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(tree: Any) -> Any:
            arrays = (leaf for leaf in jax.tree.leaves(tree) if not isinstance(leaf, jax.core.Tracer))
            if any(len(leaf.sharding.device_set) > 1 for leaf in arrays):
                started.append((name, threading.current_thread().name))
            return program(tree)

        return call

    monkeypatch.setattr(digests, "_sums", noting("digest", digests._sums))
    reader = getattr(store, "reader", store)
    monkeypatch.setattr(reader, "_probe", Probe(noting("canary", probe)))

    def lay_out(value: VersionedParams) -> VersionedParams:
        started.append(("layout", threading.current_thread().name))
        return doubled(value)

    mine = ahead(reader, lay_out, THERE)
    for version in (0, 1):
        publish(store, value(version))
        wait_for(lambda version=version: mine.latest() == version)
        assert same(mine.load(version, THERE).params, doubled(value(version)).params)
    here = threading.current_thread().name
    assert set(started) == {("digest", here), ("canary", here), ("layout", here)}


def test_a_fetched_version_that_is_damaged_leaves_the_one_before(ahead):
    def say(version: int) -> VersionedParams:
        if version == 1:
            reader.newest = 0  # as a reader that refuses the version
            raise VersionDamagedError("version 1 arrived damaged")
        return value(version)

    reader = Scripted(say)
    mine = ahead(reader, shardings=THERE)
    wait_for(lambda: mine.latest() == 0)
    assert newest(mine, THERE).version == 0
    reader.newest = 1
    wait_for(lambda: mine.latest() == 1)
    assert load_newer(mine, THERE, than=0) is None and mine.latest() == 0
    reader.newest = 2
    wait_for(lambda: mine.latest() == 2)
    assert newest(mine, THERE).version == 2


@pytest.mark.parametrize("error", [VersionDamagedError, PublisherLostError, VersionGoneError])
def test_a_version_that_cannot_be_had_leaves_the_one_before_and_is_tried_again(ahead, error):
    bad = [True]

    def say(version: int) -> VersionedParams:
        if version == 1 and bad[0]:
            raise error("version 1 could not be had")
        return value(version)

    reader = Scripted(say)
    mine = ahead(reader)
    wait_for(lambda: mine.latest() == 0)
    mine.load(0, ALONE)
    reader.newest = 1
    wait_for(lambda: sum(version == 1 for version, _ in reader.loads) >= 2)
    assert mine.latest() == 0 and load_newer(mine, ALONE, than=0) is None
    bad[0] = False
    wait_for(lambda: mine.latest() == 1)


def test_what_nobody_can_mend_is_raised_where_the_host_asks(store, ahead):
    """Its canary is another: it does not compute what the publisher does."""

    def differs(value: VersionedParams) -> VersionedParams:
        raise WeightsError("the canary differs")

    publish(store, value(0))
    mine = ahead(store, differs)

    def is_raised() -> bool:
        try:
            return mine.latest() is not None
        except WeightsError:
            return True

    wait_for(is_raised)
    with pytest.raises(WeightsError, match="the canary differs"):
        load_newer(mine, ALONE)


@pytest.mark.parametrize("when", ["waiting", "under way"])
def test_what_another_publisher_published_is_forgotten(ahead, when: str):
    gate, seed = threading.Event(), [9]
    reader = Scripted(lambda version: value(version, seed=seed[0]))

    def lay_out(value: VersionedParams) -> VersionedParams:
        assert gate.wait(DEADLINE_S)
        return value

    mine = ahead(reader, lay_out)
    if when == "waiting":
        gate.set()
        wait_for(lambda: mine.latest() == 0)
    wait_for(lambda: reader.loads)
    seed[0] = 5
    mine.forget()
    gate.set()
    wait_for(lambda: len(reader.loads) == 2 and mine.latest() == 0)
    assert same(mine.load(0, ALONE).params, value(0, seed=5).params)


def test_it_holds_on_to_no_version_that_was_taken(ahead):
    reader = Scripted(value)
    mine = ahead(reader)
    wait_for(lambda: mine.latest() == 0)
    held = mine.load(0, ALONE)
    leaf = weakref.ref(held.params["w"])
    del held
    wait_for(lambda: leaf() is None)
    assert mine.latest() == 0 and len(reader.loads) == 1


def test_closing_waits_for_a_load_that_is_under_way():
    begun, gate = threading.Event(), threading.Event()

    def say(version: int) -> VersionedParams:
        begun.set()
        assert gate.wait(DEADLINE_S)
        return value(version)

    reader = Scripted(say)
    mine = Prefetcher(reader, ALONE, lambda value: value)
    assert begun.wait(DEADLINE_S)
    closing_thread = threading.Thread(target=mine.close, args=(DEADLINE_S,))
    closing_thread.start()
    closing_thread.join(0.1)
    assert closing_thread.is_alive()
    gate.set()
    closing_thread.join(DEADLINE_S)
    assert not closing_thread.is_alive() and not mine._thread.is_alive()
    reader.newest = 1
    assert [version for version, _ in reader.loads] == [0]
