"""Arrays on their way from device to device between two processes, through jax.experimental.transfer.

The process that has the arrays offers them (`Offers`), each group of arrays under a random number that it
sends over a channel (`channel`). The other process pulls them under that number (`Incoming`). The timeouts of
jax do not end a pull on every platform, so `wait_for` polls a deadline.

Each peer gets a transfer server of its own, because a server of jaxlib 0.10 sometimes moves no more arrays
after a connection broke while it was being made. A start takes 0.4 ms.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from areal_jax.weights.transfer.channel import join
from areal_jax.weights.transfer.pieces import Box, landing, places

SOCKETS = 2
"""Number of connections over which a transfer is spread; docs/figures.md compares one to four."""
CHUNK_BYTES = 4 << 20
CHUNKS = 4
"""Number of staging buffers, of CHUNK_BYTES each, that jax allocates per transfer server and direction."""
POLL_S = 0.0005


def start_server(host: str) -> Any:
    """Starts and returns a server for transfers between devices, listening at `host`, a numeric address."""
    client = jax.local_devices()[0].client
    here = join(host, 0)
    return transfer.start_transfer_server(
        client, here, [here] * SOCKETS, max_num_parallel_copies=CHUNKS, transfer_size=CHUNK_BYTES
    )


class Offers:
    """Arrays of this process that one peer may pull, until `close`; `address`: where the peer connects."""

    def __init__(self, host: str) -> None:
        """`host`: the numeric address at which the peer reaches this process."""
        self._server = start_server(host)
        self.address: str = self._server.address()
        self._counts: dict[int, int] = {}
        """Random number that permits the pull of some arrays -> how many arrays these are."""
        self._nothing = jnp.zeros(1, jnp.int8)

    def add(self, arrays: Sequence[jax.Array]) -> int:
        """Offers the arrays; returns the number under which the peer can pull them, once."""
        # Random and long: the number alone permits the pull, which needs no secret.
        number = secrets.randbits(63)
        self._server.await_pull(number, list(arrays))
        self._counts[number] = len(arrays)
        return number

    def close(self) -> None:
        """Releases the arrays, which cannot be pulled any more."""
        # The runtime has no way to cancel an offer; one under the same number replaces it.
        for number, count in self._counts.items():
            self._server.await_pull(number, [self._nothing] * count)
        self._counts.clear()


class Incoming:
    """A connection over which this process pulls a peer's arrays; the caller must call `close`."""

    def __init__(self, own_host: str, address: str) -> None:
        """`own_host`: this process's numeric address towards the peer. `address`: the peer's `Offers`."""
        # The server owns the connection: it must live as long.
        self._server = start_server(own_host)
        self._connection = self._server.connect(address)

    def pull(self, number: int, specs: Sequence[jax.ShapeDtypeStruct], end_s: float) -> list[jax.Array]:
        """Begins to pull the arrays offered under `number`, with these shapes, dtypes and shardings.

        Returns arrays that are on their way; `wait_for` them. `end_s`: as in `wait_for`.
        """
        left = timedelta(seconds=max(0.0, end_s - time.monotonic()))
        return self._connection.pull(number, list(specs), datetime.now(UTC) + left)

    def close(self) -> None:
        """Disconnects from the peer; pulls in progress fail and free their memory."""
        # Private, but the only way to end a pull if the other side hangs: the runtime's deadline does not.
        self._connection._poison_connection()


def wait_for(arrays: Iterable[Any], end_s: float) -> None:
    """Waits until all of the arrays, which `Incoming.pull` returned, have arrived.

    Raises TimeoutError at `end_s`, a time of time.monotonic(), and jax.errors.JaxRuntimeError if a pull
    failed.
    """
    for array in arrays:
        # Polled, since `block_until_ready` would wait without a deadline.
        while not array.is_ready():
            if time.monotonic() > end_s:
                raise TimeoutError("timed out")
            time.sleep(POLL_S)
        array.block_until_ready()  # raises the error of a failed pull


def spec_of(box: Box, like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Describes the piece at position `box` of an array for its pull: shape, dtype, and the device to pull it
    onto.

    `like`: the array's shape, dtype and sharding in this process. The device is the one that needs most of
    the piece.
    """
    device = landing(box, places(like.sharding, like.shape))
    shape = tuple(stop - start for start, stop in box)
    return jax.ShapeDtypeStruct(shape, like.dtype, sharding=SingleDeviceSharding(device))
