"""Versions on disk: staged, written by Orbax, synced, committed by a rename, checked when they are read.

`<folder>/<version>/` holds Orbax's `state/` and `manifest.json`. What is written lies in a hidden sibling
until it is whole, so a crash leaves the version before in force. Orbax restores a flipped bit silently, and
leaves running tasks behind when it fails; so files are checked before it opens them, and leaves after:

- the manifest is the canonical form of its contents and holds a digest of them;
- it names every file with its size, and with a checksum those that are parsed (all but the chunks);
- it holds every leaf's digest, taken before writing, compared with that of what was read. Chunks are raw
  bits, uncompressed, so no damage to them goes unseen there.

Where several processes make up a world they write and read together, on a file system that they share: each
its own shards, the first one all else. None goes on before all have come as far, or it is said who has not.

Trainer checkpoints and the Orbax ParamStore both lie on disk this way.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from areal_jax.parallel.agreement import DisagreementError, leads, together
from areal_jax.weights.digest import combine, leaf_digests, leaf_sums, name_sums
from areal_jax.weights.store import WeightsError, copy_with_sums

MANIFEST, STATE = "manifest.json", "state"

DEADLINE_S = 600.0
"""How long the processes of a world wait for each other, where the caller says nothing else."""

FORMAT = 1
"""Raised whenever an older program could not read what is written."""

_LEAF = re.compile(r"(\w+)\[([\d, ]*)\]:[0-9a-f]{8}")
_CHUNK = re.compile(r"\d+(\.\d+)*")


OnFailure = Callable[[BaseException], None]


class StagedError(WeightsError):
    """A version's folder that cannot be written, or not be used; the message says which, where and why."""


class Manifest(NamedTuple):
    version: int
    leaves: dict[str, str]
    """By path: `dtype[shape]:sum`, as `digest.leaf_digests` gives it."""
    files: dict[str, list[Any]]
    """By path below `state`: [bytes, CRC-32 or None for a chunk]."""
    about: dict[str, Any]
    """What the writer adds; plain JSON."""


def to_plain(tree: Any) -> dict[str, Any]:
    """A flat dict of leaves by path: few kinds of nodes, so that any tool can read it."""
    named = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in named}


def committed(folder: Path) -> list[int]:
    """Versions whose folder has a manifest, oldest first."""
    if not folder.is_dir():
        return []
    names = (name for name in os.listdir(folder) if name.isascii() and name.isdigit())
    return sorted(int(name) for name in names if (folder / name / MANIFEST).exists())


# --- writing ------------------------------------------------------------------------------------------------


class Detached(NamedTuple):
    """A tree that outlives the donation of the arrays it is of, and `leaf_sums` of it, maybe on their way."""

    tree: Any
    sums: jax.Array

    @classmethod
    def copy(cls, tree: Any) -> Detached:
        """In the host's memory. Where that is the device's own, the copy is on its way when this returns;
        otherwise no second copy ever lies on the device, and this returns once the transfer has ended.
        """
        leaves = jax.tree.leaves(tree)
        if all(device.platform == "cpu" for leaf in leaves for device in leaf.devices()):
            return cls(*copy_with_sums(tree))
        sums = leaf_sums(tree)
        if all(leaf.is_fully_addressable for leaf in leaves):
            return cls(jax.device_get(tree), sums)
        on_host = [leaf.sharding.with_memory_kind("pinned_host") for leaf in leaves]
        shards = jax.block_until_ready(jax.device_put(leaves, on_host))
        return cls(jax.tree.unflatten(jax.tree.structure(tree), shards), sums)

    def digests(self) -> dict[str, str]:
        return name_sums(self.tree, self.sums)


def write(
    folder: Path,
    version: int,
    tree: Detached,
    about: Callable[[], dict[str, Any]] = dict,
    before_commit: Callable[[], None] | None = None,
    digest: str | None = None,
    deadline_s: float = DEADLINE_S,
) -> None:
    """Commit the tree as `version`, in place of one of that name. One writer a folder.

    `digest`, where given, must be the tree's: what is written is what was published. `about()` goes into the
    manifest as it is. `before_commit` is called once all is on disk, before any reader can see it; what it
    raises ends the write and commits nothing. All processes of a world call this; the first one calls
    `about` and `before_commit`, and each waits at most `deadline_s` for the others at a time. Raises
    StagedError for a disk that does not take it, or another process that failed.
    """
    staged, final = folder / f".staged-{version}", folder / str(version)
    try:
        with together(f"{folder}: a version is begun", deadline_s):
            if leads():
                clear(folder)
                (staged / STATE).mkdir(parents=True)
        leaves = tree.digests()
        if digest is not None and combine(leaves) != digest:
            raise StagedError(
                f"version {version} was published with digest {digest} and is about to be written with "
                f"{combine(leaves)}: its parameters changed meanwhile; resume from the last checkpoint"
            )
        with together(f"{folder}: all shards of a version are written", deadline_s):
            _save(staged / STATE, to_plain(tree.tree))
        with together(f"{folder}: a version is committed", deadline_s):
            if leads():
                contents = {"version": version, "leaves": leaves, "files": _files(staged / STATE)}
                contents |= {"about": about(), "written_s": time.time()}
                _commit(staged, final, contents, before_commit)
    except OSError as error:
        raise StagedError(
            f"{final} could not be written: {error}; see to the disk, then resume: what was committed before "
            "is whole"
        ) from error
    except DisagreementError as error:
        raise StagedError(f"{final} was not written, since another process failed: {error}") from None
    finally:
        if leads():
            shutil.rmtree(staged, ignore_errors=True)


def _commit(
    staged: Path, final: Path, contents: dict[str, Any], before_commit: Callable[[], None] | None
) -> None:
    (staged / MANIFEST).write_bytes(render(contents))
    _sync(staged)
    if before_commit is not None:
        before_commit()
    remove(final.parent, [contents["version"]] if final.exists() else [])
    staged.rename(final)
    _sync_one(final.parent)


def remove(folder: Path, versions: Iterable[int]) -> None:
    """Take versions out of sight at once, then off the disk."""
    for version in versions:
        gone = folder / f".gone-{version}"
        (folder / str(version)).rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def clear(folder: Path) -> None:
    """Remove what a writer that was killed left behind."""
    for path in folder.iterdir():
        if path.name.startswith((".staged-", ".gone-")):
            shutil.rmtree(path, ignore_errors=True)


def render(manifest: Mapping[str, Any]) -> bytes:
    """The one form of these contents, with the digest of them."""
    contents = {"format": FORMAT, **{key: manifest[key] for key in manifest if key != "digest"}}
    text = json.dumps(contents, sort_keys=True).encode()
    whole = {**contents, "digest": hashlib.blake2b(text, digest_size=16).hexdigest()}
    return json.dumps(whole, sort_keys=True, indent=1).encode() + b"\n"


class Writer:
    """Writes off the caller's path: one at a time, in order, and at most `waiting` behind it.

    `on_failure` hears at once, in the writing thread, what the next call here raises.
    """

    def __init__(self, what: str, waiting: int = 0, on_failure: OnFailure | None = None) -> None:
        self._what, self._waiting, self._on_failure = what, waiting, on_failure
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=what)
        self._pending: deque[Future[None]] = deque()

    def submit(self, write: Callable[[], None], deadline_s: float) -> None:
        """Have it written, once there is room. Raises what an earlier write raised; see `wait`."""
        self._settle(self._waiting, deadline_s)
        self._pending.append(self._thread.submit(self._run, write))

    def wait(self, deadline_s: float) -> None:
        """Until nothing is left to write; raises what a write raised, and those behind it go on.

        Raises StagedError at the deadline; then the write goes on.
        """
        self._settle(0, deadline_s)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to write or to be heard of."""
        return not self._pending

    def close(self, deadline_s: float) -> None:
        self.wait(deadline_s)
        self._thread.shutdown()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            if self._on_failure is not None:
                self._on_failure(error)
            raise

    def _settle(self, leave: int, deadline_s: float) -> None:
        end_s = time.monotonic() + deadline_s
        while self._pending and (len(self._pending) > leave or self._pending[0].done()):
            first = self._pending[0]
            if not wait([first], max(0.0, end_s - time.monotonic())).done:
                raise StagedError(
                    f"{self._what} took longer than {deadline_s:g} s; is the disk full or gone?"
                )
            self._pending.popleft()
            first.result()


# --- reading ------------------------------------------------------------------------------------------------


def read_manifest(path: Path) -> Manifest:
    """The manifest of one version's folder. Raises StagedError where a single bit of it is not as written."""
    try:
        data = (path / MANIFEST).read_bytes()
        found = json.loads(data)
        is_whole = isinstance(found, dict) and render(found) == data
    except (OSError, ValueError) as error:
        raise StagedError(f"{path} is damaged: {MANIFEST}: {_brief(error)}") from None
    if not is_whole or found["format"] != FORMAT:
        raise StagedError(f"{path} is damaged: {MANIFEST} is not as it was written (format {FORMAT})")
    if str(found["version"]) != path.name:
        raise StagedError(f"{path} holds version {found['version']}; was the folder renamed?")
    return Manifest(found["version"], found["leaves"], found["files"], found["about"])


def described(leaf: str) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a leaf, from the text that the manifest holds of it."""
    match = _LEAF.fullmatch(leaf)
    if match is None:
        raise StagedError(f"a leaf described as {leaf!r}; this areal-jax knows dtype[shape]:sum")
    return jax.ShapeDtypeStruct([int(n) for n in match[2].split(",") if n], jnp.dtype(match[1]))


def read(path: Path, like: Any, is_part: bool = False, deadline_s: float = DEADLINE_S) -> Any:
    """The tree in one version's folder, onto the shapes, dtypes and shardings of `like`.

    `is_part`: `like` may lack leaves that lie there. All processes of a world call this, whatever number of
    them wrote; each reads its own shards, and where one of them refuses what it finds, all do. Raises
    StagedError: a file or leaf that is not as it was written, or another tree than `like`.
    """
    plain = to_plain(like)
    try:
        with together(f"{path}: read", deadline_s):
            manifest = read_manifest(path)
            _require_leaves(path, manifest, plain, is_part)
            _require_files(path, manifest)
            found = _restore(path, plain)
    except DisagreementError as error:
        raise StagedError(f"{path} is refused with another process: {error}") from None
    for name, digest in leaf_digests(found).items():
        if digest != manifest.leaves[name]:
            raise StagedError(
                f"{path} is damaged: leaf {name} has digest {digest}, was {manifest.leaves[name]}"
            )
    return jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in plain])


def _require_leaves(path: Path, manifest: Manifest, plain: Mapping[str, Any], is_part: bool) -> None:
    there = {name: leaf.rpartition(":")[0] for name, leaf in manifest.leaves.items()}
    here = {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in plain.items()}
    for name in sorted(here if is_part else here.keys() | there.keys()):
        if there.get(name) != here.get(name):
            raise StagedError(
                f"{path} holds another tree than is asked for: leaf {name} is {there.get(name, 'missing')} "
                f"there and {here.get(name, 'missing')} here"
            )


def _require_files(path: Path, manifest: Manifest) -> None:
    try:
        found = _files(path / STATE)
    except OSError as error:
        raise StagedError(f"{path} cannot be read: {_brief(error)}") from None
    for name, was in manifest.files.items():
        if found.get(name) != was:
            what = f"bytes and checksum {found[name]}, was {was}" if name in found else "missing"
            raise StagedError(f"{path} is damaged: file {name}: {what}")


def _files(folder: Path) -> dict[str, list[Any]]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): _file(path) for path in paths}


def _file(path: Path) -> list[Any]:
    is_chunk = _CHUNK.fullmatch(path.name) is not None
    return [path.stat().st_size, None if is_chunk else f"{zlib.crc32(path.read_bytes()):08x}"]


# --- Orbax --------------------------------------------------------------------------------------------------


def _handler() -> Any:
    """Orbax's handler alone: staging and commit are ours. A chunk a leaf and shard, as raw as it lies."""
    import orbax.checkpoint as ocp

    return ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)


def _save(folder: Path, plain: Mapping[str, jax.Array]) -> None:
    """Every chunk is synced to the disk when this returns: TensorStore's default."""
    import orbax.checkpoint as ocp
    from etils import epath

    handler = _handler()
    try:
        handler.save(epath.Path(folder.absolute()), args=ocp.args.PyTreeSave(dict(plain)))
    except ValueError as error:  # TensorStore's form of whatever the system says
        raise OSError(_brief(error)) from error
    finally:
        handler.close()


def _restore(path: Path, plain: Mapping[str, Any]) -> dict[str, jax.Array]:
    import orbax.checkpoint as ocp
    from etils import epath

    args = {
        name: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape)
        for name, leaf in plain.items()
    }
    asked = ocp.args.PyTreeRestore(item=dict(plain), restore_args=args, partial_restore=True)
    handler = _handler()
    try:
        return handler.restore(epath.Path((path / STATE).absolute()), args=asked)
    except jax.errors.JaxRuntimeError:  # the reader's own trouble, such as its memory
        raise
    except Exception as error:  # noqa: BLE001 - Orbax wraps whatever its readers meet into that
        raise StagedError(f"{path} cannot be read: {_brief(error)}") from None
    finally:
        handler.close()


# --- small things -------------------------------------------------------------------------------------------


def _sync(folder: Path) -> None:
    """What Orbax left to the system's leisure: all but the leaves, which TensorStore syncs itself."""
    for path in folder.iterdir():
        if path.is_file():
            _sync_one(path)
        elif not (path / ".zarray").exists():
            _sync(path)
    _sync_one(folder)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _brief(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]
