"""The reader of a TransferStore: it pulls ahead, so that adopting a version is an exchange of pointers.

Once a first version was loaded, a thread pulls and checks every newer one while the host decodes; `latest`
names it when it is here, and `load` hands it over. At most one version waits so. What a host adopted stays in
force whatever becomes of the publisher.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.types import PolicyVersion, VersionedParams
from areal_jax.weights.channel import Channel, ChannelError
from areal_jax.weights.digest import leaf_sums, name_sums
from areal_jax.weights.pulling import Links, Pull
from areal_jax.weights.staged import described, to_plain
from areal_jax.weights.store import (
    Probe,
    PublisherLostError,
    VersionDamagedError,
    VersionGoneError,
    require_canary,
)

WATCH_S = 2.0
"""Longest time that the publisher is asked to wait for a newer version before it answers."""
ANSWER_S = 10.0
"""How much longer than that it may take."""
AGAIN_S = 0.2
"""How long to wait before asking a publisher again that could not be reached."""


class _Here(NamedTuple):
    """A version that was pulled and waits to be loaded, or what is wrong with it."""

    version: PolicyVersion
    value: VersionedParams | None
    error: Exception | None = None


class TransferReader:
    """One host's reader of a TransferStore at `address` (host:port), any process's and any mesh's.

    Leaves that did not change since the version loaded before are taken from it, as long as somebody holds
    its arrays: nobody may donate them. Leaves that stayed the same once are held here from then on.
    """

    def __init__(
        self, address: str, probe: Probe, deadline_s: float = 600.0, secret: str | None = None
    ) -> None:
        """`deadline_s`: for one load, and for each of a thread's pulls."""
        self._address, self._probe = address, probe
        self._deadline_s, self._secret = deadline_s, secret
        self._links = Links()
        self._shardings: Any = None
        self._newest: PolicyVersion | None = None
        self._loaded: PolicyVersion = -1
        self._last: VersionedParams | None = None  # with references to its leaves
        self._here: _Here | None = None
        self._refused: set[PolicyVersion] = set()
        self._held: dict[str, tuple[str, weakref.ref[jax.Array]]] = {}
        self._steady: dict[str, jax.Array] = {}
        self._changed = threading.Condition()
        self._pulling = threading.Lock()
        self._watching: Channel | None = None
        self._is_closed = False
        self.pulled_bytes = 0
        """Of parameters, that came over the wire."""
        self.trouble: str | None = None
        """Why the publisher cannot be heard at the moment, None while it can."""
        for work in (self._watch, self._pull_ahead):
            threading.Thread(target=work, name=f"reading weights: {work.__name__}", daemon=True).start()

    @property
    def address(self) -> str:
        return self._address

    @address.setter
    def address(self, address: str) -> None:
        """Where the publisher is now; what the one before published is forgotten, but for what is loaded."""
        with self._changed:
            if address == self._address:
                return
            self._address, self._newest, self._here = address, None, None
            self._refused.clear()
            watching = self._watching
        if watching is not None:
            watching.close()

    def latest(self) -> PolicyVersion | None:
        """The newest version that is here; before the first load, the newest that the publisher has."""
        with self._changed:
            if self._here is not None:
                return self._here.version
            if self._loaded >= 0:
                return self._loaded
            return self._newest if self._newest not in self._refused else None

    def load(self, version: PolicyVersion, shardings: Any) -> VersionedParams:
        """The parameters of `version`, every leaf's digest and the canary checked here.

        Raises VersionGoneError; PublisherLostError at the deadline, or when the publisher goes away;
        VersionDamagedError, by leaf, where what came is not what was published, or of another tree;
        WeightsError where this reader computes something else with it than the publisher.
        """
        if not self._pulling.acquire(timeout=self._deadline_s):
            raise PublisherLostError(
                f"another version is still being pulled from {self._address} after {self._deadline_s:g} s"
            )
        try:
            value = self._waiting(version, shardings) or self._again(version, shardings)
            if value is None:
                value = self._fetch(version, shardings)
            with self._changed:
                self._loaded, self._shardings = version, shardings
                self._last = value._replace(params=[*map(weakref.ref, jax.tree.leaves(value.params))])
                self._changed.notify_all()
            return value
        except VersionGoneError:
            with self._changed:  # it may have been the one loaded before, which nobody holds any more
                self._loaded = -1 if version == self._loaded else self._loaded
            raise
        finally:
            self._pulling.release()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            watching = self._watching
        if watching is not None:
            watching.close()

    def _waiting(self, version: PolicyVersion, shardings: Any) -> VersionedParams | None:
        """The version that waits here, if it is the one."""
        with self._changed:
            here = self._here
            if here is None or here.version != version or shardings != self._shardings:
                return None
            self._here = None
        if here.error is not None:
            raise here.error
        return here.value

    def _again(self, version: PolicyVersion, shardings: Any) -> VersionedParams | None:
        """The version that was loaded last, if it is the one and its arrays are all there still."""
        last = self._last
        if last is None or last.version != version or shardings != self._shardings:
            return None
        leaves = [reference() for reference in last.params]
        if any(leaf is None or leaf.is_deleted() for leaf in leaves):
            return None
        return last._replace(params=jax.tree.unflatten(jax.tree.structure(shardings), leaves))

    # --- one version ----------------------------------------------------------------------------------------

    def _fetch(self, version: PolicyVersion, shardings: Any) -> VersionedParams:
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

    def _pull_ahead(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._is_wanted)
                if self._is_closed:
                    return
            if not self._pull_one():
                time.sleep(AGAIN_S)

    def _pull_one(self) -> bool:
        """False where it came to nothing. Holds on to no version: the host may drop it."""
        with self._pulling:
            with self._changed:
                version, shardings, address = self._newest, self._shardings, self._address
                if version is None or not self._is_wanted():
                    return True
            here = self._get_ready(version, shardings)
            with self._changed:
                if address == self._address:
                    self._here = here
            return here is not None

    def _is_wanted(self) -> bool:
        """Whether there is something to do: a version to pull, or to end."""
        newest = self._newest
        is_newer = newest is not None and newest > self._loaded and newest not in self._refused
        return self._is_closed or (self._shardings is not None and self._here is None and is_newer)

    def _get_ready(self, version: PolicyVersion, shardings: Any) -> _Here | None:
        try:
            return _Here(version, self._fetch(version, shardings))
        except (VersionGoneError, VersionDamagedError, PublisherLostError) as error:
            logging.getLogger(__name__).warning("not adopted: %s", error)
            return None
        except Exception as error:  # noqa: BLE001 - raised where the version is loaded
            return _Here(version, None, error)
