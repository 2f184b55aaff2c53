"""Copies one weights version, leaf by leaf, from all publishing processes to a reader's devices.

Several leaves are pulled together (a portion). While one portion is pulled, the previous portion is assembled
on the reader's mesh, so that only few bytes are on a device twice.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np

from areal_jax.types import PolicyVersion
from areal_jax.weights.errors import PublisherLostError, VersionDamagedError, VersionGoneError
from areal_jax.weights.transfer.arrays import Incoming, spec_of, wait_for
from areal_jax.weights.transfer.channel import Channel, ChannelError
from areal_jax.weights.transfer.pieces import Box, are_whole, assemble

PORTION_BYTES = 128 << 20
"""Size in bytes up to which leaves are pulled together; a larger leaf is pulled alone."""

Wanted = Mapping[str, jax.ShapeDtypeStruct]
"""Leaf name -> its shape, dtype and sharding on the reader's mesh."""

_Portion = dict[str, list[tuple[Box, jax.Array]]]
"""Leaves that are pulled together: leaf name -> (box, data) of each piece; box: the piece's position."""


class _Source(NamedTuple):
    """A reader's connection to one publishing process.

    `channel` carries requests; by `incoming` arrays arrive. `pieces`: leaf name -> positions (boxes) of the
    pieces that the publishing process owns.
    """

    channel: Channel
    incoming: Incoming
    pieces: dict[str, tuple[Box, ...]]


class Pull:
    """Copies one version from its publishing processes to this process; the caller must call `close`."""

    def __init__(self, address: str, secret: str | None, version: PolicyVersion, deadline_s: float) -> None:
        """Connects to all processes that publish `version`; `address`: host:port of the first of them.

        `secret`: the publisher's secret, or None. `deadline_s`: longest time of the whole pull, in seconds.
        Raises VersionGoneError if the publisher no longer has the version, PublisherLostError if one of the
        processes does not answer in time.
        """
        self.version = version
        self._address, self._secret, self._deadline_s = address, secret, deadline_s
        self._end_s = time.monotonic() + deadline_s
        self._sources: list[_Source] = []
        try:
            with self._translated():
                first = self._describe(address, wait_s=0.0)
                for other in first["others"]:
                    # It may commit the version a little later than the first process.
                    self._describe(other, wait_s=deadline_s)
        except BaseException:
            self.close()
            raise
        self.digest: str = first["digest"]
        self.leaves: dict[str, str] = first["leaves"]
        """Digests by leaf name, as `digest.leaf_digests` returns them."""

    def close(self) -> None:
        """Disconnects from all publishing processes; pulls in progress fail and free their memory."""
        for source in self._sources:
            source.incoming.close()
            source.channel.close()
        self._sources.clear()

    def take(self, wanted: Wanted) -> Iterator[dict[str, jax.Array]]:
        """Yields the `wanted` leaves by name, some leaves at a time, each complete and with its sharding.

        Does not check the leaves' bits. Raises VersionGoneError if the publisher dropped this version during
        the pull, PublisherLostError if the publisher fails or the deadline passes, and VersionDamagedError if
        the pieces of a leaf do not cover it.
        """
        # One portion is pulled while the previous one is assembled, and never more: pieces take device memory
        # besides the leaves that are made of them.
        under_way: deque[_Portion] = deque()
        with self._translated():
            for names in self._portions(wanted):
                under_way.append(self._start(names, wanted))
                if len(under_way) > 1:
                    yield self._end(under_way.popleft(), wanted)
            while under_way:
                yield self._end(under_way.popleft(), wanted)

    def canary(self) -> np.ndarray:
        """Returns the publisher's log-probs of a fixed sequence.

        Call it after `take`, because the publisher may still be computing them. Raises as `take` does.
        """
        with self._translated():
            return np.asarray(self._ask(self._sources[0].channel, ask="canary")["canary"])

    def _describe(self, address: str, wait_s: float) -> dict[str, Any]:
        channel = Channel(address, self._secret, self._left_s())
        try:
            said = self._ask(channel, ask="describe", version=self.version, wait_s=wait_s)
            incoming = Incoming(channel.own_host, said["transfer"])
        except BaseException:
            channel.close()
            raise
        self._sources.append(_Source(channel, incoming, said["pieces"]))
        return said

    def _ask(self, channel: Channel, **request: Any) -> dict[str, Any]:
        said = channel.ask(request, self._end_s)
        if "gone" in said:
            raise VersionGoneError.of(self.version, said["gone"])
        return said

    # --- portions -------------------------------------------------------------------------------------------

    def _portions(self, wanted: Wanted) -> Iterator[list[str]]:
        portion, size = [], 0
        for name, like in wanted.items():
            own = like.size * like.dtype.itemsize
            if portion and size + own > PORTION_BYTES:
                yield portion
                portion, size = [], 0
            portion.append(name)
            size += own
        if portion:
            yield portion

    def _start(self, names: list[str], wanted: Wanted) -> _Portion:
        portion: _Portion = {name: [] for name in names}
        for source in self._sources:
            held = [name for name in names if source.pieces.get(name)]
            if not held:
                continue
            number = self._ask(source.channel, ask="pull", leaves=held)["number"]
            places_of = [(name, box) for name in held for box in source.pieces[name]]
            specs = [spec_of(box, wanted[name]) for name, box in places_of]
            arrays = source.incoming.pull(number, specs, self._end_s)
            for (name, box), array in zip(places_of, arrays, strict=True):
                portion[name].append((box, array))
        return portion

    def _end(self, portion: _Portion, wanted: Wanted) -> dict[str, jax.Array]:
        wait_for((piece for pieces in portion.values() for _, piece in pieces), self._end_s)
        return {name: self._whole(name, pieces, wanted[name]) for name, pieces in portion.items()}

    def _whole(self, name: str, pieces: list[tuple[Box, jax.Array]], like: jax.ShapeDtypeStruct) -> jax.Array:
        if not are_whole([box for box, _ in pieces], like.shape):
            raise VersionDamagedError(
                f"version {self.version}: leaf {name} of shape {like.shape} arrived in pieces that do not "
                f"cover it: {[box for box, _ in pieces]}; check that all trainer processes publish"
            )
        return assemble(like.shape, like.dtype, like.sharding, pieces)

    # --- deadlines ------------------------------------------------------------------------------------------

    def _left_s(self) -> float:
        return max(0.0, self._end_s - time.monotonic())

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raises errors of the network or the publisher in the `with` block as PublisherLostError."""
        try:
            yield
        except (ChannelError, TimeoutError, jax.errors.JaxRuntimeError) as error:
            raise PublisherLostError(
                f"version {self.version} could not be pulled from {self._address} within "
                f"{self._deadline_s:g} s: {(str(error) or 'no answer').splitlines()[0][:200]}; the "
                "host keeps its current version until the publisher is back"
            ) from error
