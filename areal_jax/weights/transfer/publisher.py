"""Weights versions sent from device to device between processes, without files: the publisher.

A publisher copies a version on its devices and serves that copy until a newer version is committed; readers
in any process and on any mesh pull the leaves that changed. Parameters go through jax.experimental.transfer.
Over a TCP connection of its own (`channel`), a reader learns which version is the latest, and gets the random
number that permits a pull.

Several processes of one mesh publish together, each process its own pieces: every process makes the store and
publishes, only the first process calls `before_commit`, and either all processes commit a version or none
does. Readers are given the address of the first process, which sends them the addresses of the others.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import jax
import numpy as np

from areal_jax.parallel.agreement import together
from areal_jax.types import PolicyVersion
from areal_jax.weights.digest import to_plain
from areal_jax.weights.publishing import Outgoing, Publisher, PublisherSettings
from areal_jax.weights.transfer.arrays import Offers
from areal_jax.weights.transfer.channel import ChannelError, Listener
from areal_jax.weights.transfer.pieces import own_pieces

LONGEST_WAIT_S = 30.0
"""Longest time, in seconds, that the publisher waits for a version before it answers a reader's request."""


class TransferStore(Publisher):
    """Publishes weights versions, which readers in other processes (TransferReader) pull from its devices.

    The store holds one copy of the parameters, the latest version. A second copy exists from a publish until
    its commit, and while a reader pulls an older version. If readers pull several older versions, only the
    oldest of these stays available; the readers of the others get VersionGoneError.
    """

    def __init__(
        self, settings: PublisherSettings, address: str = "127.0.0.1:0", secret: str | None = None
    ) -> None:
        """`address`: host:port to listen at; port 0 = any free port. `secret`: what readers must know.

        A host other than loopback requires a secret. Raises ChannelError if the secret is missing, or if the
        address cannot be used.
        """
        super().__init__("committing versions for readers", settings)
        self._versions: dict[PolicyVersion, Outgoing] = {}
        self._readers: Counter[PolicyVersion] = Counter()
        self._changed = threading.Condition()
        self._listener = Listener(address, secret, lambda: _ReaderSession(self), settings.deadline_s)
        self.host, self.address = self._listener.host, self._listener.address
        """`address`: the host:port that readers connect to; `host`: its numeric host."""
        self.addresses = _gathered(self.address)
        """Addresses of all processes that publish together, in process order."""

    def latest(self) -> PolicyVersion | None:
        with self._changed:
            return max(self._versions, default=None)

    def close(self, deadline_s: float) -> None:
        """Waits until all versions are committed, then disconnects readers; hosts keep their versions."""
        super().close(deadline_s)
        self._listener.close()

    def _commit(self, version: Outgoing) -> None:
        number = version.wire.version
        # Readers pull shards from every process: none may serve a version that another failed to commit.
        with together(f"version {number} of the weights is committed", self._settings.deadline_s):
            version.leaves()
            version.announce()
        with self._changed:
            self._versions[number] = version
            self._prune()
            self._changed.notify_all()

    def _prune(self) -> None:
        """Drops all versions except the latest version and the oldest version that a reader is pulling."""
        *older, _ = sorted(self._versions)
        stays = next((version for version in older if self._readers[version]), None)
        for version in older:
            if version != stays:
                del self._versions[version]

    # --- called by sessions -------------------------------------------------------------------------------

    def newer_than(self, known: PolicyVersion, wait_s: float) -> PolicyVersion | None:
        """Waits until the latest version is not `known`, and returns the latest version.

        Waits at most min(wait_s, LONGEST_WAIT_S) seconds; then the result is still `known`, or None if no
        version is committed yet.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.latest() not in (None, known), min(wait_s, LONGEST_WAIT_S))
            return self.latest()

    def begin_reading(self, version: PolicyVersion, wait_s: float) -> Outgoing | None:
        """Returns the parameters of `version`, and counts one more reader of it until `end_reading`.

        If this process has not committed the version yet, waits for the commit, at most min(wait_s,
        LONGEST_WAIT_S) seconds. Returns None if the version was dropped or is still not committed.
        """
        with self._changed:
            has_come = lambda: max(self._versions, default=-1) >= version  # noqa: E731
            self._changed.wait_for(has_come, min(wait_s, LONGEST_WAIT_S))
            found = self._versions.get(version)
            # `_prune` keeps the version of a pull that is counted here until `end_reading`.
            self._readers[version] += found is not None
            return found

    def end_reading(self, version: PolicyVersion) -> None:
        with self._changed:
            self._readers[version] -= 1
            self._prune()

    def find(self, version: PolicyVersion | None) -> Outgoing | None:
        return self._versions.get(version) if version is not None else None


class _ReaderSession:
    """Answers one reader's requests. A request is a dict; its `ask` is latest, describe, pull or canary."""

    def __init__(self, store: TransferStore) -> None:
        self._store = store
        self._version: PolicyVersion | None = None
        """The version that the reader is pulling, which the store may have dropped; None without a pull."""
        self._offers: Offers | None = None
        """The arrays that the reader may pull; None without a pull."""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            match request["ask"]:
                case "latest":
                    return {"version": self._store.newer_than(request["known"], request["wait_s"])}
                case "describe":
                    return self._describe(request["version"], request["wait_s"])
                case "pull" | "canary":
                    return self._read(request)
                case other:
                    raise ChannelError(
                        f"a reader sent the unknown request {other!r}; run the same version of areal-jax "
                        "everywhere"
                    )
        except (KeyError, TypeError) as error:
            raise ChannelError(
                f"a host requested weights with the fields {sorted(request)}, but {error} is missing or "
                "wrong; run the same version of areal-jax everywhere"
            ) from None

    def _describe(self, version: PolicyVersion, wait_s: float) -> dict[str, Any]:
        self.close()
        reading = self._store.begin_reading(version, wait_s)
        if reading is None:
            return {"gone": self._store.latest()}
        self._version, self._offers = version, Offers(self._store.host)
        arrays = to_plain(reading.wire.params)
        return {
            "digest": reading.wire.digest,
            "leaves": reading.leaves(),
            "pieces": {name: [box for box, _ in own_pieces(leaf)] for name, leaf in arrays.items()},
            "transfer": self._offers.address,
            "others": [one for one in self._store.addresses if one != self._store.address],
        }

    def _read(self, request: dict[str, Any]) -> dict[str, Any]:
        reading = self._store.find(self._version)
        if reading is None or self._offers is None:
            return {"gone": self._store.latest()}
        if request["ask"] == "canary":
            # Requested last: the devices may still be computing it.
            return {"canary": np.asarray(reading.canary, np.float64).tolist()}
        arrays = to_plain(reading.wire.params)
        pieces = [piece for name in request["leaves"] for _, piece in own_pieces(arrays[name])]
        return {"number": self._offers.add(pieces)}

    def close(self) -> None:
        """Ends the pull in progress, if any, and releases its arrays, which cannot be pulled any more."""
        if self._offers is not None:
            self._offers.close()
        version, self._version, self._offers = self._version, None, None
        if version is not None:
            self._store.end_reading(version)


def _gathered(address: str) -> list[str]:
    """Returns the addresses of all processes of the jax.distributed world, in process order.

    Every process must call this function, with its own address.
    """
    if jax.process_count() == 1:
        return [address]
    from jax.experimental import multihost_utils

    # A collective takes arrays of one shape, so every address is padded to the same length.
    padded = np.frombuffer(address.encode().ljust(256), np.uint8)
    return [bytes(one).decode().strip() for one in np.asarray(multihost_utils.process_allgather(padded))]
