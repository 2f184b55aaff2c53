"""Weights versions in a shared folder: a publisher writes versions, readers in any process load them.

`publish` copies the parameters on the device and returns. A thread then writes the version to disk, calls
`before_commit`, and commits the version by renaming its folder. Readers need only the folder: they load a
version onto their own mesh and check every leaf. A reader that has found a version damaged skips that version
until it is replaced.

If several processes train together, each process writes its own shards, and the first process does everything
else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from areal_jax.config.tree import Config
from areal_jax.parallel.agreement import leads
from areal_jax.types import PolicyVersion, VersionedParams
from areal_jax.weights import staged
from areal_jax.weights.errors import StagedError, VersionDamagedError, VersionGoneError
from areal_jax.weights.folder import require_room, weights_folder
from areal_jax.weights.manifest import MANIFEST, combine, committed, read_manifest
from areal_jax.weights.publishing import Outgoing, Publisher, PublisherSettings
from areal_jax.weights.staged import Detached
from areal_jax.weights.store import BeforeCommit, Fetched, Probe

CANARY = "canary"


class OrbaxReader:
    """Loads weights versions from a folder, and checks files and leaves as module `staged` describes.

    `probe` computes log-probs of a fixed sequence; a load fails if they differ from the publisher's.
    """

    def __init__(self, folder: Path, probe: Probe) -> None:
        self._folder, self._probe = folder, probe
        self._refused: dict[PolicyVersion, tuple[int, int]] = {}

    def latest(self) -> PolicyVersion | None:
        """Returns the newest version in the folder that this reader has not found damaged, or None."""
        for version in reversed(committed(self._folder)):
            if version not in self._refused or self._identity(version) != self._refused[version]:
                return version
        return None

    def load(self, version: PolicyVersion, shardings: Any) -> VersionedParams:
        """Returns the parameters of `version` in their published dtype, laid out by `shardings`.

        Raises VersionGoneError if the version does not exist, or was removed or replaced during the read;
        VersionDamagedError if a file or leaf, which the message names, differs from what was written, or if
        the version's tree is not that of `shardings`; WeightsError if the log-probs of a fixed sequence
        differ from the publisher's.
        """
        return self.fetch(version, shardings)()

    def fetch(self, version: PolicyVersion, shardings: Any) -> Fetched:
        """Reads `version` as `load` does; the returned function checks digests and log-probs."""
        path, identity = self._folder / str(version), self._identity(version)
        if identity is None:
            raise VersionGoneError.of(version, self.latest())
        with self._refusing(version, identity):
            manifest = read_manifest(path)
            like = staged.described(str(path), manifest.leaves, shardings)
            checked = staged.fetch(path, jax.tree.unflatten(jax.tree.structure(shardings), like.values()))

        def check() -> VersionedParams:
            with self._refusing(version, identity):
                params = checked()
            canary = np.asarray(manifest.about.get(CANARY, ()))
            self._probe.require(version, canary, np.asarray(self._probe(params)))
            return VersionedParams(version, params, combine(manifest.leaves))

        return check

    @contextmanager
    def _refusing(self, version: PolicyVersion, identity: tuple[int, int]) -> Iterator[None]:
        """Refuses the version if the `with` block finds it damaged; see `load` for the errors.

        `identity`: that of the version when the read began.
        """
        try:
            yield
        except (StagedError, VersionDamagedError) as error:
            # Files that vanish during a read look like damage: only a version that is still there is damaged.
            if self._identity(version) != identity:
                raise VersionGoneError(
                    f"version {version} was removed or replaced while it was read; load the version "
                    "that latest() returns"
                ) from None
            self._refused[version] = identity
            raise VersionDamagedError(str(error)) from None

    def _identity(self, version: PolicyVersion) -> tuple[int, int] | None:
        """Returns (inode, mtime in ns) of the version's manifest; None if the version does not exist.

        Both numbers change when the version is replaced.
        """
        try:
            found = (self._folder / str(version) / MANIFEST).stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns


class OrbaxStore(OrbaxReader, Publisher):
    """Publishes weights versions to a folder and loads them; keeps only the newest `keep` versions.

    A folder may have only one publisher at a time. The publisher's first commit takes over the folder from an
    earlier process. If the folder has a version of the same number, the commit replaces that version, unless
    its bits are equal (a resumed run publishes its version again). The commit removes all other versions,
    because the earlier process may have written them after the journal's last event.
    """

    def __init__(self, folder: Path, settings: PublisherSettings, keep: int = 3) -> None:
        OrbaxReader.__init__(self, folder, settings.probe)
        Publisher.__init__(self, f"writing versions to {folder}", settings)
        self._keep = keep

    @classmethod
    def of_run(cls, config: Config, run: Path, settings: PublisherSettings, version_bytes: int) -> OrbaxStore:
        """Returns the store of the run in folder `run`.

        Raises ArealError if weights.dir has too little space for versions of `version_bytes` bytes.
        """
        require_room(config, run, version_bytes)
        return cls(weights_folder(config, run), settings, config.weights.keep_versions)

    def publish(self, value: VersionedParams, before_commit: BeforeCommit | None = None) -> VersionedParams:
        """Publishes as Publisher.publish does.

        `before_commit` is called once the version is complete on disk.
        """
        is_first = self._committed is None
        wire = super().publish(value, before_commit)
        if is_first and jax.process_count() > 1:
            # `_holds` runs programs in the committing thread. Until it returns, no other thread may start
            # one: the processes would start the programs of their common devices in different orders.
            self.wait(self._settings.deadline_s)
        return wire

    def _commit(self, version: Outgoing) -> None:
        wire, is_first = version.wire, self._committed is None
        if is_first:
            self._folder.mkdir(parents=True, exist_ok=True)
        # Old versions are removed before the write, while no reader is busy with the new version.
        there = committed(self._folder)
        void = [v for v in there if v > wire.version] if is_first else there[: -max(1, self._keep - 1)]
        self._remove(void)
        version.leaves()
        if not (is_first and self._holds(wire)):
            about = lambda: {CANARY: np.asarray(version.canary, np.float64).tolist()}  # noqa: E731
            tree = Detached(wire.params, version.sums)
            deadline_s = self._settings.deadline_s
            staged.write(self._folder, wire.version, tree, about, version.announce, deadline_s)
        self._remove(committed(self._folder)[: -1 if is_first else -self._keep])

    def _remove(self, versions: list[PolicyVersion]) -> None:
        if leads():
            staged.remove(self._folder, versions)

    def _holds(self, wire: VersionedParams) -> bool:
        """Whether the folder already has `wire`, the version to commit, undamaged and with equal bits."""
        path = self._folder / str(wire.version)
        try:
            return combine(read_manifest(path).leaves) == wire.digest and bool(staged.read(path, wire.params))
        except StagedError:
            return False
