"""A listening TCP socket for asyncio's servers."""

from __future__ import annotations

import socket

GONE_S = 120
"""Seconds after which a connection ends if the other machine is gone, or reads nothing of what is sent."""


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
        _end_dead_peers(found)
        found.bind((host.strip("[]"), port))
        found.listen(backlog)
    except OSError:
        found.close()
        raise
    return found


def _end_dead_peers(found: socket.socket) -> None:
    """Makes the kernel end connections of clients that are gone; accepted sockets inherit these options."""
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted = {"TCP_KEEPIDLE": GONE_S // 2, "TCP_KEEPINTVL": GONE_S // 12, "TCP_KEEPCNT": 6}
    wanted["TCP_USER_TIMEOUT"] = GONE_S * 1000
    for name, value in wanted.items():
        if (option := getattr(socket, name, None)) is not None:  # not every system has each
            found.setsockopt(socket.IPPROTO_TCP, option, value)
