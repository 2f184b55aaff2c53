"""The gRPC and HTTP servers of a generation host, in `areal-jax serve` and in a training run.

Two threads do the work: one runs the host's decode loop; the other runs the event loop and owns every socket.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc
import uvicorn

from areal_jax.config.tree import Config
from areal_jax.generation.engine import Engine
from areal_jax.generation.host import Host
from areal_jax.secret import VARIABLE, Secret, is_loopback
from areal_jax.serving.connections import CONNECTIONS, IDLE_S, allow_connections, http_server, listening
from areal_jax.serving.host_api import HostApi, Publish
from areal_jax.serving.http import Metrics, http_app
from areal_jax.serving.jetstream_service import OrchestratorMethods, RequireSecret, handler
from areal_jax.serving.openai_api import OpenAIApi
from areal_jax.serving.requests import Served
from areal_jax.serving.streams import Streams
from areal_jax.types import ArealError, Sampling

GRACE_S = 2.0
"""Seconds that requests in progress may still take when the server stops."""

PORT_REMEDY = "give another port, or 0 for a free one"

START_S = 60.0
STOP_S = 30.0


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """How much a server does for its clients."""

    queue: int = 64
    """Maximum number of samples that wait for a slot."""
    unread: int = 4096
    """Maximum number of a request's tokens that the client has not read yet; with more, the request fails."""
    deadline_s: float = 600.0
    """The longest that a request over HTTP may take, in seconds."""
    idle_s: float = IDLE_S
    """Seconds that a connection may stay without a request, or with one of which no more arrives."""
    connections: int = CONNECTIONS
    """Maximum number of open HTTP connections, and of gRPC calls under way."""


class Address(NamedTuple):
    """Where a server is reached; port 0 selects a free port."""

    host: str
    port: int
    http_port: int | None
    """None: no HTTP."""
    secret: Secret | None
    """None: the server accepts any client."""
    options: tuple[str, str] = ("--port", "--http-port")
    """Names of the settings of both ports, for messages."""


class HostServers:
    """The gRPC and HTTP servers of one generation host.

    First make the endpoint, then the host, with the endpoint's `streams.hear` and `streams.emit` (beside a
    training run: `streams.beside`) as callbacks; then call `attach(host)` and `start`. `served`: limits and
    defaults for requests; `slots`: how many samples of requests the host decodes at once. `publish`: called
    by /swap to load weights; None: /swap, /pause and /resume are refused, because a training run controls
    the host.
    """

    def __init__(
        self, served: Served, slots: int, limits: ServerLimits, publish: Publish | None = None
    ) -> None:
        self.served, self._publish, self._limits = served, publish, limits
        self._loop = asyncio.new_event_loop()
        self.streams = Streams(self._loop, slots=slots, queue=limits.queue, room_tokens=limits.unread)
        self._thread = threading.Thread(target=self._loop.run_forever, name="answer", daemon=True)
        self.port = self.http_port = 0
        self._http: tuple[uvicorn.Server, asyncio.Task[None]] | None = None

    def attach(self, host: Host) -> None:
        self.streams.host = host
        self.metrics = Metrics(host.statistics)

    def start(self, address: Address) -> None:
        """Starts the servers. Raises ArealError if a port cannot be opened."""
        allow_connections(self._limits.connections)
        self._thread.start()
        try:
            self.in_loop(self._open(address), START_S)
        except BaseException:
            self._end_loop()
            raise

    def stop(self) -> None:
        """Ends requests in progress with status UNAVAILABLE, closes the ports and ends the event loop."""
        self.streams.end()
        try:
            self.in_loop(self._close(), STOP_S)
        finally:
            self._end_loop()

    def in_loop(self, work: Coroutine[Any, Any, Any], deadline_s: float) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(deadline_s)

    async def _open(self, address: Address) -> None:
        with ExitStack() as opened:
            opened_http = None
            if address.http_port is not None:
                opened_http = _listening(address.host, address.http_port, address.options[1])
                opened.enter_context(opened_http)
            self._bind(address)
            await self._grpc.start()
            if opened_http is not None:
                await self._serve_http(opened_http, address.secret)
            opened.pop_all()

    def _bind(self, address: Address) -> None:
        host, port, _, secret, (option, _) = address
        orchestrator = OrchestratorMethods(self.streams, self.served, self.metrics)
        idle_ms = int(self._limits.idle_s * 1000)
        self._grpc = grpc.aio.server(
            interceptors=[RequireSecret(secret)] if secret else [],
            options=[
                ("grpc.so_reuseport", 0),  # else a second server could share the port and its requests
                ("grpc.server_handshake_timeout_ms", idle_ms),
                ("grpc.max_connection_idle_ms", idle_ms),
                ("grpc.keepalive_time_ms", idle_ms),
            ],
            maximum_concurrent_rpcs=self._limits.connections,
        )
        self._grpc.add_generic_rpc_handlers([handler(orchestrator, self.metrics)])
        try:
            self.port = self._grpc.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except RuntimeError as error:
            raise _in_use(option, port, host, error) from None

    async def _serve_http(self, opened: socket.socket, secret: Secret | None) -> None:
        openai = OpenAIApi(self.streams, self.served, self.metrics, self._limits.deadline_s)
        control = HostApi(self.streams, self.served.name, self.metrics, self._publish)
        routes = [*openai.routes(), *control.routes()]
        app = http_app(self.served.name, self.streams, self.metrics, secret, routes)
        idle_s, connections = self._limits.idle_s, self._limits.connections
        server = http_server(
            app, idle_s=idle_s, connections=connections, timeout_graceful_shutdown=int(GRACE_S)
        )
        task = asyncio.create_task(server.serve(sockets=[opened]))
        self._http, self.http_port = (server, task), opened.getsockname()[1]
        while not server.started and not task.done():
            await asyncio.sleep(0.01)

    async def _close(self) -> None:
        await self._grpc.stop(GRACE_S)
        if self._http is not None:
            server, task = self._http
            server.should_exit = True
            await task

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)


def require_free(host: str, ports: Mapping[str, int]) -> None:
    """Raises ArealError if a port of `ports`, option -> port, is taken, before a model is loaded for it."""
    for option, port in ports.items():
        _listening(host, port, option).close()


def _listening(host: str, port: int, option: str) -> socket.socket:
    try:
        return listening(host, port)
    except OSError as error:
        raise _in_use(option, port, host, error.strerror) from None


def _in_use(option: str, port: int, host: str, why: object) -> ArealError:
    remedy = PORT_REMEDY if option.startswith("--") else "give another port"
    return ArealError(f"{option} {port} on {host} cannot be bound ({why}); {remedy}")


# --- beside a training --------------------------------------------------------------------------------------


class TrainingEndpoint(HostServers):
    """The gRPC and HTTP servers of host number `index` of a training run.

    Clients' requests use only the generation.serve_slots slots that the host reserves for them.
    """

    def __init__(self, config: Config, index: int, engine: Engine, secret: Secret | None) -> None:
        g = config.generation
        assert g.serve_port is not None
        is_open = g.serve_is_open or is_loopback(g.serve_address)
        if secret is None and not is_open:
            raise ArealError(
                f"generation.serve_address={g.serve_address} can be reached from other machines, and there "
                f"is no secret; set {VARIABLE}, or generation.serve_is_open=true"
            )
        self._address = Address(
            g.serve_address,
            g.serve_port + index,
            None if g.serve_http_port is None else g.serve_http_port + index,
            None if is_open else secret,
            ("generation.serve_port", "generation.serve_http_port"),
        )
        limits = ServerLimits()
        served = Served(
            config.run.name,
            engine.tokenizer,
            length=engine.length,
            max_samples=engine.reserved_slots + limits.queue,
            sampling=g.sampling,
            decode_sampling=Sampling(temperature=0.0, max_tokens=g.max_tokens),
            has_penalties=False,
        )
        super().__init__(served, engine.reserved_slots, limits)

    def around(self, run: Callable[[], None]) -> Callable[[], None]:
        """Returns a function that starts the servers, calls `run` (the host's loop) and stops them."""

        def answering() -> None:
            self.start(self._address)
            try:
                run()
            finally:
                self.stop()

        return answering
