"""Ports for servers that a test starts elsewhere: in another process, or by a number in a config."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def reserved_ports(count: int = 1) -> Iterator[list[int]]:
    """Ports of 127.0.0.1 that follow one another, and that no other process takes before the block ends.

    They lie below those that the system hands out. Each is bound by a socket that does not listen. A server
    that sets SO_REUSEADDR or SO_REUSEPORT, as Redis, gRPC, Slurm and our own do, binds it all the same.
    """
    while True:
        first = 10_000 + secrets.randbelow(20_000)
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    _reserve(stack.enter_context(socket.socket()), port)
            except OSError:
                continue
            yield list(range(first, first + count))
            return


def _reserve(holder: socket.socket, port: int) -> None:
    holder.bind(("127.0.0.1", port))
    # After bind, so that a second reservation of the port is an error.
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        holder.setsockopt(socket.SOL_SOCKET, option, 1)
