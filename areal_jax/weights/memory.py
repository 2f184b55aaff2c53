"""The in-memory ParamStore: trainer and hosts in one process.

`publish` copies (and casts) at once, so nothing it holds aliases a buffer that the trainer's next update
donates. Where one host shares the trainer's device, the copy is a donated cast: it overwrites the parameters
being served, so that no second serving copy ever exists.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.types import ArealError, PolicyVersion, VersionedParams
from areal_jax.weights.digest import digest

LOAD_ATTEMPTS = 100
"""How often in a row a version may vanish between its name and its parameters."""

CANARY_TOLERANCE = 1e-3
"""Largest difference, in nats, between a canary's log-prob at the publisher and at the reader."""


class WeightsError(ArealError):
    """Parameters that are not what their publisher published."""


class VersionGoneError(WeightsError):
    """A version that the store does not hold, or holds no more: a newer one was committed meanwhile."""


class ParamStore(Protocol):
    """Where versions meet their parameters. Versions only grow."""

    def publish(
        self, value: VersionedParams, before_commit: Callable[[VersionedParams], None] | None = None
    ) -> VersionedParams: ...
    def latest(self) -> PolicyVersion | None: ...
    def load(self, version: PolicyVersion, shardings: Any) -> VersionedParams: ...


class _Published(NamedTuple):
    value: VersionedParams
    canary: np.ndarray


class MemoryStore:
    """`probe(params) -> (n,)` gives the log-probs of a fixed sequence; readers must get the publisher's.

    `is_exclusive`: one reader, on the publisher's device, that adopts before its next use of the parameters;
    then publishing overwrites what it serves. The caller serialises the two (`runtime.turns`).
    """

    def __init__(
        self, probe: Callable[[Any], jax.Array], dtype: str = "float32", is_exclusive: bool = False
    ) -> None:
        self._probe = probe
        self._dtype = dtype
        self._is_exclusive = is_exclusive
        self._latest: _Published | None = None
        self._lock = threading.Lock()

    def publish(
        self, value: VersionedParams, before_commit: Callable[[VersionedParams], None] | None = None
    ) -> VersionedParams:
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
                raise WeightsError(
                    f"version {value.version} (digest {wire.digest}) cannot be published after version "
                    f"{known.version} (digest {known.digest}): versions only grow"
                )
            serving = known.params if known is not None and self._is_exclusive else None
            wire = wire_copy(value, self._dtype, onto=serving)
            published = _Published(wire, np.asarray(self._probe(wire.params)))
            if before_commit is not None:
                before_commit(wire)
            self._latest = published
            return wire

    def latest(self) -> PolicyVersion | None:
        published = self._latest
        return published.value.version if published else None

    def load(self, version: PolicyVersion, shardings: Any) -> VersionedParams:
        """The parameters of `version` on the reader's devices, digest and canary checked there.

        Only the latest version is kept. Raises VersionGoneError for another one, WeightsError for parameters
        that differ from those published, or a reader that computes something else with them.
        """
        published = self._latest
        if published is None or published.value.version != version:
            raise VersionGoneError(
                f"version {version} is not in the store, which holds {self.latest()}; load latest()"
            )
        params = jax.device_put(published.value.params, shardings)
        loaded = digest(params)
        if loaded != published.value.digest:
            raise WeightsError(
                f"version {version} was published with digest {published.value.digest} and arrived with "
                f"{loaded}: its parameters changed on the way; resume from the last checkpoint"
            )
        gap = float(np.max(np.abs(np.asarray(self._probe(params)) - published.canary)))
        if not gap <= CANARY_TOLERANCE:
            raise WeightsError(
                f"the canary's log-prob under version {version} differs by {gap:.2g} between trainer and "
                "host: the host does not compute what the trainer does; compare their devices and flags"
            )
        return published.value._replace(params=params)


def load_latest(store: ParamStore, shardings: Any) -> VersionedParams:
    """The latest version on the reader's devices, also when the publisher commits the next one meanwhile.

    Raises VersionGoneError while nothing is published, and after LOAD_ATTEMPTS.
    """
    for _ in range(LOAD_ATTEMPTS):
        version = store.latest()
        if version is None:
            break
        try:
            return store.load(version, shardings)
        except VersionGoneError:
            continue
    raise VersionGoneError(f"no version could be loaded; the store's latest is {store.latest()}")


def wire_copy(value: VersionedParams, dtype: str, onto: Any = None) -> VersionedParams:
    """A copy of the parameters in `dtype` that shares no buffer with them; overwrites `onto` if given."""
    params = _copy(value.params, dtype) if onto is None else _overwrite(onto, value.params, dtype)
    is_same = all(leaf.dtype == dtype for leaf in jax.tree.leaves(value.params))
    return VersionedParams(value.version, params, value.digest if is_same else digest(params))


@functools.partial(jax.jit, static_argnames="dtype")
def _copy(params: Any, dtype: str) -> Any:
    return jax.tree.map(lambda leaf: jnp.copy(leaf).astype(dtype), params)


# keep_unused: an argument that is read by nothing would otherwise be left out, and so never donated.
@functools.partial(jax.jit, static_argnames="dtype", donate_argnums=0, keep_unused=True)
def _overwrite(serving: Any, params: Any, dtype: str) -> Any:
    del serving  # the results take its buffers
    return jax.tree.map(lambda leaf: jnp.copy(leaf).astype(dtype), params)
