"""One reader's pull of one version: leaf by leaf, from every process that publishes it, onto its own mesh.

Leaves come in portions, the next on its way while one is put together, so that little lies twice on any
device. The runtime's own timeouts do not end a pull on every platform, so every wait here polls.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import transfer
from jax.sharding import Sharding, SingleDeviceSharding

from areal_jax.types import PolicyVersion
from areal_jax.weights.channel import Channel, ChannelError, join
from areal_jax.weights.pieces import Box, are_whole, assemble, landing, places
from areal_jax.weights.staged import described
from areal_jax.weights.store import PublisherLostError, VersionDamagedError, VersionGoneError

PORTION_BYTES = 128 << 20
"""Leaves that travel together; a larger one travels alone."""
SOCKETS = 2
"""Connections that share a transfer: docs/performance.md has what one to four took."""
CHUNK_BYTES = 4 << 20
CHUNKS = 4
"""What the runtime stages on either side: CHUNKS buffers of CHUNK_BYTES for each direction."""
POLL_S = 0.0005


def start_server(host: str) -> Any:
    """This process's end of transfers between devices, listening at a numeric host."""
    client = jax.local_devices()[0].client
    here = join(host, 0)
    return transfer.start_transfer_server(
        client, here, [here] * SOCKETS, max_num_parallel_copies=CHUNKS, transfer_size=CHUNK_BYTES
    )


def until(end_s: float) -> datetime:
    """A time of time.monotonic(), as the runtime takes it."""
    return datetime.now(UTC) + timedelta(seconds=end_s - time.monotonic())


class Links:
    """A reader's servers, by its own address, and connections, by the publisher's; one broken is replaced."""

    def __init__(self) -> None:
        self._servers: dict[str, Any] = {}
        self._connections: dict[tuple[str, str], Any] = {}

    def connect(self, own_host: str, address: str) -> Any:
        if own_host not in self._servers:
            self._servers[own_host] = start_server(own_host)
        key = (own_host, address)
        if key not in self._connections:
            self._connections[key] = self._servers[own_host].connect(address)
        return self._connections[key]

    def cut(self) -> None:
        """Give up all connections: what is still on its way becomes an error, and lets go of its memory."""
        for connection in self._connections.values():
            connection._poison_connection()
        self._connections.clear()


class _Source(NamedTuple):
    """One process that publishes."""

    channel: Channel
    connection: Any
    pieces: dict[str, list[Box]]


class _Portion(NamedTuple):
    names: list[str]
    pieces: dict[str, list[tuple[Box, jax.Array]]]
    offers: list[tuple[Channel, int]]


class Pull:
    """What the publisher says of the version, and `take`, which pulls leaves of it. Close it in the end."""

    def __init__(
        self, links: Links, address: str, secret: str | None, version: PolicyVersion, deadline_s: float
    ) -> None:
        """Raises VersionGoneError, PublisherLostError, VersionDamagedError where its pieces are not whole."""
        self.version, self._links = version, links
        self._address, self._secret, self._deadline_s = address, secret, deadline_s
        self._end_s = time.monotonic() + deadline_s
        self._sources: list[_Source] = []
        self.pulled_bytes = 0
        try:
            with self._told():
                first = self._describe(address, wait_s=0.0)
                for other in first["addresses"]:
                    if other != first["address"]:
                        self._describe(other, wait_s=deadline_s)
        except BaseException:
            self.close()
            raise
        self.digest: str = first["digest"]
        self.leaves: dict[str, str] = first["leaves"]
        """As digest.leaf_digests gives them."""

    def close(self) -> None:
        for source in self._sources:
            source.channel.close()

    def take(self, wanted: Mapping[str, Sharding]) -> Iterator[dict[str, jax.Array]]:
        """The leaves of these names, a portion at a time, each whole and on its sharding; their bits are not
        checked.

        Raises VersionGoneError where a newer version replaced this one meanwhile, PublisherLostError.
        """
        under_way: deque[_Portion] = deque()
        with self._told():
            for names in self._portions(wanted):
                under_way.append(self._start(names, wanted))
                if len(under_way) > 1:
                    yield self._end(under_way.popleft(), wanted)
            while under_way:
                yield self._end(under_way.popleft(), wanted)

    def canary(self) -> np.ndarray:
        """The publisher's; asked for last, since it may be computing it still. Raises as `take` does."""
        with self._told():
            return np.asarray(self._ask(self._sources[0].channel, ask="canary")["canary"])

    def _describe(self, address: str, wait_s: float) -> dict[str, Any]:
        channel = Channel(address, self._secret, self._left_s())
        try:
            said = self._ask(channel, ask="describe", version=self.version, wait_s=wait_s)
        except BaseException:
            channel.close()
            raise
        connection = self._links.connect(channel.own_host, said["transfer"])
        pieces = {
            name: [tuple((start, stop) for start, stop in box) for box in boxes]
            for name, boxes in said["pieces"].items()
        }
        self._sources.append(_Source(channel, connection, pieces))
        return said

    def _ask(self, channel: Channel, **request: Any) -> dict[str, Any]:
        said = channel.ask(request, self._end_s)
        if "gone" in said:
            raise VersionGoneError(
                f"version {self.version} is not in the store, which holds {said['gone']}; load latest()"
            )
        return said

    # --- portions -------------------------------------------------------------------------------------------

    def _portions(self, names: Iterable[str]) -> Iterator[list[str]]:
        portion, size = [], 0
        for name in names:
            like = described(self.leaves[name])
            own = like.size * like.dtype.itemsize
            if portion and size + own > PORTION_BYTES:
                yield portion
                portion, size = [], 0
            portion.append(name)
            size += own
        if portion:
            yield portion

    def _start(self, names: list[str], wanted: Mapping[str, Sharding]) -> _Portion:
        portion = _Portion(names, {name: [] for name in names}, [])
        for source in self._sources:
            held = [name for name in names if source.pieces.get(name)]
            if not held:
                continue
            number = self._ask(source.channel, ask="pull", leaves=held)["number"]
            portion.offers.append((source.channel, number))
            places_of = [(name, box) for name in held for box in source.pieces[name]]
            specs = [self._spec(name, box, wanted[name]) for name, box in places_of]
            arrays = source.connection.pull(number, specs, until(self._end_s))
            for (name, box), array in zip(places_of, arrays, strict=True):
                portion.pieces[name].append((box, array))
                self.pulled_bytes += array.nbytes
        return portion

    def _spec(self, name: str, box: Box, sharding: Sharding) -> jax.ShapeDtypeStruct:
        like = described(self.leaves[name])
        device = landing(box, places(sharding, like.shape))
        shape = tuple(stop - start for start, stop in box)
        return jax.ShapeDtypeStruct(shape, like.dtype, sharding=SingleDeviceSharding(device))

    def _end(self, portion: _Portion, wanted: Mapping[str, Sharding]) -> dict[str, jax.Array]:
        for pieces in portion.pieces.values():
            for _, piece in pieces:
                self._wait_for(piece)
        for channel, number in portion.offers:
            self._ask(channel, ask="done", number=number)
        return {name: self._whole(name, portion.pieces[name], wanted[name]) for name in portion.names}

    def _wait_for(self, piece: Any) -> None:
        while not piece.is_ready():
            if time.monotonic() > self._end_s:
                raise TimeoutError("timed out")
            time.sleep(POLL_S)
        piece.block_until_ready()  # raises what became of it

    def _whole(self, name: str, pieces: list[tuple[Box, jax.Array]], sharding: Sharding) -> jax.Array:
        like = described(self.leaves[name])
        if not are_whole([box for box, _ in pieces], like.shape):
            raise VersionDamagedError(
                f"version {self.version}: leaf {name} of shape {like.shape} came in pieces that do not "
                f"make it up: {[box for box, _ in pieces]}; do all processes of the trainer publish?"
            )
        return assemble(like.shape, like.dtype, sharding, pieces)

    # --- deadlines ------------------------------------------------------------------------------------------

    def _left_s(self) -> float:
        return max(0.0, self._end_s - time.monotonic())

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What the network or the other side does is told as PublisherLostError, and the links are cut."""
        try:
            yield
        except (ChannelError, TimeoutError, jax.errors.JaxRuntimeError) as error:
            self._links.cut()
            raise PublisherLostError(
                f"version {self.version} could not be pulled from {self._address} within "
                f"{self._deadline_s:g} s: {(str(error) or 'no answer').splitlines()[0][:200]}; what was "
                "adopted before stays in force until the publisher is back"
            ) from error
