"""The contract of every ParamStore, and shared code: errors, the copy to publish, checks of loaded copies."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.models.config import is_router
from areal_jax.types import PolicyVersion, VersionedParams
from areal_jax.weights.digest import digest, leaf_sums, name_sums, on_device
from areal_jax.weights.errors import PublisherLostError, VersionDamagedError, VersionGoneError, WeightsError
from areal_jax.weights.manifest import combine

LOAD_ATTEMPTS = 100
"""Number of attempts of `load_newer` if each time the version is removed between `latest` and `load`."""


@dataclass(frozen=True)
class Probe:
    """The canary, log-probs of a fixed sequence: a reader must compute the publisher's, up to rounding.

    A leaf's digest proves its bits. The canary finds a reader that reads them in another layout, or that runs
    another program.
    """

    log_probs: Callable[[Any], jax.Array]
    """`log_probs(params) -> (n,)`, in nats."""
    largest: float = 1e-3
    """Largest accepted difference between publisher and reader in the log-prob of a token, in nats."""
    mean: float = 1e-3
    """Largest accepted mean of these differences, in nats."""

    def __call__(self, params: Any) -> jax.Array:
        return self.log_probs(params)

    def require(self, version: PolicyVersion, published: np.ndarray, found: np.ndarray) -> None:
        """Raises WeightsError if `published`, the publisher's log-probs, and `found`, the reader's, differ by
        more than `largest` or `mean` allow, if they are not the same number, or if one is NaN.
        """
        is_alike = found.shape == published.shape
        gaps = np.abs(found - published) if is_alike else np.full(1, np.nan)
        largest, mean = float(gaps.max()), float(gaps.mean())
        # The comparisons are written so that a gap of NaN is refused too.
        if not (largest <= self.largest and mean <= self.mean):
            raise WeightsError(
                f"the canary's log-prob under version {version} differs by {largest:.2g} nats (mean "
                f"{mean:.2g}) between trainer and host, and at most {self.largest:g} (mean {self.mean:g}) is "
                "rounding: they compute differently from equal parameters; compare their devices, XLA flags "
                "and model sections of the config"
            )


BeforeCommit = Callable[[VersionedParams], None]
"""Called with a version, in the form that readers will load (cast), before any reader can load it."""


Taken = TypeVar("Taken")

Fetched = Callable[[], VersionedParams]
"""Checks digests and canary of a version that was fetched, and returns the version."""


class ParamReader(Protocol):
    """The part of a store that a host uses: it finds and loads versions."""

    def latest(self) -> PolicyVersion | None:
        """Returns the newest version that this reader can load; None if it knows of none. Cheap: no load."""
        ...

    def load(self, version: PolicyVersion, shardings: Any) -> VersionedParams:
        """Returns the parameters of `version` on the reader's devices, laid out by `shardings` and checked.

        Raises VersionGoneError if the store no longer holds the version, VersionDamagedError if its bits
        differ from those published, PublisherLostError if the publisher does not answer, and WeightsError if
        the reader gets other log-probs of a fixed sequence than the publisher.
        """
        ...


class FetchingReader(ParamReader, Protocol):
    """A reader that loads in two parts, of which only the second runs programs on several devices at once."""

    def fetch(self, version: PolicyVersion, shardings: Any) -> Fetched:
        """Moves the parameters of `version` onto the reader's devices; returns what checks and returns them.

        `fetch(version, shardings)()` is `load(version, shardings)`, and either part raises as `load` does.
        """
        ...


class ParamPublisher(Protocol):
    """The part of a store that a trainer uses: it publishes versions, each with a higher number
    than before.
    """

    def publish(self, value: VersionedParams, before_commit: BeforeCommit | None = None) -> VersionedParams:
        """Make `value` the latest version, now or soon after the return; returns it as readers will load it.

        The caller may donate the buffers of `value` once this returns. Publishing the last version again with
        an equal digest does nothing. `before_commit` is called with the returned value before any reader can
        load it. Raises WeightsError for an older version, or for other bits under the last version's number.
        """
        ...

    def wait(self, deadline_s: float) -> None:
        """Wait until all published versions are committed, for at most `deadline_s` seconds.

        Raises the error of a failed commit, and StagedError if one has not ended by the deadline.
        """
        ...

    def close(self, deadline_s: float) -> None:
        """Wait as `wait` does, then close the store: no version can be published any more."""
        ...


class ParamStore(ParamReader, ParamPublisher, Protocol):
    """A store with both parts: it publishes versions and loads them."""


def load_newer(store: ParamReader, shardings: Any, than: PolicyVersion = -1) -> VersionedParams | None:
    """Returns the newest version above `than` (-1: any version) that can be loaded, or None.

    None: there is no such version, or the publisher is lost; the host then keeps its current version. If a
    version is damaged, or was removed before it was read, the one that `latest` returns next is tried. Raises
    VersionGoneError after LOAD_ATTEMPTS attempts.
    """
    found = _newer(store, than, lambda version: store.load(version, shardings))
    return found and found[1]


def fetch_newer(
    store: FetchingReader, shardings: Any, than: PolicyVersion = -1
) -> tuple[PolicyVersion, Fetched] | None:
    """Returns the newest version above `than`, fetched but not checked, with its check; None as `load_newer`.

    Raises as `load_newer` does; so does the check, except that it fetches no other version.
    """
    return _newer(store, than, lambda version: store.fetch(version, shardings))


def _newer(
    store: ParamReader, than: PolicyVersion, take: Callable[[PolicyVersion], Taken]
) -> tuple[PolicyVersion, Taken] | None:
    for _ in range(LOAD_ATTEMPTS):
        version = store.latest()
        if version is None or version <= than:
            return None
        try:
            return version, take(version)
        except VersionGoneError:
            continue
        except VersionDamagedError as error:
            # `latest` leaves out a refused version, so the next attempt does not load it again.
            logging.getLogger(__name__).warning("refused: %s", error)
        except PublisherLostError as error:
            logging.getLogger(__name__).warning("%s", error)
            return None
    raise VersionGoneError(
        f"no version could be loaded in {LOAD_ATTEMPTS} attempts: each was removed before it was read; the "
        f"store's latest is {store.latest()}. Raise weights.keep_versions"
    )


def spans_devices(shardings: Any) -> bool:
    """Whether any of a tree's shardings has several devices: their programs may then be collective."""
    return any(len(sharding.device_set) > 1 for sharding in jax.tree.leaves(shardings))


def is_published(value: VersionedParams, known: VersionedParams | None) -> bool:
    """Whether `value` is published already: True if it has the number and digest of `known`, the version
    published last (None = none yet), False if it is newer.

    Raises WeightsError if `value` is older, or has the same number and another digest.
    """
    if known is None or value.version > known.version:
        return False
    if (value.version, value.digest) == (known.version, known.digest):
        return True
    raise WeightsError(
        f"version {value.version} (digest {value.digest}) cannot be published after version {known.version} "
        f"(digest {known.digest}): versions only grow, so publish a newer version"
    )


def wire_copy(value: VersionedParams, dtype: str, onto: Any = None) -> VersionedParams:
    """Returns a copy of `value`, cast to `dtype`, with the digest of the copy. `onto`: parameters to write
    the copy over (they are donated); None: the copy gets new buffers.
    """
    if onto is None and not is_in(value.params, dtype):
        return start_copy(value, dtype)[0]
    params = _copy(value.params, dtype) if onto is None else _overwrite(onto, value.params, dtype)
    return VersionedParams(
        value.version, params, value.digest if is_in(value.params, dtype) else digest(params)
    )


def start_copy(value: VersionedParams, dtype: str) -> tuple[VersionedParams, jax.Array]:
    """Returns a copy of `value`, cast to `dtype`, in new buffers, and the checksum of each of its leaves.

    Waits for the devices only if the cast changes a leaf: the copy's digest is then computed from these.
    """
    params, sums = copy_with_sums(value.params, dtype)
    found = value.digest if is_in(value.params, dtype) else combine(name_sums(params, sums))
    return VersionedParams(value.version, params, found), sums


def is_in(params: Any, dtype: str) -> bool:
    """Whether a cast to `dtype` would change no leaf's dtype."""
    return dtypes_in(params, dtype) == jax.tree.map(lambda leaf: leaf.dtype, params)


def dtypes_in(tree: Any, dtype: str) -> Any:
    """Returns the dtype of each leaf of parameters after a cast to `dtype`, in the tree's structure.

    Integers, the codes of quantised matrices, stay as they are. So do routers, unless `dtype` is wider: in
    fewer bits they would send tokens to other experts.
    """

    def one(path: Any, leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf.dtype
        return jnp.promote_types(leaf.dtype, dtype) if is_router(path) else jnp.dtype(dtype)

    return jax.tree_util.tree_map_with_path(one, tree)


def bytes_in(tree: Any, dtype: str) -> int:
    """Returns the size in bytes of parameters cast to `dtype`; `tree`: their shapes and dtypes."""
    kinds = jax.tree.leaves(dtypes_in(tree, dtype))
    return sum(leaf.size * kind.itemsize for leaf, kind in zip(jax.tree.leaves(tree), kinds, strict=True))


def abstract_in(dtype: str, abstract: Any, shardings: Any) -> Any:
    """Returns the leaves of `abstract`, as jax.ShapeDtypeStruct, cast to `dtype` and with these shardings."""
    return jax.tree.map(
        lambda leaf, kind, on: jax.ShapeDtypeStruct(leaf.shape, kind, sharding=on),
        abstract,
        dtypes_in(abstract, dtype),
        shardings,
    )


@functools.partial(jax.jit, static_argnames="dtype")
def copy_with_sums(tree: Any, dtype: str | None = None) -> tuple[Any, jax.Array]:
    """Returns a copy of `tree` in new buffers, and the checksum of each of its leaves (`leaf_sums`).

    `dtype`: the copy is cast to it; None: no cast. One program computes both: a separate program for the sums
    would be small, and on a CPU XLA runs small programs in the caller's thread.
    """
    copied = _copy(tree, dtype)
    return copied, leaf_sums(copied)


@functools.partial(jax.jit, static_argnames="dtype")
def _copy(tree: Any, dtype: str | None) -> Any:
    copied = jax.tree.map(lambda leaf: jnp.copy(on_device(leaf)), tree)
    if dtype is None:
        return copied
    return jax.tree.map(lambda leaf, kind: leaf.astype(kind), copied, dtypes_in(tree, dtype))


# keep_unused: jit would otherwise leave out an argument that nothing reads, and so never donate it.
@functools.partial(jax.jit, static_argnames="dtype", donate_argnums=0, keep_unused=True)
def _overwrite(serving: Any, params: Any, dtype: str) -> Any:
    del serving  # the results take its buffers
    return _copy(params, dtype)
