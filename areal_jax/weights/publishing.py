"""Publishing of weights: the caller's thread copies the parameters, and another thread commits the copy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import jax

from areal_jax.parallel.agreement import leads
from areal_jax.types import VersionedParams
from areal_jax.weights.digest import name_sums
from areal_jax.weights.errors import WeightsError
from areal_jax.weights.manifest import combine
from areal_jax.weights.store import BeforeCommit, Probe, is_published, start_copy
from areal_jax.weights.writer import OnFailure, Writer


@dataclass(frozen=True)
class PublisherSettings:
    probe: Probe
    dtype: str = "float32"
    """Dtype of the published parameters."""
    deadline_s: float = 600.0
    """Longest wait, in seconds, for space in the commit queue, and for the trainer's other processes."""
    on_failure: OnFailure | None = None
    """Called at once with the error of a failed commit; the publisher's next call raises that error."""


class Outgoing(NamedTuple):
    """A version to commit. `wire`: the copy of the parameters that readers will load.

    `sums`: the checksum of each leaf of the copy. `canary`: log-probs of a fixed sequence under the copy. The
    devices may still be computing `sums` and `canary`. `before_commit` is called before readers can load
    the version.
    """

    wire: VersionedParams
    sums: jax.Array
    canary: jax.Array
    before_commit: BeforeCommit | None

    def leaves(self) -> dict[str, str]:
        """Returns each leaf's digest by name. Raises WeightsError if they contradict `wire.digest`."""
        leaves = name_sums(self.wire.params, self.sums)
        if (found := combine(leaves)) != self.wire.digest:
            raise WeightsError(
                f"version {self.wire.version} was published with digest {self.wire.digest}, but has digest "
                f"{found} before its commit: its parameters changed; resume the run from the last checkpoint"
            )
        return leaves

    def announce(self) -> None:
        """Calls `before_commit(wire)`, if it was given, in the first process of the trainer only."""
        if self.before_commit is not None and leads():
            self.before_commit(self.wire)


class Publisher(Writer, ABC):
    """Publishes weights versions: a thread commits one version at a time, in order of publication.

    A subclass defines the commit (`_commit`). `what`: what the thread does, for error messages. Only one
    thread at a time may call the publisher's methods.
    """

    def __init__(self, what: str, settings: PublisherSettings) -> None:
        # One version may wait: every further one would hold one more copy of the parameters.
        super().__init__(what, 1, settings.on_failure)
        self._settings = settings
        # Both are kept without parameters, which would keep a copy alive on the device.
        self._queued: VersionedParams | None = None
        self._committed: VersionedParams | None = None

    def publish(self, value: VersionedParams, before_commit: BeforeCommit | None = None) -> VersionedParams:
        """Queues a version to commit; returns the copy that readers will load: cast, with its own digest.

        One version can wait in the queue while another version is committed. If the queue is full, the call
        waits for space, at most `settings.deadline_s` seconds; it never waits for a reader. The committing
        thread calls `before_commit` with the returned copy before any reader can load that copy. Raises
        WeightsError as ParamPublisher.publish does, StagedError if the queue is still full at the deadline,
        and the error of an earlier failed commit.
        """
        # Every program starts in the caller's thread: processes that publish together must start the programs
        # of their common devices in one order, and the trainer's next update is one of them.
        wire, sums = start_copy(value, self._settings.dtype)
        # A version that failed and is no longer pending may be published again.
        if is_published(wire, self._queued if self._pending else self._committed):
            return wire
        version = Outgoing(wire, sums, self._settings.probe(wire.params), before_commit)
        self.submit(lambda: self._complete(version), self._settings.deadline_s)
        self._queued = wire._replace(params=None)
        return wire

    @abstractmethod
    def _commit(self, version: Outgoing) -> None:
        """Completes the version, calls `version.announce`, then lets readers load the version.

        Runs in the committing thread.
        """

    def _complete(self, version: Outgoing) -> None:
        self._commit(version)
        self._committed = version.wire._replace(params=None)
