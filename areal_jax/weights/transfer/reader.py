"""Reads weights from a TransferStore: a thread learns of each commit, `load` pulls the leaves that changed.

If the publisher is lost, the host keeps the version that it adopted last.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.types import PolicyVersion, VersionedParams
from areal_jax.weights.digest import leaf_sums, name_sums
from areal_jax.weights.errors import VersionDamagedError
from areal_jax.weights.staged import described
from areal_jax.weights.store import Fetched, Probe, spans_devices
from areal_jax.weights.transfer.channel import Channel, ChannelError
from areal_jax.weights.transfer.pulling import Pull

WATCH_S = 2.0
"""Seconds that the publisher may wait for a newer version before it answers the reader's query."""
ANSWER_S = 10.0
"""An answer of the publisher that comes more than this many seconds after WATCH_S counts as missing."""
AGAIN_S = 0.2
"""Seconds to wait before connecting again to a publisher that could not be reached."""


class TransferReader:
    """Loads a host's weights from the TransferStore at `address` (host:port), in any process and on any mesh.

    Only one thread may call `load`. A leaf that did not change since the previous load is not pulled: `load`
    returns the previous load's array again, if that array still exists, so the caller must not donate such
    arrays. The reader itself keeps alive only the leaves that were equal in the last two loads.
    """

    def __init__(
        self, address: str, probe: Probe, deadline_s: float = 600.0, secret: str | None = None
    ) -> None:
        """`probe` computes log-probs of a fixed sequence; each load compares them to the publisher's.

        `deadline_s`: longest time of one load, in seconds. `secret`: the publisher's secret; None if the
        publisher has no secret.
        """
        self.address, self._probe = address, probe
        self._deadline_s, self._secret = deadline_s, secret
        self._newest: tuple[str, PolicyVersion | None] = (address, None)
        """A publisher's address and newest version, replaced together, so that `latest` needs no lock."""
        self._refused: set[PolicyVersion] = set()
        self._held: dict[str, tuple[str, weakref.ref[jax.Array]]] = {}
        self._steady: dict[str, jax.Array] = {}
        self._watching: Channel | None = None
        self._closed = threading.Event()
        self.pulled_bytes = 0
        """Bytes of parameters pulled from publishers so far."""
        self.trouble: str | None = None
        """Why the publisher cannot be reached at the moment; None while the publisher answers."""
        threading.Thread(target=self._watch, name="hearing of weights", daemon=True).start()

    def move_to(self, address: str) -> None:
        """Switches to the publisher at another address; the former publisher's versions are forgotten."""
        self.address = address
        self._refused.clear()
        self._interrupt()

    def latest(self) -> PolicyVersion | None:
        """Returns the publisher's newest version, or None if this reader cannot load it.

        None: the publisher cannot be reached, it has no version yet, or its newest version arrived damaged.
        """
        address, version = self._newest
        return version if address == self.address and version not in self._refused else None

    def close(self) -> None:
        self._closed.set()
        self._interrupt()

    def _interrupt(self) -> None:
        """Makes `_listen` return, even while it waits for the publisher's answer, by closing its channel.

        If there is no channel yet, `_listen` returns by itself, because it checks `_closed` and the address
        before each request.
        """
        if self._watching is not None:
            self._watching.close()

    # --- one version ----------------------------------------------------------------------------------------

    def load(self, version: PolicyVersion, shardings: Any) -> VersionedParams:
        """Returns the parameters of `version`, laid out by `shardings`, after a check of each leaf's digest.

        Raises VersionGoneError if the publisher no longer holds the version; PublisherLostError if the
        publisher fails or the deadline passes; VersionDamagedError, naming the leaf, if the bits pulled are
        not the bits published or the tree is not that of `shardings`; WeightsError if reader and publisher
        compute different log-probs of a fixed sequence.
        """
        return self.fetch(version, shardings)()

    def fetch(self, version: PolicyVersion, shardings: Any) -> Fetched:
        """Pulls `version` as `load` does; the returned function checks digests and log-probs.

        On one device the digests of leaves are computed while further leaves are pulled.
        """
        with closing(Pull(self.address, self._secret, version, self._deadline_s)) as pull:
            with self._refusing(version):
                wanted = described(f"version {version}", pull.leaves, shardings)
                portions = self._pulled(pull, wanted, is_alone=not spans_devices(shardings))
            published = pull.canary()

        def check() -> VersionedParams:
            with self._refusing(version):
                leaves = self._proved(pull, portions)
            params = jax.tree.unflatten(jax.tree.structure(shardings), [leaves[name] for name in wanted])
            self._probe.require(version, published, np.asarray(self._probe(params)))
            self._remember(pull.leaves, leaves)
            return VersionedParams(version, params, pull.digest)

        return check

    @contextmanager
    def _refusing(self, version: PolicyVersion) -> Iterator[None]:
        try:
            yield
        except VersionDamagedError:
            self._refused.add(version)
            raise

    def _at_hand(self, name: str, digest: str, like: jax.ShapeDtypeStruct) -> jax.Array | None:
        """Returns the leaf `name`, with the sharding of `like`, if it need not be pulled; otherwise None.

        A leaf need not be pulled if it has no elements, or if the array of the previous load has the digest
        `digest` and still exists.
        """
        if not like.size:
            return jnp.zeros(like.shape, like.dtype, device=like.sharding)
        # Weak references: this reader must not keep a second copy of leaves that change with every version.
        known, reference = self._held.get(name, ("", lambda: None))
        leaf = reference() if known == digest else None
        return None if leaf is None or leaf.is_deleted() else jax.device_put(leaf, like.sharding)

    def _pulled(
        self, pull: Pull, wanted: dict[str, jax.ShapeDtypeStruct], is_alone: bool
    ) -> list[tuple[dict[str, jax.Array], jax.Array | None]]:
        """Returns the `wanted` leaves by name, in portions; pulls only leaves that changed.

        With each portion are its checksums, which the device may still be computing, or None unless
        `is_alone`: whether all leaves lie on one device.
        """
        sums = leaf_sums if is_alone else lambda leaves: None
        found = {name: self._at_hand(name, pull.leaves[name], wanted[name]) for name in wanted}
        held = {name: leaf for name, leaf in found.items() if leaf is not None}
        portions = [(held, sums(held))] if held else []
        for portion in pull.take({name: wanted[name] for name in wanted if name not in held}):
            portions.append((portion, sums(portion)))
            self.pulled_bytes += sum(leaf.nbytes for leaf in portion.values())
        return portions

    def _proved(
        self, pull: Pull, portions: list[tuple[dict[str, jax.Array], jax.Array | None]]
    ) -> dict[str, jax.Array]:
        """Returns the leaves of all portions by name.

        Raises VersionDamagedError if a leaf's digest is not the published digest.
        """
        leaves: dict[str, jax.Array] = {}
        for portion, sums in portions:
            sums = leaf_sums(portion) if sums is None else sums
            for name, digest in name_sums(portion, sums).items():
                if digest != pull.leaves[name]:
                    raise VersionDamagedError(
                        f"version {pull.version} was damaged on its way from {self.address}: leaf {name} "
                        f"has digest {digest}, but was published with {pull.leaves[name]}; the host waits "
                        "for the next version"
                    )
            leaves |= portion
        return leaves

    def _remember(self, digests: dict[str, str], leaves: dict[str, jax.Array]) -> None:
        same = {name for name, (known, _) in self._held.items() if known == digests.get(name)}
        # A host that converts the layout drops what it loaded, so frozen leaves would be pulled every time.
        self._steady = {name: leaves[name] for name in same}
        self._held = {name: (digests[name], weakref.ref(leaf)) for name, leaf in leaves.items()}

    # --- threads --------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Runs in a thread: keeps the answer of `latest` up to date until `close`."""
        while not self._closed.is_set():
            address = self.address
            try:
                self._listen(address)
            except ChannelError as error:
                if address == self.address and not self._closed.is_set():
                    if self.trouble is None:
                        logging.getLogger(__name__).warning(
                            "this host cannot read weights at the moment; it keeps its version and retries: "
                            "%s",
                            error,
                        )
                    self._newest, self.trouble = (address, None), str(error)
                    self._closed.wait(AGAIN_S)

    def _listen(self, address: str) -> None:
        self._watching = channel = Channel(address, self._secret, ANSWER_S)
        with closing(channel):
            known: PolicyVersion | None = None
            while not self._closed.is_set() and address == self.address:
                request = {"ask": "latest", "known": known, "wait_s": WATCH_S}
                known = channel.ask(request, time.monotonic() + WATCH_S + ANSWER_S)["version"]
                self._newest, self.trouble = (address, known), None
