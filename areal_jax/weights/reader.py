"""The reader of a TransferStore: it hears of versions as they are committed, and pulls what changed in them.

What a host adopted stays in force whatever becomes of the publisher.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.types import PolicyVersion, VersionedParams
from areal_jax.weights.channel import Channel, ChannelError
from areal_jax.weights.digest import leaf_sums, name_sums
from areal_jax.weights.pulling import Links, Pull
from areal_jax.weights.staged import described, to_plain
from areal_jax.weights.store import Probe, VersionDamagedError, require_canary

WATCH_S = 2.0
"""Longest time that the publisher is asked to wait for a newer version before it answers."""
ANSWER_S = 10.0
"""How much longer than that it may take."""
AGAIN_S = 0.2
"""How long to wait before asking a publisher again that could not be reached."""


class TransferReader:
    """One host's reader of a TransferStore at `address` (host:port), any process's and any mesh's; one thread
    loads.

    Leaves that did not change since the version loaded before are taken from it, as long as somebody holds
    its arrays: nobody may donate them. Leaves that stayed the same once are held here from then on.
    """

    def __init__(
        self, address: str, probe: Probe, deadline_s: float = 600.0, secret: str | None = None
    ) -> None:
        """`deadline_s`: for one load."""
        self._address, self._probe = address, probe
        self._deadline_s, self._secret = deadline_s, secret
        self._links = Links()
        self._newest: PolicyVersion | None = None
        self._refused: set[PolicyVersion] = set()
        self._held: dict[str, tuple[str, weakref.ref[jax.Array]]] = {}
        self._steady: dict[str, jax.Array] = {}
        self._changed = threading.Condition()
        self._watching: Channel | None = None
        self._is_closed = False
        self.pulled_bytes = 0
        """Of parameters, that came over the wire."""
        self.trouble: str | None = None
        """Why the publisher cannot be heard at the moment, None while it can."""
        threading.Thread(target=self._watch, name="hearing of weights", daemon=True).start()

    @property
    def address(self) -> str:
        return self._address

    @address.setter
    def address(self, address: str) -> None:
        """Where the publisher is now; what the one before published is forgotten."""
        with self._changed:
            if address == self._address:
                return
            self._address, self._newest = address, None
            self._refused.clear()
            watching = self._watching
        if watching is not None:
            watching.close()

    def latest(self) -> PolicyVersion | None:
        """The newest version that the publisher has, None where it cannot be heard."""
        with self._changed:
            return self._newest if self._newest not in self._refused else None

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            watching = self._watching
        if watching is not None:
            watching.close()

    # --- one version ----------------------------------------------------------------------------------------

    def load(self, version: PolicyVersion, shardings: Any) -> VersionedParams:
        """The parameters of `version`, every leaf's digest and the canary checked here.

        Raises VersionGoneError; PublisherLostError at the deadline, or when the publisher goes away;
        VersionDamagedError, by leaf, where what came is not what was published, or of another tree;
        WeightsError where this reader computes something else with it than the publisher.
        """
        pull = Pull(self._links, self._address, self._secret, version, self._deadline_s)
        try:
            wanted = to_plain(shardings)
            if missing := wanted.keys() ^ pull.leaves.keys():
                raise VersionDamagedError(
                    f"version {version} holds another tree than this reader's: "
                    f"{', '.join(sorted(missing)[:4])} stand in one of them only; is it another model's run?"
                )
            leaves = self._proved(pull, wanted)
            params = jax.tree.unflatten(jax.tree.structure(shardings), [leaves[name] for name in wanted])
            own = self._probe(params)
            require_canary(version, pull.canary(), np.asarray(own))
        except VersionDamagedError:
            self._refused.add(version)
            raise
        finally:
            pull.close()
        self._remember(pull.leaves, leaves)
        return VersionedParams(version, params, pull.digest)

    def _at_hand(self, name: str, digest: str, sharding: Any) -> jax.Array | None:
        """The leaf, where it need not be pulled: it is empty, or the one held has these very bits."""
        like = described(digest)
        if not like.size:
            return jnp.zeros(like.shape, like.dtype, device=sharding)
        known, reference = self._held.get(name, ("", lambda: None))
        leaf = reference() if known == digest else None
        return None if leaf is None or leaf.is_deleted() else jax.device_put(leaf, sharding)

    def _proved(self, pull: Pull, wanted: dict[str, Any]) -> dict[str, jax.Array]:
        """All leaves; the digests of one portion are computed while the next one travels."""
        found = {name: self._at_hand(name, pull.leaves[name], wanted[name]) for name in wanted}
        held = {name: leaf for name, leaf in found.items() if leaf is not None}
        portions = [(held, leaf_sums(held))] if held else []
        for portion in pull.take({name: wanted[name] for name in wanted if name not in held}):
            portions.append((portion, leaf_sums(portion)))
        self.pulled_bytes += pull.pulled_bytes
        leaves: dict[str, jax.Array] = {}
        for portion, sums in portions:
            for name, digest in name_sums(portion, sums).items():
                if digest != pull.leaves[name]:
                    raise VersionDamagedError(
                        f"version {pull.version} was damaged on its way from {self._address}: leaf {name} "
                        f"has digest {digest}, was published with {pull.leaves[name]}"
                    )
            leaves |= portion
        return leaves

    def _remember(self, digests: dict[str, str], leaves: dict[str, jax.Array]) -> None:
        same = {name for name, (known, _) in self._held.items() if known == digests.get(name)}
        self._steady = {name: leaves[name] for name in same}
        self._held = {name: (digests[name], weakref.ref(leaf)) for name, leaf in leaves.items()}

    # --- threads --------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Hear of newer versions, for as long as this is open."""
        while not self._is_closed:
            address = self._address
            try:
                self._listen(address)
            except ChannelError as error:
                with self._changed:
                    if address == self._address and not self._is_closed:
                        self._note(str(error))
                        self._newest = None
                        self._changed.wait(AGAIN_S)

    def _listen(self, address: str) -> None:
        channel = Channel(address, self._secret, ANSWER_S)
        with self._changed:
            self._watching = channel
        try:
            known: PolicyVersion | None = None
            while not self._is_closed and address == self._address:
                request = {"ask": "latest", "known": known, "wait_s": WATCH_S}
                known = channel.ask(request, time.monotonic() + WATCH_S + ANSWER_S)["version"]
                with self._changed:
                    if address == self._address:
                        self._newest = known
                        self._note(None)
                        self._changed.notify_all()
        finally:
            channel.close()

    def _note(self, trouble: str | None) -> None:
        if trouble is not None and self.trouble is None:
            logging.getLogger(__name__).warning("no weights come for now: %s", trouble)
        self.trouble = trouble
