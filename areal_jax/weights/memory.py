"""The in-memory ParamStore: trainer and hosts in one process.

`publish` copies (and casts) at once, so nothing it holds aliases a buffer that the trainer's next update
donates. Where one host shares the trainer's device, the copy is a donated cast: it overwrites the parameters
being served, so that no second serving copy ever exists.
"""

from __future__ import annotations

import threading
from functools import cached_property
from typing import Any

import jax
import numpy as np

from areal_jax.types import PolicyVersion, VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.store import (
    BeforeCommit,
    Probe,
    VersionGoneError,
    WeightsError,
    refuse_old,
    require_canary,
    wire_copy,
)


class _Published:
    """The value, and its canary at the publisher, computed once a reader on other devices asks."""

    def __init__(self, value: VersionedParams, probe: Probe) -> None:
        self.value, self._probe = value, probe

    @cached_property
    def canary(self) -> np.ndarray:
        return np.asarray(self._probe(self.value.params))


class MemoryStore:
    """`probe(params) -> (n,)` gives the log-probs of a fixed sequence; readers must get the publisher's.

    `is_exclusive`: one reader, on the publisher's device, that adopts before its next use of the parameters;
    then publishing overwrites what it serves. The caller serialises the two (`runtime.turns`).
    """

    def __init__(self, probe: Probe, dtype: str = "float32", is_exclusive: bool = False) -> None:
        self._probe = probe
        self._dtype = dtype
        self._is_exclusive = is_exclusive
        self._latest: _Published | None = None
        self._lock = threading.Lock()

    def publish(self, value: VersionedParams, before_commit: BeforeCommit | None = None) -> VersionedParams:
        """Make `value` the latest; returns it as readers will see it (cast, with the digest of the cast).

        `before_commit` hears that value before any reader can load it: what it records comes first.
        Publishing an existing version with an equal digest does nothing; an older one, or other bits under
        the same version, raise WeightsError.
        """
        with self._lock:
            known = self._latest.value if self._latest else None
            if known is not None and value.version <= known.version:
                wire = wire_copy(value, self._dtype)
                if value.version == known.version and wire.digest == known.digest:
                    return known
                refuse_old(wire, known)
            serving = known.params if known is not None and self._is_exclusive else None
            wire = jax.block_until_ready(wire_copy(value, self._dtype, onto=serving))
            if before_commit is not None:
                before_commit(wire)
            self._latest = _Published(wire, self._probe)
            return wire

    def wait(self, deadline_s: float) -> None:
        """Nothing to wait for: what is published is committed."""

    def close(self, deadline_s: float) -> None:
        """Nothing to close."""

    def latest(self) -> PolicyVersion | None:
        published = self._latest
        return published.value.version if published else None

    def load(self, version: PolicyVersion, shardings: Any) -> VersionedParams:
        """The parameters of `version` on the reader's devices, digest and canary checked there.

        Where they lie there already they are the published arrays themselves, and there is nothing to check.
        Only the latest version is kept. Raises VersionGoneError for another one, WeightsError for parameters
        that differ from those published, or a reader that computes something else with them.
        """
        published = self._latest
        if published is None or published.value.version != version:
            raise VersionGoneError(
                f"version {version} is not in the store, which holds {self.latest()}; load latest()"
            )
        value = published.value
        loaded = value._replace(params=jax.device_put(value.params, shardings))
        if not _lie_alike(value.params, loaded.params):
            _check(loaded, published.canary, self._probe)
        return loaded


def _lie_alike(one: Any, other: Any) -> bool:
    """Whether the second tree of arrays lies as the first does: then it shares the first one's buffers."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in pairs)


def _check(loaded: VersionedParams, canary: np.ndarray, probe: Probe) -> None:
    if (found := digest(loaded.params)) != loaded.digest:
        raise WeightsError(
            f"version {loaded.version} was published with digest {loaded.digest} and arrived with {found}: "
            "its parameters changed on the way; resume from the last checkpoint"
        )
    require_canary(loaded.version, canary, np.asarray(probe(loaded.params)))
