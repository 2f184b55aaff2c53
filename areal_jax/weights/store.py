"""What every ParamStore promises, and what all share: errors, the wire copy, the checks at adoption."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.types import ArealError, PolicyVersion, VersionedParams
from areal_jax.weights.digest import combine, digest, leaf_sums, name_sums, on_device

LOAD_ATTEMPTS = 100
"""How often in a row a version may vanish between its name and its parameters."""

CANARY_TOLERANCE = 1e-3
"""Largest difference, in nats, between a canary's log-prob at the publisher and at the reader."""

Probe = Callable[[Any], jax.Array]
"""`probe(params) -> (n,)`: log-probs of a fixed sequence; readers must get the publisher's."""

BeforeCommit = Callable[[VersionedParams], None]
"""Hears a version, as readers will see it, before any of them can load it."""


class WeightsError(ArealError):
    """Parameters that are not what their publisher published."""


class VersionGoneError(WeightsError):
    """A version that the store does not hold, or holds no more: a newer one was committed meanwhile."""


class VersionDamagedError(WeightsError):
    """A version whose files or bits are not those that were published; `latest` names it no more."""


class PublisherLostError(WeightsError):
    """The publisher cannot be reached, or went away in mid-pull; what a reader has stays in force."""


class ParamReader(Protocol):
    """What a host needs of a store."""

    def latest(self) -> PolicyVersion | None:
        """The newest version that can be loaded, as far as this reader knows; cheap."""
        ...

    def load(self, version: PolicyVersion, shardings: Any) -> VersionedParams:
        """The parameters of `version` on the reader's devices, laid out by a tree of shardings, checked.

        Raises VersionGoneError, VersionDamagedError, WeightsError.
        """
        ...


class ParamPublisher(Protocol):
    """What a trainer needs of a store. Versions only grow."""

    def publish(self, value: VersionedParams, before_commit: BeforeCommit | None = None) -> VersionedParams:
        """Make `value` the latest, at once or soon; returns it as readers will see it.

        The value's buffers may be donated once this returns. Publishing an existing version with an equal
        digest does nothing; an older one, or other bits under the same version, raise WeightsError.
        """
        ...

    def wait(self, deadline_s: float) -> None:
        """Until all that was published is committed; raises what kept it from being so."""
        ...

    def close(self, deadline_s: float) -> None:
        """Wait, then publish no more."""
        ...


class ParamStore(ParamReader, ParamPublisher, Protocol):
    """Where versions meet their parameters."""


def load_newer(store: ParamReader, shardings: Any, than: PolicyVersion = -1) -> VersionedParams | None:
    """The newest version beyond `than` that can be loaded, None if there is none: what is in force stays so.

    A version that vanishes gives way to the one that replaced it, a damaged one to the one before it; where
    the publisher is lost there is none. Raises VersionGoneError after LOAD_ATTEMPTS.
    """
    for _ in range(LOAD_ATTEMPTS):
        version = store.latest()
        if version is None or version <= than:
            return None
        try:
            return store.load(version, shardings)
        except VersionGoneError:
            continue
        except VersionDamagedError as error:
            logging.getLogger(__name__).warning("refused: %s", error)
        except PublisherLostError as error:
            logging.getLogger(__name__).warning("%s", error)
            return None
    raise VersionGoneError(f"no version could be loaded; the store's latest is {store.latest()}")


def refuse_old(value: VersionedParams, known: VersionedParams) -> NoReturn:
    """Raises WeightsError: a version that is published already has other bits, or a newer one is."""
    raise WeightsError(
        f"version {value.version} (digest {value.digest}) cannot be published after version "
        f"{known.version} (digest {known.digest}): versions only grow"
    )


def require_canary(version: PolicyVersion, published: np.ndarray, found: np.ndarray) -> None:
    """Raises WeightsError where the reader computes something else with the same parameters."""
    gap = float(np.max(np.abs(found - published))) if found.shape == published.shape else float("nan")
    if not gap <= CANARY_TOLERANCE:
        raise WeightsError(
            f"the canary's log-prob under version {version} differs by {gap:.2g} between trainer and "
            "host: the host does not compute what the trainer does; compare their devices and flags"
        )


def wire_copy(value: VersionedParams, dtype: str, onto: Any = None) -> VersionedParams:
    """A copy of the parameters in `dtype` that shares no buffer with them; overwrites `onto` if given."""
    if onto is None and not _is_of(value, dtype):
        return start_copy(value, dtype)[0]
    params = _copy(value.params, dtype) if onto is None else _overwrite(onto, value.params, dtype)
    return VersionedParams(value.version, params, value.digest if _is_of(value, dtype) else digest(params))


def start_copy(value: VersionedParams, dtype: str) -> tuple[VersionedParams, jax.Array]:
    """`wire_copy`, and the sums of its leaves; both on their way still where no cast changes the digest."""
    params, sums = copy_with_sums(value.params, dtype)
    found = value.digest if _is_of(value, dtype) else combine(name_sums(params, sums))
    return VersionedParams(value.version, params, found), sums


def _is_of(value: VersionedParams, dtype: str) -> bool:
    return all(leaf.dtype == dtype_in(leaf.dtype, dtype) for leaf in jax.tree.leaves(value.params))


def dtype_in(own: Any, dtype: str) -> Any:
    """What a leaf of dtype `own` is among parameters in `dtype`: a quantised matrix's codes stay integers."""
    return dtype if jnp.issubdtype(own, jnp.floating) else own


@functools.partial(jax.jit, static_argnames="dtype")
def copy_with_sums(tree: Any, dtype: str | None = None) -> tuple[Any, jax.Array]:
    """Fresh buffers, cast where a dtype is given, and `leaf_sums` of them. One program, and no cheap one: XLA
    runs those of a CPU in the caller's thread.
    """
    copied = _copy(tree, dtype)
    return copied, leaf_sums(copied)


@functools.partial(jax.jit, static_argnames="dtype")
def _copy(tree: Any, dtype: str | None) -> Any:
    return jax.tree.map(
        lambda leaf: jnp.copy(on_device(leaf)).astype(dtype_in(leaf.dtype, dtype or leaf.dtype)), tree
    )


# keep_unused: an argument that is read by nothing would otherwise be left out, and so never donated.
@functools.partial(jax.jit, static_argnames="dtype", donate_argnums=0, keep_unused=True)
def _overwrite(serving: Any, params: Any, dtype: str) -> Any:
    del serving  # the results take its buffers
    return _copy(params, dtype)
