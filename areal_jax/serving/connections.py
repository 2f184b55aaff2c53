"""HTTP connections that end if their client brings no request, a limit on their number, and their socket."""

from __future__ import annotations

import asyncio
import resource
import socket
from functools import partial
from typing import Any

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

IDLE_S = 60.0
"""Seconds that a connection may stay without a request, or with one of which no more arrives."""

CONNECTIONS = 2048
"""Maximum number of open connections."""

REFUSED_S = 5.0
"""Seconds that a connection beyond the limit has for its request, which is answered with status 503."""

SPARE = 64
"""Number of connections beyond the limit from which on they are closed at once."""

OTHER_FILES = 512
"""Number of files that a process may need besides its HTTP connections."""

WHOLE_REQUEST = 10
"""The body of a request must arrive in so many times the idle time, however steadily it comes."""


def http_server(app: ASGIApp, *, idle_s: float = IDLE_S, connections: int = CONNECTIONS, **more: Any) -> Any:
    """Returns uvicorn's server of `app`, without a log; `more`: further settings of uvicorn."""
    protocol: Any = partial(Connection, idle_s=idle_s, most=connections)
    keep_alive: Any = idle_s  # typed as int, used as a number of seconds
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        log_config=None,
        lifespan="off",
        access_log=False,
        timeout_keep_alive=keep_alive,
        **more,
    )
    return uvicorn.Server(config)


class Connection(H11Protocol):
    """A connection to uvicorn, which itself waits without end for a request, or for the rest of one.

    The head of a request must be complete `idle_s` seconds after the connection was made, or after the last
    answer; of a body, a part must arrive in each `idle_s` seconds. An answer may take any time. With more
    than `most` connections, a new one gets status 503, except for /health.
    """

    def __init__(self, *args: Any, idle_s: float, most: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._idle_s, self._most = idle_s, most
        self._begun_s = self._last_s = 0.0
        """Times at which the request began, and at which its last part arrived."""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        count = len(self.connections)
        if count > self._most + SPARE:
            transport.abort()
            return
        if count > self._most:
            self.app, self._idle_s = partial(_busy, self.app, self._most), min(self._idle_s, REFUSED_S)
        self._begin()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._begin()
        elif not self._awaits_head:
            self._last_s = self.loop.time()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._begin()

    @property
    def _awaits_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _begin(self) -> None:
        self._begun_s = self._last_s = self.loop.time()

    def _watch(self) -> None:
        """Closes the connection if the client is late; else looks again when it may be."""
        now_s = self.loop.time()
        if not self._awaits_head and (not self.cycle.more_body or self.flow.read_paused):
            self._begin()  # the server is at work
        late_s = min(self._last_s + self._idle_s, self._begun_s + WHOLE_REQUEST * self._idle_s)
        if now_s >= late_s:
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(late_s - now_s, self._watch)


def allow_connections(count: int) -> None:
    """Lets this process have so many open connections, as far as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


async def _busy(app: ASGIApp, most: int, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers a connection beyond the limit; health checks are answered as always."""
    if scope["type"] == "http" and scope["path"] == "/health":
        await app(scope, receive, send)
        return
    error = {
        "message": f"{most} connections are open, as many as --connections allows; retry later",
        "type": "unavailable_error",
        "param": None,
        "code": "unavailable",
    }
    headers = {"retry-after": "1", "connection": "close"}
    await JSONResponse({"error": error}, 503, headers)(scope, receive, send)


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
