"""Versions in files: written off the trainer's path, refused by name when damaged, taken over by a resume."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from areal_jax.types import VersionedParams
from areal_jax.weights import staged
from areal_jax.weights.digest import digest
from areal_jax.weights.errors import VersionDamagedError, VersionGoneError, WeightsError
from areal_jax.weights.manifest import MANIFEST, render
from areal_jax.weights.orbax import OrbaxStore
from areal_jax.weights.publishing import PublisherSettings
from areal_jax.weights.store import Probe, load_newer
from tests.weights.values import DEADLINE_S, HERE, THERE, newest, probe, same, value


def open_store(folder: Path, keep: int = 3, **settings) -> OrbaxStore:
    return OrbaxStore(folder, PublisherSettings(probe, **{"deadline_s": DEADLINE_S, **settings}), keep)


def publish(folder: Path, *values: VersionedParams, keep: int = 3) -> None:
    """As a process of its own."""
    store = open_store(folder, keep)
    for one in values:
        store.publish(one)
    store.close(DEADLINE_S)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


# --- publishing ---------------------------------------------------------------------------------------------


def test_a_slow_disk_does_not_hold_the_publisher_until_one_is_written_and_one_waits(tmp_path: Path):
    disk, told = threading.Event(), []

    def slow(wire: VersionedParams) -> None:
        assert disk.wait(DEADLINE_S)
        told.append(wire.version)

    store, reader = open_store(tmp_path / "weights", deadline_s=0.2), open_store(tmp_path / "weights")
    store.publish(value(1), slow)
    store.publish(value(2), slow)
    with pytest.raises(WeightsError, match=r"writing versions to .*weights took longer than 0.2 s"):
        store.publish(value(3), slow)
    assert told == [] and reader.latest() is None
    disk.set()
    store.wait(DEADLINE_S)
    assert told == [1, 2] and reader.latest() == 2
    store.publish(value(3), slow)  # it was refused, so it may come again
    store.close(DEADLINE_S)
    assert told == [1, 2, 3] and reader.latest() == 3


def test_all_is_on_disk_before_anybody_is_told(tmp_path: Path):
    store, found = open_store(tmp_path), []

    def before_commit(wire: VersionedParams) -> None:
        stage = tmp_path / f".staged-{wire.version}"
        manifest = json.loads((stage / MANIFEST).read_bytes())
        chunks = [stage / "state" / name for name in manifest["files"]]
        found.append((names(tmp_path), all(path.stat().st_size for path in chunks)))

    store.publish(value(4), before_commit)
    store.close(DEADLINE_S)
    assert found == [([".staged-4"], True)]
    assert names(tmp_path) == ["4"]


def test_a_version_survives_a_power_cut_from_its_announcement_on(tmp_path: Path, monkeypatch):
    """All that is written is synced before readers can see it, and then the name under which they see it.

    TensorStore has synced the leaves, in folders with a file .zarray.
    """
    final, synced = tmp_path / "4", []

    def sync(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino, final.exists()))

    monkeypatch.setattr(os, "fsync", sync)
    store = open_store(tmp_path)
    store.publish(value(4), lambda wire: synced.append("announced"))
    store.close(DEADLINE_S)
    at = synced.index("announced")
    written = [
        path
        for path in (final, *final.rglob("*"))
        if not any((folder / ".zarray").exists() for folder in (path, path.parent))
    ]
    assert {final, final / MANIFEST, final / "state"} < set(written)
    assert {inode for inode, _ in synced[:at]} == {path.stat().st_ino for path in written}
    assert synced[at + 1 :] == [(tmp_path.stat().st_ino, True)]


def test_a_failed_write_is_heard_at_once_and_raised_by_the_next_call(tmp_path: Path):
    folder, heard = tmp_path / "weights", []
    store = open_store(folder, on_failure=heard.append)
    store.publish(value(0))
    store.wait(DEADLINE_S)
    folder.rename(tmp_path / "elsewhere")
    store.publish(value(1))
    with pytest.raises(WeightsError, match=r"weights.1 could not be written: .*No such file"):
        store.wait(DEADLINE_S)
    assert [str(error)[-6:] for error in heard] == ["intact"]
    (tmp_path / "elsewhere").rename(folder)
    store.publish(value(1))
    store.close(DEADLINE_S)
    assert open_store(folder).load(1, HERE).digest == value(1).digest


def test_only_the_newest_stay(tmp_path: Path):
    publish(tmp_path, *map(value, (0, 1, 2, 5, 6)), keep=2)
    assert names(tmp_path) == ["5", "6"]
    with pytest.raises(VersionGoneError, match="version 2 is not in the store; the newest there is 6"):
        open_store(tmp_path).load(2, HERE)


def test_what_is_published_is_what_stood_there_however_soon_it_is_donated(tmp_path: Path):
    """Large enough that the copy is still on its way when the update that donates its source starts."""
    whole = NamedSharding(HERE["b"].mesh, PartitionSpec())
    update = jax.jit(lambda params: jax.tree.map(lambda leaf: leaf * 0 - 1, params), donate_argnums=0)
    settings = PublisherSettings(Probe(lambda params: params["w"][0, 0, :3]), deadline_s=DEADLINE_S)
    store = OrbaxStore(tmp_path, settings, keep=9)
    wanted = {}
    for version in range(3):
        params = {"w": jax.device_put(np.random.default_rng(version).normal(size=(8, 512, 1024)), whole)}
        params = jax.block_until_ready(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params))
        wanted[version] = digest(params)
        store.publish(VersionedParams(version, params, wanted[version]))
        jax.block_until_ready(update(params))
    store.close(DEADLINE_S)
    assert {version: digest(store.load(version, {"w": whole}).params) for version in wanted} == wanted


# --- a publisher after another ------------------------------------------------------------------------------


def test_a_resumed_publisher_takes_over(tmp_path: Path):
    """Version 4 with the bits that lie there is not written again; what else lies there is void."""
    publish(tmp_path, *map(value, (2, 3, 4, 5)), keep=9)
    before = (tmp_path / "4" / MANIFEST).stat().st_ino
    publish(tmp_path, value(4))
    assert names(tmp_path) == ["4"]
    assert (tmp_path / "4" / MANIFEST).stat().st_ino == before
    publish(tmp_path, value(4), value(5, seed=50))
    assert names(tmp_path) == ["4", "5"]


def test_a_reissued_version_replaces_the_one_that_lies_there(tmp_path: Path):
    publish(tmp_path, *map(value, (3, 4, 5)))
    reader = open_store(tmp_path)
    assert newest(reader, HERE).version == 5
    publish(tmp_path, value(4, seed=40))
    assert names(tmp_path) == ["4"]
    assert newest(reader, HERE).digest == value(4, seed=40).digest


def test_damage_is_not_taken_for_the_same_version(tmp_path: Path):
    publish(tmp_path, value(4))
    damage(tmp_path / "4" / "state" / "w" / "0.0")
    publish(tmp_path, value(4))
    assert open_store(tmp_path).load(4, HERE).digest == value(4).digest


def test_what_a_killed_publisher_left_is_not_seen_and_goes(tmp_path: Path):
    publish(tmp_path, *map(value, (1, 2)))
    shutil.copytree(tmp_path / "2", tmp_path / ".staged-3")
    shutil.copytree(tmp_path / "1", tmp_path / ".gone-0")
    assert newest(open_store(tmp_path), HERE).version == 2
    publish(tmp_path, value(2), value(3))
    assert names(tmp_path) == ["2", "3"]
    assert same(open_store(tmp_path).load(3, HERE).params, value(3).params)


# --- readers ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions 1 and 2, to damage and to mend."""
    folder = tmp_path_factory.mktemp("two")
    publish(folder, value(1), value(2))
    return folder


@pytest.mark.slow
@given(
    which=st.integers(0, 10**6),
    at=st.floats(0, 1, exclude_max=True),
    kind=st.sampled_from(["cut", *"01234567"]),
)
@example(which=-1, at=0.5, kind="0")
@settings(max_examples=80)
def test_a_version_cut_or_flipped_anywhere_leaves_the_one_before_in_force(
    two: Path, which: int, at: float, kind: str
):
    """Any byte, any bit, of any file, the manifest among them; for good, not only at the first look."""
    files = sorted(path for path in (two / "2").rglob("*") if path.is_file() and path.stat().st_size)
    file = two / "2" / MANIFEST if which < 0 else files[which % len(files)]
    data = file.read_bytes()
    place = int(at * len(data))
    rest = b"" if kind == "cut" else bytes([data[place] ^ 1 << int(kind)]) + data[place + 1 :]
    reader = open_store(two)
    try:
        file.write_bytes(data[:place] + rest)
        with pytest.raises(VersionDamagedError) as refused:
            reader.load(2, HERE)
        assert str(two / "2") in str(refused.value)
        assert reader.latest() == 1
        assert same(newest(reader, THERE).params, value(1).params)
        assert load_newer(reader, HERE, than=1) is None
    finally:
        file.write_bytes(data)


@pytest.mark.parametrize("name", ["state/w/0.0", "state/b/.zarray", "state/_METADATA"])
def test_a_missing_file_is_named(tmp_path: Path, name: str):
    publish(tmp_path, value(1), value(2))
    (tmp_path / "2" / name).unlink()
    with pytest.raises(VersionDamagedError, match=f"file {name.removeprefix('state/')}: missing"):
        open_store(tmp_path).load(2, HERE)


def test_a_refused_version_is_tried_again_once_it_is_replaced(tmp_path: Path):
    publish(tmp_path, value(1), value(2))
    damage(tmp_path / "2" / "state" / "w" / "0.0")
    reader = open_store(tmp_path)
    assert newest(reader, HERE).version == 1
    assert reader.latest() == 1
    publish(tmp_path, value(2))
    assert reader.latest() == 2
    assert newest(reader, HERE).digest == value(2).digest


def test_what_no_store_wrote_is_no_version(tmp_path: Path):
    publish(tmp_path, value(1))
    for name in ("7", "latest", "-1", "٣"):
        (tmp_path / name).mkdir()
    (tmp_path / "8").write_text("")
    assert open_store(tmp_path).latest() == 1
    with pytest.raises(VersionGoneError):
        open_store(tmp_path).load(7, HERE)


def test_another_models_version_is_refused_by_the_leaves_that_differ(tmp_path: Path):
    publish(tmp_path, value(1))
    fewer = {"w": HERE["w"]}
    with pytest.raises(
        VersionDamagedError, match=r"contains other parameters than this reader's model: b are in only one"
    ):
        open_store(tmp_path).load(1, fewer)


def test_leaves_of_another_description_are_refused(tmp_path: Path):
    publish(tmp_path, value(1))
    path = tmp_path / "1" / MANIFEST
    manifest = json.loads(path.read_bytes())
    manifest["leaves"]["b"] = "complicated"
    path.write_bytes(render(manifest))
    with pytest.raises(
        VersionDamagedError, match=r"the digest 'complicated' of a leaf does not have the form"
    ):
        open_store(tmp_path).load(1, HERE)


def test_a_version_without_a_canary_is_none_of_this_readers(tmp_path: Path):
    publish(tmp_path, value(1))
    path = tmp_path / "1" / MANIFEST
    manifest = json.loads(path.read_bytes())
    path.write_bytes(render(manifest | {"about": {}}))
    with pytest.raises(WeightsError, match="canary"):
        open_store(tmp_path).load(1, HERE)


def test_a_version_pruned_while_it_is_read_gives_way_to_the_next(tmp_path: Path, monkeypatch):
    """Its files go between the first look and the last."""
    publish(tmp_path, value(1))
    reader = open_store(tmp_path)
    fetch = staged.fetch

    def slow_read(path, like):
        if path.name == "1":
            monkeypatch.setattr(staged, "fetch", fetch)
            publish(tmp_path, value(2))
        return fetch(path, like)

    monkeypatch.setattr(staged, "fetch", slow_read)
    with pytest.raises(VersionGoneError, match="version 1 was removed or replaced while it was read"):
        reader.load(1, HERE)
    assert newest(reader, HERE).version == 2
