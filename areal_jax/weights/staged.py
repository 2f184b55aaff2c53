"""Versions on disk: written by Orbax, synced, committed by a rename, and checked when they are read.

`<folder>/<version>/` holds Orbax's folder `state/` and the file `manifest.json`. A version is written to a
hidden folder, and renamed when it is complete, so after a crash the previous version is still the newest.
Orbax does not notice a flipped bit, and leaves running tasks behind when it fails. Therefore this module
checks the files before Orbax opens them, and the leaves after Orbax has read them:

- the manifest has one canonical form and contains a digest of its own contents;
- the manifest names every file with its size; for each file that Orbax parses (all files except the chunks,
  which contain the leaves' data) also a checksum;
- the manifest contains every leaf's digest, computed before the leaf was written; the leaf that is read must
  have the same digest. Chunks are uncompressed raw bits, so any damage to a chunk changes a digest.

The processes of a jax.distributed world write and read together, on a shared file system: each process its
own shards, and the first process everything else. They wait for each other after each phase, and an error
names the process that did not arrive.

Trainer checkpoints and published weights versions (`weights.orbax`) both use this layout.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from areal_jax.file_errors import is_full, require_space, space_left
from areal_jax.parallel.agreement import DisagreementError, leads, together
from areal_jax.weights.digest import leaf_digests, name_sums, to_plain
from areal_jax.weights.errors import StagedError, VersionDamagedError
from areal_jax.weights.manifest import MANIFEST, STATE, Manifest, brief, checked_manifest, files, render

DEADLINE_S = 600.0
"""Seconds that the processes of a jax.distributed world wait for each other, if the caller gives no
deadline.
"""

LEAF_FILES_BYTES = 16_384
"""Space that a leaf takes beside its data: descriptions, and the rest of blocks of the file system."""

_LEAF = re.compile(r"(\w+)\[([\d, ]*)\]:[0-9a-f]{8}")


# --- writing ------------------------------------------------------------------------------------------------


class Detached(NamedTuple):
    """A tree of arrays that no program donates.

    `sums`: the checksum of each leaf; the devices may still be computing these.
    """

    tree: Any
    sums: jax.Array


def copy_to_host(tree: Any) -> Any:
    """Returns a copy of `tree` in host memory; once this returns, the buffers of `tree` may be donated.

    Copies one leaf after another, so that other transfers of the device come between two leaves. Starts no
    program: on its device it would wait for all programs that were started before.
    """
    return jax.tree.map(_leaf_to_host, tree)


def _leaf_to_host(leaf: jax.Array) -> np.ndarray | jax.Array:
    if _is_on_device(leaf) and leaf.is_fully_addressable:
        return np.asarray(leaf)
    # numpy would not copy what is in host memory already, and cannot hold the shards of other processes.
    shards = [
        jax.device_put(shard.data, shard.data.sharding.with_memory_kind("pinned_host"), may_alias=False)
        for shard in leaf.addressable_shards
    ]
    on_host = leaf.sharding.with_memory_kind("pinned_host")
    return jax.block_until_ready(jax.make_array_from_single_device_arrays(leaf.shape, on_host, shards))


def _is_on_device(leaf: jax.Array) -> bool:
    """Whether the leaf is in a memory other than the host's."""
    is_of_host = leaf.sharding.memory_kind in ("pinned_host", "unpinned_host")
    return not is_of_host and all(device.platform != "cpu" for device in leaf.devices())


def write(
    folder: Path,
    version: int,
    tree: Detached,
    about: Callable[[], dict[str, Any]] = dict,
    before_commit: Callable[[], None] | None = None,
    deadline_s: float = DEADLINE_S,
) -> None:
    """Writes the tree to disk and commits it as `version`; replaces an existing version of that number.

    Only one program at a time may write to a folder. `about()` returns plain JSON values, which are stored in
    the manifest. `before_commit` is called once all files are on disk, before any reader can see the version;
    if it raises, nothing is committed. All processes of a jax.distributed world must call this function. Only
    the first process calls `about` and `before_commit`; in each phase, every process waits at most
    `deadline_s` seconds for the others. Raises StagedError if the disk or another process fails, ArealError
    if another process misses the deadline.
    """
    # Each phase ends in an agreement: no process may write into a folder before the first one has made it,
    # and the manifest may not be written before all files that it names.
    staged, final = folder / f".staged-{version}", folder / str(version)
    try:
        with together(f"{folder}: a version is begun", deadline_s):
            if leads():
                clear(folder)
                # Asked first, because Orbax fails on a full disk with tracebacks of several threads.
                leaves = jax.tree.leaves(tree.tree)
                require_space(final, sum(leaf.nbytes + LEAF_FILES_BYTES for leaf in leaves))
                (staged / STATE).mkdir(parents=True)
        leaves = name_sums(tree.tree, tree.sums)
        with together(f"{folder}: all shards of a version are written", deadline_s):
            _save(staged / STATE, to_plain(tree.tree))
        with together(f"{folder}: a version is committed", deadline_s):
            if leads():
                contents = {"version": version, "leaves": leaves, "files": files(staged / STATE)}
                contents |= {"about": about(), "written_s": time.time()}
                _commit(staged, final, contents, before_commit)
    except OSError as error:
        raise StagedError(
            f"{final} could not be written: {error}; {space_left(final)}. Free some space or check the disk, "
            "then resume the run: earlier versions are intact"
        ) from error
    except DisagreementError as error:
        raise StagedError(
            f"{final} was not written, because another process failed; resume the run: earlier versions are "
            f"intact. That process's error: {error}"
        ) from None
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
    # A folder cannot be renamed onto another one. After a crash between the two steps no version of this
    # number exists, and the previous one is in force.
    remove(final.parent, [contents["version"]] if final.exists() else [])
    staged.rename(final)
    # A rename survives a power cut once the folder that holds the name is synced.
    _sync_one(final.parent)


def remove(folder: Path, versions: Iterable[int]) -> None:
    """Removes versions: hides each version by one rename, then deletes its files."""
    for version in versions:
        # A rename is atomic and a deletion is not: readers find a complete version or none.
        gone = folder / f".gone-{version}"
        (folder / str(version)).rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def clear(folder: Path) -> None:
    """Removes the unfinished and the half-deleted versions that a killed process left behind."""
    for path in folder.iterdir():
        if path.name.startswith((".staged-", ".gone-")):
            shutil.rmtree(path, ignore_errors=True)


# --- reading ------------------------------------------------------------------------------------------------


def described(what: str, leaves: Mapping[str, str], shardings: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns leaf path -> sharding, and shape and dtype, which are read from the digests `leaves`.

    `what`: the source of the leaves, named in errors. Raises VersionDamagedError if `shardings` and `leaves`
    have different leaf paths, or if a digest does not have the form `dtype[shape]:sum`.
    """
    plain = to_plain(shardings)
    if missing := plain.keys() ^ leaves.keys():
        raise VersionDamagedError(
            f"{what} contains other parameters than this reader's model: {', '.join(sorted(missing)[:4])} "
            "are in only one of them; give the publishing run and this reader the same model"
        )
    return {name: _described(what, leaves[name], sharding) for name, sharding in plain.items()}


def _described(what: str, leaf: str, sharding: Sharding) -> jax.ShapeDtypeStruct:
    match = _LEAF.fullmatch(leaf)
    if match is None:
        raise VersionDamagedError(
            f"{what}: the digest {leaf!r} of a leaf does not have the form dtype[shape]:sum; use the "
            "areal-jax version that wrote these weights"
        )
    shape = [int(n) for n in match[2].split(",") if n]
    return jax.ShapeDtypeStruct(shape, jnp.dtype(match[1]), sharding=sharding)


def read(path: Path, like: Any, is_part: bool = False) -> Any:
    """Returns the tree in the version's folder `path`, as `fetch` describes, after a check of its leaves."""
    return fetch(path, like, is_part)()


def fetch(path: Path, like: Any, is_part: bool = False) -> Callable[[], Any]:
    """Reads the tree in the version's folder `path`, with the shapes, dtypes and shardings of `like`.

    Returns a function that checks the leaves' digests on their devices, and returns the tree. All files are
    checked before, against the manifest. `is_part`: True: `like` may lack leaves that the folder
    has. All processes of a jax.distributed world must call this function, even if another number of processes
    wrote the version; each process reads its own shards. If one process finds that a file or leaf differs
    from what was written, or the tree from `like`, all processes raise StagedError. Raises ArealError if
    another process does not arrive within DEADLINE_S seconds.
    """
    plain = to_plain(like)
    try:
        with together(f"{path}: read", DEADLINE_S):
            manifest = checked_manifest(path)
            _require_leaves(path, manifest, plain, is_part)
            found = _restore(path, plain)
    except DisagreementError as error:
        raise StagedError(
            f"{path} is not used, because another process could not read it. That process's error: {error}"
        ) from None

    # Outside the agreement: every process computes the digests of whole leaves, so all refuse or none does.
    def checked() -> Any:
        for name, digest in leaf_digests(found).items():
            if digest != manifest.leaves[name]:
                raise StagedError(
                    f"{path} is damaged: leaf {name} has digest {digest}, but was written with "
                    f"{manifest.leaves[name]}; check the disk. An older version is used if there is one"
                )
        return jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in plain])

    return checked


def _require_leaves(path: Path, manifest: Manifest, plain: Mapping[str, Any], is_part: bool) -> None:
    there = {name: leaf.rpartition(":")[0] for name, leaf in manifest.leaves.items()}
    here = {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in plain.items()}
    for name in sorted(here if is_part else here.keys() | there.keys()):
        if there.get(name) != here.get(name):
            raise StagedError(
                f"{path} contains other parameters than requested: leaf {name} is "
                f"{there.get(name, 'missing')} in that folder, but {here.get(name, 'missing')} in this "
                "process's model; use the config of the run that wrote the folder"
            )


# --- Orbax --------------------------------------------------------------------------------------------------


def _handler() -> Any:
    """Returns an Orbax handler that writes one uncompressed chunk per leaf and shard, and commits nothing."""
    import orbax.checkpoint as ocp

    # Errors that Orbax logs, or leaves in futures for asyncio to log, with tracebacks, are also raised.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").addFilter(_is_news)
    handlers = ocp.type_handlers.create_type_handler_registry(
        # By default it copies numpy arrays, all at once, in case that the caller changes them.
        (np.ndarray, ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)),
        (jax.Array, ocp.type_handlers.get_type_handler(jax.Array)),
    )
    return ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False, type_handler_registry=handlers)


def _is_news(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return error is None or not is_full(error)


def _save(folder: Path, plain: Mapping[str, jax.Array]) -> None:
    """Writes the leaves; on return every chunk is synced to disk, because TensorStore syncs by default."""
    import orbax.checkpoint as ocp
    from etils import epath

    with closing(_handler()) as handler:
        try:
            handler.save(epath.Path(folder.absolute()), args=ocp.args.PyTreeSave(dict(plain)))
        except ValueError as error:  # TensorStore wraps errors of the operating system in it
            raise OSError(brief(error)) from error


def _restore(path: Path, plain: Mapping[str, Any]) -> dict[str, jax.Array]:
    import orbax.checkpoint as ocp
    from etils import epath

    args = {
        name: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape)
        for name, leaf in plain.items()
    }
    asked = ocp.args.PyTreeRestore(item=dict(plain), restore_args=args, partial_restore=True)
    with closing(_handler()) as handler:
        try:
            return handler.restore(epath.Path((path / STATE).absolute()), args=asked)
        except jax.errors.JaxRuntimeError:  # an error of the reader's devices, such as out of memory
            raise
        except Exception as error:  # noqa: BLE001 - Orbax wraps all kinds of errors of its readers
            raise StagedError(
                f"{path} cannot be read ({brief(error)}); check its permissions and the disk"
            ) from None


# --- small things -------------------------------------------------------------------------------------------


def _sync(folder: Path) -> None:
    """Syncs the folder and all files in it, except the leaves' chunks, which TensorStore has synced."""
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
