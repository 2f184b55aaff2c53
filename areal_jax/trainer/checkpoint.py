"""Checkpoints of the train state through Orbax: staged, written, verified by digest, committed by a rename.

`checkpoints/<version>/` holds Orbax's `state/` and `manifest.json` with the digests of every file and every
leaf. A folder without a manifest was never committed; one that does not match it is refused by name, and the
one before is used. Files are checked before Orbax reads them: its readers leave running tasks behind when
they fail.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax

from areal_jax.trainer.state import TrainState
from areal_jax.types import ArealError
from areal_jax.weights.digest import leaf_digests

MANIFEST = "manifest.json"


class CheckpointError(ArealError):
    """A checkpoint that cannot be used; the message says which and why."""


class Restored(NamedTuple):
    state: TrainState | None
    """None where no checkpoint can be used."""
    refused: tuple[str, ...]
    """Newer checkpoints that were refused, and why."""


class Checkpointer:
    """Writes off the caller's path: `save` copies the state to the host and returns; one write at a time."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._last_saved: int | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, state: TrainState, on_commit: Callable[[int], None], deadline_s: float) -> None:
        """Write `state`; `on_commit(version)` is called from the writer once it is whole on disk.

        Does nothing for the version saved last. One that lies there from an earlier process is written anew:
        it may be the damaged one for whose sake that version was trained again.
        """
        self.wait(deadline_s)
        version = int(state.version)
        if version == self._last_saved:
            return
        digests = leaf_digests(state)
        on_host = jax.device_get(state)
        self._pending = self._writer.submit(self._write, version, on_host, digests, on_commit)
        self._last_saved = version

    def wait(self, deadline_s: float) -> None:
        """Until the write under way is committed; raises what it raised, CheckpointError at the deadline."""
        if self._pending is None:
            return
        try:
            self._pending.result(timeout=deadline_s)
        except TimeoutError:
            raise CheckpointError(
                f"writing a checkpoint to {self._folder} took longer than {deadline_s:.0f} s; is the disk "
                "full or gone?"
            ) from None
        self._pending = None

    def close(self, deadline_s: float) -> None:
        self.wait(deadline_s)
        self._writer.shutdown()

    def kept(self) -> list[int]:
        """Committed versions, oldest first."""
        return committed(self._folder)

    def _write(
        self, version: int, state: Any, digests: dict[str, str], on_commit: Callable[[int], None]
    ) -> None:
        import orbax.checkpoint as ocp

        staged, final = self._folder / f".staged-{version}", self._folder / str(version)
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir()
        with ocp.PyTreeCheckpointer(use_ocdbt=True) as checkpointer:
            checkpointer.save((staged / "state").absolute(), to_plain(state))
        files = _file_digests(staged / "state")
        manifest = {"version": version, "written_s": time.time(), "leaves": digests, "files": files}
        with (staged / MANIFEST).open("w") as file:
            json.dump(manifest, file)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(final, ignore_errors=True)
        staged.rename(final)
        _fsync(self._folder)
        self._prune(version)
        on_commit(version)

    def _prune(self, newest: int) -> None:
        """Keep `newest` and the `keep - 1` before it; whatever is newer was refused, and does not count."""
        before = [version for version in self.kept() if version < newest]
        for old in before[: max(0, len(before) - self._keep + 1)]:
            shutil.rmtree(self._folder / str(old))


def committed(folder: Path) -> list[int]:
    """Versions whose folder has a manifest, oldest first."""
    if not folder.is_dir():
        return []
    found = (path for path in folder.iterdir() if path.name.isdigit() and (path / MANIFEST).exists())
    return sorted(int(path.name) for path in found)


def restore(folder: Path, like: TrainState) -> Restored:
    """The newest checkpoint whose bits are those its manifest names, on the shardings of `like`.

    `like` is a tree of jax.ShapeDtypeStruct (`Learner.abstract_state`).
    """
    refused = []
    for version in reversed(committed(folder)):
        try:
            return Restored(_read(folder / str(version), like), tuple(refused))
        except CheckpointError as error:
            refused.append(str(error))
    return Restored(None, tuple(refused))


def _read(path: Path, like: TrainState) -> TrainState:
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        leaves, files = dict(manifest["leaves"]), dict(manifest["files"])
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise CheckpointError(f"checkpoint {path}: its manifest is damaged: {_brief(error)}") from None
    found = _file_digests(path / "state")
    for name in files:
        if found.get(name) != files[name]:
            what = f"digest {found[name]}, was {files[name]}" if name in found else "missing"
            raise CheckpointError(f"checkpoint {path} is damaged: file {name}: {what}")
    state = _from_orbax(path, like)
    for name, value in leaf_digests(state).items():
        if leaves.get(name) != value:
            raise CheckpointError(
                f"checkpoint {path} is damaged: leaf {name} has digest {value}, was {leaves.get(name)}"
            )
    return state


def _from_orbax(path: Path, like: TrainState) -> TrainState:
    import orbax.checkpoint as ocp

    plain = to_plain(like)
    args = jax.tree.map(
        lambda leaf: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape), plain
    )
    try:
        with ocp.PyTreeCheckpointer(use_ocdbt=True) as checkpointer:
            found = checkpointer.restore((path / "state").absolute(), item=plain, restore_args=args)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise CheckpointError(
            f"checkpoint {path} holds another state than this config's model, optimiser and algorithm have: "
            f"{_brief(error)}"
        ) from None
    return jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in plain])


def _file_digests(folder: Path) -> dict[str, str]:
    """16 hex digits of every file's bytes, by path below `folder`."""
    digests = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            digests[str(path.relative_to(folder))] = hashlib.file_digest(file, "blake2b").hexdigest()[:16]
    return digests


def _brief(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]


def to_plain(state: TrainState) -> dict[str, Any]:
    """The state as a flat dict of leaves by path: few kinds of nodes, so that any tool can read it."""
    named = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in named}


def _fsync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
