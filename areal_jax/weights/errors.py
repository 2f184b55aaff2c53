"""Errors of weights versions: gone, damaged, or of a lost publisher."""

from __future__ import annotations

from areal_jax.types import ArealError, PolicyVersion


class WeightsError(ArealError):
    """Parameters or their log-probs differ from the publisher's, or a version cannot be published."""


class VersionGoneError(WeightsError):
    """The requested version was never committed, or was removed after a newer one was committed."""

    @classmethod
    def of(cls, version: PolicyVersion, newest: PolicyVersion | None) -> VersionGoneError:
        """Returns the error for a `version` that a store does not hold; `newest`: its latest version."""
        return cls(f"version {version} is not in the store; the newest there is {newest}; load that version")


class VersionDamagedError(WeightsError):
    """A version's files or bits differ from those published; the reader's `latest` no longer returns it."""


class PublisherLostError(WeightsError):
    """The publisher cannot be reached, or was lost during a pull; the host keeps its current version."""


class StagedError(WeightsError):
    """A version's folder cannot be written or read.

    The message names the folder, the file or leaf if known, and the cause.
    """
