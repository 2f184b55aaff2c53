"""The ParamStore between processes: from device to device, no file touched.

A publisher copies a version on its devices and serves that copy until a newer one is committed; readers of
any process and mesh pull the leaves that changed. Parameters go by `jax.experimental.transfer`, a channel of
the publisher says which there are, and a pull is granted under a random number that only the channel tells.

Several processes of one mesh publish together, each its own pieces: all make the store and publish, the first
alone tells before it commits, and all commit or none. Readers are told its address, and it names the others.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.parallel.agreement import leads, together
from areal_jax.types import PolicyVersion, VersionedParams
from areal_jax.weights.channel import ChannelError, Listener
from areal_jax.weights.digest import combine, name_sums
from areal_jax.weights.pieces import own_pieces
from areal_jax.weights.publishing import Publishing
from areal_jax.weights.pulling import start_server, until
from areal_jax.weights.reader import TransferReader
from areal_jax.weights.staged import OnFailure, to_plain
from areal_jax.weights.store import BeforeCommit, Probe, WeightsError

__all__ = ["TransferReader", "TransferStore"]

LONGEST_WAIT_S = 30.0
"""How long an answer may wait for a newer version."""


class _Version(NamedTuple):
    value: VersionedParams
    leaves: dict[str, str]
    """As digest.leaf_digests gives them."""
    arrays: dict[str, jax.Array]
    canary: jax.Array
    """Perhaps on its way still: readers ask for it last."""


class TransferStore:
    """What publishes; readers are TransferReader.

    Beside the trainer's parameters lies one copy, of the latest version; a second one from a publish until
    its commit, and while readers still pull the version before. `keep` is the most versions held for readers,
    the latest included: with 1 a version goes at the next commit, and who pulls it hears VersionGoneError.
    """

    def __init__(
        self,
        probe: Probe,
        dtype: str = "float32",
        address: str = "127.0.0.1:0",
        deadline_s: float = 600.0,
        secret: str | None = None,
        keep: int = 2,
        on_failure: OnFailure | None = None,
    ) -> None:
        """`address`: this machine's own one, host:port (0: any free port); beyond loopback it needs a secret.

        `on_failure` hears at once of a version that could not be committed; the next call raises it.
        Raises ChannelError for an address that may or can not be listened at.
        """
        self._deadline_s, self._keep = deadline_s, keep
        self._versions: dict[PolicyVersion, _Version] = {}
        self._readers: Counter[PolicyVersion] = Counter()
        self._latest: PolicyVersion | None = None
        self._changed = threading.Condition()
        self._publishing = Publishing(
            "committing versions for readers", probe, dtype, self._commit, deadline_s, on_failure
        )
        self._listener = Listener(address, secret, lambda: _Session(self), deadline_s)
        self.server = start_server(self._listener.host)
        self.addresses = _told_to_all(self.address)
        """Of all processes that publish together, in their order."""
        self._nothing = jnp.zeros(1, jnp.int8)

    @property
    def address(self) -> str:
        """host:port for readers."""
        return self._listener.address

    def publish(self, value: VersionedParams, before_commit: BeforeCommit | None = None) -> VersionedParams:
        """Make `value` the latest soon; returns it as readers will see it (cast, with that one's digest).

        One version is committed and one more may wait; the next publish waits for room, at most `deadline_s`.
        No reader is ever waited for. `before_commit` hears the value in the committing thread. Raises
        WeightsError: as ParamStore says, or for an earlier version that could not be committed.
        """
        return self._publishing.publish(value, before_commit)

    def wait(self, deadline_s: float) -> None:
        self._publishing.wait(deadline_s)

    def latest(self) -> PolicyVersion | None:
        return self._latest

    def close(self, deadline_s: float) -> None:
        """Wait, publish no more, and hang up on readers: they keep what they have."""
        self._publishing.close(deadline_s)
        self._listener.close()

    def _commit(
        self, wire: VersionedParams, sums: jax.Array, canary: jax.Array, before: BeforeCommit | None
    ) -> None:
        with together(f"version {wire.version} of the weights is committed", self._deadline_s):
            version = _checked(wire, sums, canary)
            if before is not None and leads():
                before(wire)
        with self._changed:
            self._versions[wire.version] = version
            self._latest = wire.version
            self._prune()
            self._changed.notify_all()

    def _prune(self) -> None:
        """Of older versions those stay that are being pulled, the oldest first: whoever began, ends."""
        older = [version for version in sorted(self._versions) if version != self._latest]
        stays = [version for version in older if self._readers[version]][: self._keep - 1]
        for version in set(older) - set(stays):
            del self._versions[version]

    # --- what sessions ask of it ----------------------------------------------------------------------------

    def newer_than(self, known: PolicyVersion, wait_s: float) -> PolicyVersion | None:
        """The latest version, once it is another than `known` or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._latest not in (None, known), min(wait_s, LONGEST_WAIT_S))
            return self._latest

    def begin_reading(self, version: PolicyVersion, wait_s: float) -> _Version | None:
        """The version, which may not have been committed here yet; None where it is gone."""
        with self._changed:
            has_come = lambda: self._latest is not None and self._latest >= version  # noqa: E731
            self._changed.wait_for(has_come, min(wait_s, LONGEST_WAIT_S))
            found = self._versions.get(version)
            self._readers[version] += found is not None
            return found

    def end_reading(self, version: PolicyVersion) -> None:
        with self._changed:
            self._readers[version] -= 1
            self._prune()

    def find(self, version: PolicyVersion | None) -> _Version | None:
        return self._versions.get(version) if version is not None else None

    def offer(self, arrays: list[jax.Array]) -> int:
        """Let whoever is told the number pull these once."""
        number = secrets.randbits(63)
        self.server.await_pull(number, arrays, until(time.monotonic() + self._deadline_s))
        return number

    def withdraw(self, number: int, count: int) -> None:
        """Let go of the arrays of an offer that nobody took; one who comes too late gets an error."""
        self.server.await_pull(number, [self._nothing] * count)


def _checked(wire: VersionedParams, sums: jax.Array, canary: jax.Array) -> _Version:
    leaves = name_sums(wire.params, sums)
    if (found := combine(leaves)) != wire.digest:
        raise WeightsError(
            f"version {wire.version} was published with digest {wire.digest} and is about to be served "
            f"with {found}: its parameters changed meanwhile; resume from the last checkpoint"
        )
    arrays = {name: leaf for name, leaf in to_plain(wire.params).items() if leaf.size}
    return _Version(wire, leaves, arrays, canary)


class _Session:
    """One reader's requests, each a map with `ask`."""

    def __init__(self, store: TransferStore) -> None:
        self._store = store
        self._version: PolicyVersion | None = None
        """The one that is being read; it may go meanwhile."""
        self._offers: dict[int, int] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            match request["ask"]:
                case "latest":
                    return {"version": self._store.newer_than(request["known"], request["wait_s"])}
                case "describe":
                    return self._describe(request["version"], request["wait_s"])
                case "pull":
                    return self._pull(request["leaves"])
                case "canary":
                    return self._canary()
                case "done":
                    self._offers.pop(request["number"], None)
                    return {}
                case other:
                    raise ChannelError(f"a reader asked for {other!r}, which this areal-jax does not know")
        except (KeyError, TypeError) as error:
            raise ChannelError(f"a reader's request {sorted(request)} is not complete: {error}") from None

    def _describe(self, version: PolicyVersion, wait_s: float) -> dict[str, Any]:
        self._let_go()
        reading = self._store.begin_reading(version, wait_s)
        if reading is None:
            return {"gone": self._store.latest()}
        self._version = version
        pieces = {name: [box for box, _ in own_pieces(leaf)] for name, leaf in reading.arrays.items()}
        return {
            "digest": reading.value.digest,
            "leaves": reading.leaves,
            "pieces": pieces,
            "transfer": self._store.server.address(),
            "addresses": self._store.addresses,
            "address": self._store.address,
        }

    def _pull(self, names: list[str]) -> dict[str, Any]:
        reading = self._store.find(self._version)
        if reading is None:
            return {"gone": self._store.latest()}
        arrays = [piece for name in names for _, piece in own_pieces(reading.arrays[name])]
        number = self._store.offer(arrays)
        self._offers[number] = len(arrays)
        return {"number": number}

    def _canary(self) -> dict[str, Any]:
        reading = self._store.find(self._version)
        if reading is None:
            return {"gone": self._store.latest()}
        return {"canary": np.asarray(reading.canary, np.float64).tolist()}

    def close(self) -> None:
        for number, count in self._offers.items():
            self._store.withdraw(number, count)
        self._let_go()

    def _let_go(self) -> None:
        version, self._version = self._version, None
        if version is not None:
            self._store.end_reading(version)


def _told_to_all(address: str) -> list[str]:
    """Every process's address, in their order."""
    if jax.process_count() == 1:
        return [address]
    from jax.experimental import multihost_utils

    padded = np.frombuffer(address.encode().ljust(256), np.uint8)
    return [bytes(one).decode().strip() for one in np.asarray(multihost_utils.process_allgather(padded))]
