"""The store of weights versions in memory, for a trainer and hosts in one process.

`publish` copies (and casts) the parameters at once, so the store shares no buffer with the train state, which
the trainer's next update donates. If the only host shares the trainer's device, the copy is written over the
parameters that the host decodes with, so the device never holds two copies for decoding.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import numpy as np

from areal_jax.types import PolicyVersion, VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.errors import VersionGoneError, WeightsError
from areal_jax.weights.links import Weights
from areal_jax.weights.store import BeforeCommit, Probe, is_published, spans_devices, wire_copy


class MemoryStore:
    """Publishes and loads weights versions within one process; holds the latest version only.

    `probe` computes log-probs of a fixed sequence, in which reader and publisher must agree. `dtype`: the
    dtype of the published copy. `is_exclusive`: publishing overwrites the parameters that the reader decodes
    with. There must then be a single reader, on the publisher's device, which adopts the published version
    before it uses parameters again, and which never runs while the publisher runs (`runtime.turns`).
    """

    def __init__(self, probe: Probe, dtype: str = "float32", is_exclusive: bool = False) -> None:
        self._probe = probe
        self._dtype = dtype
        self._is_exclusive = is_exclusive
        self._latest: tuple[VersionedParams, Callable[[], np.ndarray]] | None = None
        """The published version, and a function that computes its log-probs of a fixed sequence only once."""
        self._lock = threading.Lock()

    def publish(self, value: VersionedParams, before_commit: BeforeCommit | None = None) -> VersionedParams:
        """Publishes `value`; returns the copy that readers will load: cast, with its own digest.

        `before_commit` is called with that copy before any reader can load the copy; if the call raises,
        nothing is published. Publishing the latest version again with an equal digest does nothing. Raises
        WeightsError for an older version, or for other bits under the latest version's number.
        """
        with self._lock:
            known = self._latest[0] if self._latest else None
            if known is not None and value.version <= known.version:
                is_published(wire_copy(value, self._dtype), known)  # raises WeightsError if not
                return known
            # Overwriting these is safe: the one reader adopts before its next use of them.
            serving = known.params if known is not None and self._is_exclusive else None
            # Readers use these very arrays: a copy that fails must raise here and not in a host.
            wire = jax.block_until_ready(wire_copy(value, self._dtype, onto=serving))
            if before_commit is not None:
                before_commit(wire)
            canary = cache(lambda: np.asarray(self._probe(wire.params)))
            if spans_devices(jax.tree.map(lambda leaf: leaf.sharding, wire.params)):
                # Now: a reader's thread must not start collectives beside those of the trainer's next update.
                canary()
            self._latest = wire, canary
            return wire

    def wait(self, deadline_s: float) -> None:
        """Returns at once: `publish` itself commits each version."""

    def close(self, deadline_s: float) -> None:
        """Does nothing: there is no file or thread to close."""

    def latest(self) -> PolicyVersion | None:
        published = self._latest
        return published[0].version if published else None

    def load(self, version: PolicyVersion, shardings: Any) -> VersionedParams:
        """Returns the parameters of `version`, laid out by `shardings`.

        Published arrays that already have this layout are returned without a copy or a check. Otherwise the
        digest and the log-probs of a fixed sequence are computed on the reader's devices and checked. Raises
        VersionGoneError if `version` is not the latest, WeightsError if digest or log-probs differ from the
        publisher's.
        """
        published = self._latest
        if published is None or published[0].version != version:
            raise VersionGoneError.of(version, self.latest())
        value, canary = published
        loaded = value._replace(params=Weights(shardings)(value.params))
        # The link returns arrays of the right layout unchanged: then these are the published arrays.
        if not _lie_alike(value.params, loaded.params):
            if (found := digest(loaded.params)) != value.digest:
                raise WeightsError(
                    f"version {version} was published with digest {value.digest}, but arrived with digest "
                    f"{found}: its parameters changed during the transfer; resume the run from its last "
                    "checkpoint"
                )
            self._probe.require(version, canary(), np.asarray(self._probe(loaded.params)))
        return loaded


def _lie_alike(one: Any, other: Any) -> bool:
    """Whether both trees have the same layout; `other`, made from `one` by a link, is then no copy."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in pairs)
