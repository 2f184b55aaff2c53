"""Checkpoints: every bit comes back, or the checkpoint is refused by name and the one before is used."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from areal_jax.config.presets import preset_settings
from areal_jax.config.sections import AlgorithmConfig
from areal_jax.models.model import Model
from areal_jax.parallel.mesh import make_mesh
from areal_jax.runtime.device_memory import reset_peak, resident_bytes
from areal_jax.trainer.checkpoint import (
    Checkpointer,
    committed,
    discard_newer,
    prune,
    restore,
    restore_params,
)
from areal_jax.trainer.learner import Learner
from areal_jax.trainer.state import TrainState
from areal_jax.weights import staged
from areal_jax.weights.digest import leaf_sums
from areal_jax.weights.errors import StagedError
from areal_jax.weights.manifest import MANIFEST, render
from areal_jax.weights.staged import Detached
from tests.hangs import HANG_S
from tests.trainer.conftest import LENGTH, same_bits
from tests.trainer.killed_checkpoint import small_state

DEADLINE_S = HANG_S


def make_learner(model: Model, **mesh: int) -> Learner:
    shape = {"data": 1, "fsdp": 1, "tensor": 1, **mesh}
    return Learner(
        model,
        AlgorithmConfig.model_validate(preset_settings({"preset": "grpo"})),
        optax.adamw(1e-3),
        rows=2,
        length=LENGTH,
        mesh=make_mesh(shape, jax.devices(), "the trainer"),
    )


@pytest.fixture(scope="module")
def adamw(model: Model) -> Learner:
    return make_learner(model)


@pytest.fixture(scope="module")
def state_of(adamw: Learner, params: Any) -> Callable[[int], TrainState]:
    """A state of some version in which no two leaves, and no moments, are alike."""
    first = adamw.init(params)

    def make(version: int) -> TrainState:
        rng = np.random.default_rng(version)

        def noise(leaf: jax.Array) -> jax.Array:
            value = (
                rng.normal(size=leaf.shape) if leaf.dtype == jnp.float32 else rng.integers(0, 99, leaf.shape)
            )
            return jax.device_put(value.astype(leaf.dtype), leaf.sharding)

        return jax.tree.map(noise, first).replace(version=jnp.int32(version))

    return make


@pytest.fixture(scope="module")
def saved(state_of: Callable[[int], TrainState], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions 3 and 7."""
    folder = tmp_path_factory.mktemp("checkpoints")
    save(folder, state_of(3), state_of(7))
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of `saved` to damage."""
    shutil.copytree(saved, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def save(folder: Path, *states: TrainState, keep: int = 2) -> list[int]:
    """As a run does: pruned once each commit is heard of."""
    told: list[int] = []
    checkpointer = Checkpointer(folder)
    for state in states:
        checkpointer.save(state, told.append, DEADLINE_S)
        checkpointer.wait(DEADLINE_S)
        prune(folder, int(state.version), keep)
    checkpointer.close(DEADLINE_S)
    return told


def data_files(version: Path) -> list[Path]:
    """Every file that Orbax wrote, largest first."""
    files = [path for path in (version / "state").rglob("*") if path.is_file()]
    return sorted(files, key=lambda path: -path.stat().st_size)


def assert_falls_back(folder: Path, like: TrainState, want: TrainState) -> str:
    """Version 7 is refused by name and version 3 is used; the reason."""
    restored = restore(folder, like)
    assert restored.state is not None
    assert same_bits(restored.state, want)
    (reason,) = restored.refused
    assert str(folder / "7") in reason
    return reason


# --- whole --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_bit_comes_back(saved: Path, adamw: Learner, state_of: Callable[[int], TrainState]):
    """Parameters, moments, reference, counters; on their shardings, and the newest of two."""
    restored = restore(saved, adamw.abstract_state())
    assert restored.refused == ()
    assert restored.state is not None
    assert jax.tree.structure(restored.state) == jax.tree.structure(state_of(7))
    assert same_bits(restored.state, state_of(7))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, restored.state)
    assert jax.tree.all(jax.tree.map(lambda a, b: a == b, shardings, adamw.state_shardings))


@pytest.mark.slow
def test_a_checkpoint_moves_to_another_mesh(
    saved: Path, model: Model, state_of: Callable[[int], TrainState], tmp_path: Path
):
    """Written from one device, read onto four, written from those, read onto two."""
    four, two = make_learner(model, fsdp=2, tensor=2), make_learner(model, tensor=2)
    spread = restore(saved, four.abstract_state()).state
    assert spread is not None
    assert same_bits(spread, state_of(7))
    assert len(spread.params["blocks"]["mlp"]["gate"].addressable_shards) == 4
    save(tmp_path, spread)
    back = restore(tmp_path, two.abstract_state())
    assert back.refused == ()
    assert same_bits(back.state, state_of(7))


@pytest.mark.parametrize("memory", ["cpu", "gpu", "host"])
def test_saving_outlives_donation(
    adamw: Learner,
    state_of: Callable[[int], TrainState],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    memory: str,
):
    """The state may be donated before the file is written, wherever it is: also as trainer.optimizer_memory
    has the moments in host memory, and as arrays of a GPU are copied.
    """
    write, may_write = staged.write, threading.Event()

    def held(*args: Any, **named: Any) -> None:
        assert may_write.wait(HANG_S)
        write(*args, **named)

    monkeypatch.setattr(staged, "write", held)
    monkeypatch.setattr(staged, "_is_on_device", lambda leaf: memory == "gpu")
    state = state_of(1)
    if memory == "host":
        state = jax.tree.map(
            lambda leaf: jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host")), state
        )
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(state, lambda version: None, DEADLINE_S)
    checkpointer.wait_copied(DEADLINE_S)
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    may_write.set()
    checkpointer.close(DEADLINE_S)
    assert same_bits(restore(tmp_path, adamw.abstract_state()).state, state_of(1))


def test_nothing_to_restore(adamw: Learner, tmp_path: Path):
    assert restore(tmp_path, adamw.abstract_state()) == (None, ())
    assert restore(tmp_path / "none", adamw.abstract_state()) == (None, ())


# --- damaged ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, reason",
    [
        ("params.embedding/0.0", "leaf params.embedding has digest"),
        ("params.norm/.zarray", "file params.norm/.zarray: bytes and checksum"),
    ],
)
def test_a_flipped_byte_sends_back_to_the_checkpoint_before(
    folder: Path, adamw: Learner, state_of: Callable[[int], TrainState], name: str, reason: str
):
    """Of a chunk the leaf is named, of a file that Orbax parses the file."""
    file = folder / "7" / "state" / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)
    assert reason in assert_falls_back(folder, adamw.abstract_state(), state_of(3))


@pytest.fixture(scope="module")
def lone(state_of: Callable[[int], TrainState], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Version 7 alone, to damage and to mend."""
    folder = tmp_path_factory.mktemp("lone")
    save(folder, state_of(7))
    return folder


@pytest.mark.slow
@given(
    which=st.integers(0, 10**6),
    at=st.floats(0, 1, exclude_max=True),
    damage=st.sampled_from(["cut", *"01234567"]),
)
@example(which=-1, at=0.0, damage="0")
@settings(max_examples=80)
def test_no_damage_to_any_file_goes_unseen(lone: Path, adamw: Learner, which: int, at: float, damage: str):
    """Cut at any byte, or with any bit flipped: any file, the manifest among them."""
    files = sorted(path for path in (lone / "7").rglob("*") if path.is_file() and path.stat().st_size)
    file = lone / "7" / MANIFEST if which < 0 else files[which % len(files)]
    data = file.read_bytes()
    place = int(at * len(data))
    flipped = bytes([data[place] ^ 1 << int(damage)]) + data[place + 1 :] if damage != "cut" else b""
    file.write_bytes(data[:place] + flipped)
    try:
        restored = restore(lone, adamw.abstract_state())
    finally:
        file.write_bytes(data)
    assert restored.state is None
    assert str(lone / "7") in restored.refused[0]


@pytest.mark.parametrize(
    "name", [MANIFEST, "state/_METADATA", "state/params.norm/0", "state/version/.zarray"]
)
def test_a_file_that_is_gone_is_named(
    folder: Path, adamw: Learner, state_of: Callable[[int], TrainState], name: str
):
    (folder / "7" / name).unlink()
    if name == MANIFEST:  # then it was never committed
        restored = restore(folder, adamw.abstract_state())
        assert restored.refused == () and same_bits(restored.state, state_of(3))
        return
    reason = assert_falls_back(folder, adamw.abstract_state(), state_of(3))
    assert f"file {name.removeprefix('state/')}: missing" in reason


def test_another_state_than_the_configs_is_refused(saved: Path, adamw: Learner):
    """A config with other parts (here: parameters renamed) restores nothing, and says so."""
    like = adamw.abstract_state()
    restored = restore(saved, like.replace(params={"renamed": like.params["norm"]}))
    assert restored.state is None
    assert len(restored.refused) == 2
    assert all(
        "contains other parameters than requested: leaf params." in reason for reason in restored.refused
    )


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"leaves": 3}', '{"leaves": [1]}', '{"leaves": {}}', "\xff"]
)
def test_a_manifest_that_is_none_is_refused(
    folder: Path, adamw: Learner, state_of: Callable[[int], TrainState], text: str
):
    (folder / "7" / MANIFEST).write_bytes(text.encode("latin-1"))
    assert_falls_back(folder, adamw.abstract_state(), state_of(3))


def test_a_manifest_of_other_bits_is_refused_by_leaf(
    folder: Path, adamw: Learner, state_of: Callable[[int], TrainState]
):
    path = folder / "7" / MANIFEST
    manifest = json.loads(path.read_text())
    assert len(manifest["leaves"]) == len(jax.tree.leaves(adamw.abstract_state()))
    manifest["leaves"]["params.norm"] = "float32[16]:00000000"
    path.write_bytes(render(manifest))
    assert "leaf params.norm has digest" in assert_falls_back(folder, adamw.abstract_state(), state_of(3))


def test_a_checkpoint_of_another_version_under_this_name_is_refused(
    folder: Path, adamw: Learner, state_of: Callable[[int], TrainState]
):
    shutil.rmtree(folder / "7")
    shutil.copytree(folder / "3", folder / "7")
    assert "contains version 3" in assert_falls_back(folder, adamw.abstract_state(), state_of(3))


def test_the_parameters_alone_can_be_read(saved: Path, adamw: Learner, state_of: Callable[[int], TrainState]):
    params = restore_params(saved / "7", adamw.abstract_state().params)
    assert same_bits(params, state_of(7).params)


def test_all_damaged_means_none(folder: Path, adamw: Learner):
    for version in ("3", "7"):
        data_files(folder / version)[0].write_bytes(b"")
    restored = restore(folder, adamw.abstract_state())
    assert restored.state is None
    assert [str(folder / v) in reason for v, reason in zip("73", restored.refused, strict=True)] == [
        True,
        True,
    ]


# --- writing ------------------------------------------------------------------------------------------------


def test_a_staged_folder_of_a_crash_does_not_matter(
    folder: Path, adamw: Learner, state_of: Callable[[int], TrainState]
):
    (folder / "7").rename(folder / ".staged-9")
    assert same_bits(restore(folder, adamw.abstract_state()).state, state_of(3))
    assert save(folder, state_of(9)) == [9]
    assert sorted(path.name for path in folder.iterdir()) == ["3", "9"]
    assert same_bits(restore(folder, adamw.abstract_state()).state, state_of(9))


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_only_the_newest_are_kept(state_of: Callable[[int], TrainState], tmp_path: Path, keep: int):
    versions = [2, 4, 6]
    assert save(tmp_path, *map(state_of, versions), keep=keep) == versions
    assert committed(tmp_path) == versions[-keep:]


def test_one_version_is_written_once(state_of: Callable[[int], TrainState], tmp_path: Path):
    assert save(tmp_path, state_of(4), state_of(4)) == [4]


@pytest.mark.parametrize(("keep", "kept"), [(1, [5, 7]), (2, [3, 5, 7])])
def test_after_a_refusal_no_good_checkpoint_is_pruned_for_it(
    folder: Path, adamw: Learner, state_of: Callable[[int], TrainState], keep: int, kept: list[int]
):
    """7 is damaged, the run goes on from 3: 7 counts for nothing; at 7 it is replaced."""
    data_files(folder / "7")[0].write_bytes(b"")
    assert save(folder, state_of(5), keep=keep) == [5]
    assert committed(folder) == kept
    assert same_bits(restore(folder, adamw.abstract_state()).state, state_of(5))
    assert save(folder, state_of(7), keep=keep) == [7]
    assert restore(folder, adamw.abstract_state()).refused == ()


def test_what_the_journal_never_heard_of_is_discarded(
    folder: Path, adamw: Learner, state_of: Callable[[int], TrainState]
):
    """Killed after the checkpoint's commit and before its last batch was journaled."""
    assert discard_newer(folder, 7) == []
    assert discard_newer(folder, 6) == [7]
    restored = restore(folder, adamw.abstract_state())
    assert restored.refused == () and same_bits(restored.state, state_of(3))
    assert sorted(path.name for path in folder.iterdir()) == ["3"]


def test_nothing_goes_before_the_journal_has_heard(state_of: Callable[[int], TrainState], tmp_path: Path):
    checkpointer = Checkpointer(tmp_path)
    for version in (1, 2):
        checkpointer.save(state_of(version), lambda version: None, DEADLINE_S)
        checkpointer.wait(DEADLINE_S)
    assert committed(tmp_path) == [1, 2]
    prune(tmp_path, 2, keep=1)
    assert committed(tmp_path) == [2]
    checkpointer.close(DEADLINE_S)


def test_the_version_restored_is_not_written_again(folder: Path, state_of: Callable[[int], TrainState]):
    told: list[int] = []
    before = (folder / "7" / MANIFEST).stat().st_ino
    checkpointer = Checkpointer(folder, restored=7)
    checkpointer.save(state_of(7), told.append, DEADLINE_S)
    checkpointer.close(DEADLINE_S)
    assert told == [] and (folder / "7" / MANIFEST).stat().st_ino == before


def test_a_writer_that_cannot_write_is_heard(state_of: Callable[[int], TrainState], tmp_path: Path):
    heard: list[BaseException] = []
    checkpointer = Checkpointer(tmp_path / "gone", on_failure=heard.append)
    (tmp_path / "gone").rmdir()
    checkpointer.save(state_of(1), lambda version: None, DEADLINE_S)
    with pytest.raises(StagedError, match=r"gone.1 could not be written: .*No such file"):
        checkpointer.wait(DEADLINE_S)
    assert [type(error) for error in heard] == [StagedError]


# --- while one is written -----------------------------------------------------------------------------------


def before_third_leaf(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> list[jax.Array]:
    """From now on `act` is called in the middle of each copy; the leaves that were copied."""
    copy, copied = staged._leaf_to_host, []

    def watched(leaf: jax.Array) -> Any:
        if len(copied) == 2:
            act()
        copied.append(leaf)
        return copy(leaf)

    monkeypatch.setattr(staged, "_leaf_to_host", watched)
    return copied


def test_the_state_is_needed_until_its_last_leaf_is_copied(
    state_of: Callable[[int], TrainState], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    goes_on = threading.Event()
    copied = before_third_leaf(monkeypatch, lambda: goes_on.wait(HANG_S))
    state, checkpointer = state_of(1), Checkpointer(tmp_path)
    checkpointer.wait_copied(0.0)
    checkpointer.save(state, lambda version: None, DEADLINE_S)
    with pytest.raises(StagedError, match=r"copying checkpoint 1 from the devices took longer than 0.1 s"):
        checkpointer.wait_copied(0.1)
    assert len(copied) == 2
    goes_on.set()
    checkpointer.wait_copied(DEADLINE_S)
    assert len(copied) == len(jax.tree.leaves(state))
    checkpointer.close(DEADLINE_S)


def test_a_checkpoint_waits_until_the_one_before_is_written(
    state_of: Callable[[int], TrainState], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    goes_on, ends, write = threading.Event(), [], staged.write

    def held(folder: Path, version: int, *rest: Any, **named: Any) -> None:
        assert goes_on.wait(HANG_S)
        write(folder, version, *rest, **named)

    monkeypatch.setattr(staged, "write", held)
    copied = before_third_leaf(monkeypatch, lambda: None)
    one, two, checkpointer = state_of(1), state_of(2), Checkpointer(tmp_path)
    checkpointer.save(one, ends.append, DEADLINE_S)
    checkpointer.wait_copied(DEADLINE_S)
    with pytest.raises(StagedError, match=rf"writing checkpoints to {tmp_path} took longer than 0.1 s"):
        checkpointer.save(two, ends.append, 0.1)
    assert (len(copied), ends) == (len(jax.tree.leaves(one)), [])
    threading.Timer(0.2, goes_on.set).start()
    checkpointer.save(two, lambda version: ends.extend([len(copied), version]), DEADLINE_S)
    assert ends[:1] == [1]
    checkpointer.close(DEADLINE_S)
    assert ends == [1, 2 * len(jax.tree.leaves(one)), 2]


def test_a_copy_that_fails_between_two_leaves_is_heard_and_the_checkpoint_before_counts(
    adamw: Learner, state_of: Callable[[int], TrainState], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save(tmp_path, state_of(3))

    def fail() -> None:
        raise MemoryError("no host memory")

    before_third_leaf(monkeypatch, fail)
    heard: list[BaseException] = []
    checkpointer = Checkpointer(tmp_path, restored=3, on_failure=heard.append)
    checkpointer.save(state_of(7), lambda version: None, DEADLINE_S)
    checkpointer.wait_copied(DEADLINE_S)  # nothing reads the state any more
    with pytest.raises(MemoryError, match="no host memory"):
        checkpointer.wait(DEADLINE_S)
    assert [type(error) for error in heard] == [MemoryError]
    assert [path.name for path in tmp_path.iterdir()] == ["3"]
    assert same_bits(restore(tmp_path, adamw.abstract_state()).state, state_of(3))


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["copy", "write", "commit"])
def test_killed_in_the_middle_of_one_the_checkpoint_before_counts(tmp_path: Path, moment: str):
    """Between two leaves of the copy, between two leaves' files, and before the rename."""
    command = [sys.executable, "-m", "tests.trainer.killed_checkpoint", str(tmp_path), moment]
    ended = subprocess.run(command, timeout=HANG_S, check=False)
    assert ended.returncode == -signal.SIGKILL
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == (["3"] if moment == "copy" else [".staged-7", "3"])
    found = restore(tmp_path, small_state(0))
    assert found.refused == () and same_bits(found.state, small_state(3))
    assert save(tmp_path, small_state(7)) == [7]
    assert same_bits(restore(tmp_path, small_state(0)).state, small_state(7))


@pytest.mark.slow
def test_a_copy_in_host_memory_is_not_copied_again_to_be_written(tmp_path: Path):
    """Of 128 MB in arrays of numpy, as a GPU's state is copied, 64 MB at most are there twice."""
    tree = {name: np.ones((16, 1024, 1024), np.float32) for name in "ab"}
    leaves = {name: jnp.zeros(1) for name in "ab"}
    staged.write(tmp_path, 1, Detached(leaves, leaf_sums(leaves)))  # what is imported for the first one
    reset_peak()
    before = resident_bytes("VmRSS")
    staged.write(tmp_path, 2, Detached(tree, leaf_sums(leaves)))
    assert resident_bytes() - before < 64e6


def test_a_write_that_takes_too_long_is_an_error(state_of: Callable[[int], TrainState], tmp_path: Path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(state_of(1), lambda version: None, DEADLINE_S)
    with pytest.raises(StagedError, match="took longer than 0 s"):
        checkpointer.wait(0.0)
    checkpointer.close(DEADLINE_S)
