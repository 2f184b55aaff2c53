"""A listening TCP socket for asyncio's servers."""

from __future__ import annotations

import socket


def listening(host: str, port: int, backlog: int = 2048) -> socket.socket:
    """Returns a socket that listens at `host`, a name or an IPv4 or IPv6 address; 0 chooses a free port.

    Raises OSError if the port is taken or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off for sockets of this protocol alone. `socket.create_server` names no
    # protocol, and each answer then waits 40 ms for an acknowledgement between its head and its body.
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host.strip("[]"), port))
        found.listen(backlog)
    except OSError:
        found.close()
        raise
    return found
