"""The ParamStore on a shared file system: a publisher writes versions, readers of any process adopt them.

`publish` copies on the device and returns; a thread writes, tells `before_commit` once the version is whole
on disk, and commits it. Readers look at the folder alone, restore onto their own mesh, and check every leaf.
A version that a reader refuses is named by its `latest` no more, until it is replaced.

Where several processes train as one, each publishes its own shards, and the first of them alone tells.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from areal_jax.parallel.agreement import leads
from areal_jax.types import PolicyVersion, VersionedParams
from areal_jax.weights import staged
from areal_jax.weights.digest import combine
from areal_jax.weights.staged import MANIFEST, Detached, Manifest, OnFailure, StagedError, Writer
from areal_jax.weights.store import (
    BeforeCommit,
    Probe,
    VersionDamagedError,
    VersionGoneError,
    refuse_old,
    require_canary,
    start_copy,
)

CANARY = "canary"


class OrbaxStore:
    """`keep` versions stay on disk; one that is being read when it goes is VersionGoneError to its reader.

    One publisher a folder. Its first version takes the folder over: other bits under that version are
    replaced (a resumed run reissued it), and once it is committed every other version goes, since it is an
    earlier process's, which may have got further than its journal.
    """

    def __init__(
        self,
        folder: Path,
        probe: Probe,
        dtype: str = "float32",
        keep: int = 3,
        deadline_s: float = 600.0,
        on_failure: OnFailure | None = None,
    ) -> None:
        """`on_failure` hears at once of a version that could not be committed; the next call raises it."""
        self._folder, self._probe, self._dtype, self._keep = folder, probe, dtype, keep
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._writer = Writer(f"writing versions to {folder}", 1, on_failure)
        self._published: VersionedParams | None = None  # without its parameters
        self._committed: VersionedParams | None = None
        self._refused: dict[PolicyVersion, tuple[int, int]] = {}

    # --- publisher ------------------------------------------------------------------------------------------

    def publish(self, value: VersionedParams, before_commit: BeforeCommit | None = None) -> VersionedParams:
        """Make `value` the latest soon; returns it as readers will see it (cast, with that one's digest).

        One version is written and one more may wait; the next publish waits for room, at most `deadline_s`.
        `before_commit` hears the value in the writing thread, when it is whole on disk and no reader can load
        it. Raises WeightsError: as ParamStore says, or for an earlier version that could not be committed.

        Of several processes, all must run the programs of their devices in one order: there the canary is
        computed before this returns, and the first version, which may be read back, is waited for.
        """
        is_alone = jax.process_count() == 1
        with self._lock:
            (wire, sums), known = start_copy(value, self._dtype), self._published
            if known is not None and value.version <= known.version:
                if (wire.version, wire.digest) == (known.version, known.digest):
                    return wire
                refuse_old(wire, known)
            canary = partial(self._probe, wire.params) if is_alone else _computed(self._probe(wire.params))
            commit = partial(self._commit, wire, sums, canary, before_commit)
            with self._heard():
                self._writer.submit(commit, self._deadline_s)
                if known is None and not is_alone:
                    self._writer.wait(self._deadline_s)
            self._published = wire._replace(params=None)
            return wire

    def wait(self, deadline_s: float) -> None:
        with self._lock, self._heard():
            self._writer.wait(deadline_s)

    def close(self, deadline_s: float) -> None:
        with self._lock, self._heard():
            self._writer.close(deadline_s)

    @contextmanager
    def _heard(self) -> Iterator[None]:
        """A version that could not be committed may be published again, once nothing newer is on its way."""
        try:
            yield
        except BaseException:
            if self._writer.is_idle:
                self._published = self._committed
            raise

    def _commit(
        self,
        wire: VersionedParams,
        sums: jax.Array,
        probe: Callable[[], Any],
        before_commit: BeforeCommit | None,
    ) -> None:
        """In the writing thread. What must go goes before the write, not while readers adopt."""
        is_first = self._committed is None
        if is_first:
            self._folder.mkdir(parents=True, exist_ok=True)
        there = staged.committed(self._folder)
        void = [v for v in there if v > wire.version] if is_first else there[: -max(1, self._keep - 1)]
        self._remove(void)
        if not (is_first and self._holds(wire)):
            canary = probe()  # on its way while Orbax writes
            about = lambda: {CANARY: np.asarray(canary, np.float64).tolist()}  # noqa: E731
            tell = partial(before_commit, wire) if before_commit is not None else None
            tree = Detached(wire.params, sums)
            staged.write(self._folder, wire.version, tree, about, tell, wire.digest, self._deadline_s)
        self._committed = wire._replace(params=None)
        self._remove(staged.committed(self._folder)[: -1 if is_first else -self._keep])

    def _remove(self, versions: list[PolicyVersion]) -> None:
        if leads():
            staged.remove(self._folder, versions)

    def _holds(self, wire: VersionedParams) -> bool:
        """Whether an earlier process committed these very bits, whole."""
        path = self._folder / str(wire.version)
        try:
            return combine(staged.read_manifest(path).leaves) == wire.digest and bool(
                staged.read(path, wire.params)
            )
        except StagedError:
            return False

    # --- readers --------------------------------------------------------------------------------------------

    def latest(self) -> PolicyVersion | None:
        """The newest version in the folder that this reader has not refused."""
        for version in reversed(staged.committed(self._folder)):
            if version not in self._refused or self._identity(version) != self._refused[version]:
                return version
        return None

    def load(self, version: PolicyVersion, shardings: Any) -> VersionedParams:
        """The parameters of `version`, in the dtype of the wire, laid out by the tree of shardings.

        Raises VersionGoneError for a version that is not there, or was pruned or replaced meanwhile;
        VersionDamagedError, by file or leaf, for one that is not as it was written or not of this tree;
        WeightsError where this reader computes something else with it than the publisher.
        """
        path, identity = self._folder / str(version), self._identity(version)
        if identity is None:
            raise VersionGoneError(
                f"version {version} is not in the store, which holds {self.latest()}; load latest()"
            )
        try:
            manifest = staged.read_manifest(path)
            params = staged.read(path, _like(path, manifest, shardings))
        except StagedError as error:
            if self._identity(version) != identity:
                raise VersionGoneError(
                    f"version {version} was pruned or replaced while it was read; load latest()"
                ) from None
            self._refused[version] = identity
            raise VersionDamagedError(str(error)) from None
        canary = np.asarray(manifest.about.get(CANARY, ()))
        require_canary(version, canary, np.asarray(self._probe(params)))
        return VersionedParams(version, params, combine(manifest.leaves))

    def _identity(self, version: PolicyVersion) -> tuple[int, int] | None:
        """Tells a version from one that replaces it; None where there is none."""
        try:
            found = (self._folder / str(version) / MANIFEST).stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns


def _computed(canary: jax.Array) -> Callable[[], np.ndarray]:
    found = np.asarray(canary)
    return lambda: found


def _like(path: Path, manifest: Manifest, shardings: Any) -> Any:
    """The manifest's shapes and dtypes on the reader's shardings. Raises StagedError for another tree."""
    names = list(staged.to_plain(shardings))
    if missing := set(names) ^ set(manifest.leaves):
        raise StagedError(
            f"{path} holds another tree than this reader's: {', '.join(sorted(missing)[:4])} stand in one of "
            "them only; was it published by another model's run?"
        )
    described = [staged.described(manifest.leaves[name]) for name in names]
    leaves = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        for leaf, sharding in zip(described, jax.tree.leaves(shardings), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(shardings), leaves)
