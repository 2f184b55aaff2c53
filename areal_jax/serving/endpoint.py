"""The gRPC server of a generation host, in `areal-jax serve` and in a training run.

Two threads do the work: one runs the host's decode loop; the other runs the event loop and owns every socket.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import grpc

from areal_jax.config.tree import Config
from areal_jax.generation.engine import Engine
from areal_jax.generation.host import Host
from areal_jax.serving.http import Metrics
from areal_jax.serving.requests import Served
from areal_jax.serving.secret import VARIABLE, Secret, is_loopback
from areal_jax.serving.services import Publish, RequireSecret, Services, handlers
from areal_jax.serving.streams import Streams
from areal_jax.types import ArealError, Sampling

GRACE_S = 2.0
"""Seconds that requests in progress may still take when the server stops."""

PORT_REMEDY = "give another port, or 0 for a free one"

START_S = 60.0
STOP_S = 30.0

QUEUE = 64
"""Maximum number of samples of clients' requests that wait for a slot on a host of a training run."""

UNREAD = 4096
"""Maximum number of a request's tokens that the client has not read yet; with more, the request fails."""


class Endpoint:
    """The gRPC server of one generation host.

    First make the endpoint, then the host, with the endpoint's `streams.hear` and `streams.emit` (beside a
    training run: `streams.beside`) as callbacks; then call `attach(host)` and `start`. `served`: limits and
    defaults for requests; `slots`: how many samples of requests the host decodes at once; `queue`: maximum
    number of samples that wait for a slot; `unread`: maximum number of a request's tokens that the client has
    not read yet. `publish`: called by the RPC Swap to load weights; None: Swap, Pause and Resume are refused,
    because a training run controls the host.
    """

    def __init__(
        self, served: Served, slots: int, queue: int, unread: int = UNREAD, publish: Publish | None = None
    ) -> None:
        self.served, self._publish = served, publish
        self._loop = asyncio.new_event_loop()
        self.streams = Streams(self._loop, slots=slots, queue=queue, room_tokens=unread)
        self._thread = threading.Thread(target=self._loop.run_forever, name="answer", daemon=True)
        self.port = 0

    def attach(self, host: Host) -> None:
        self.streams.host = host
        self.metrics = Metrics(host.statistics)

    def start(self, host: str, port: int, secret: Secret | None, option: str) -> None:
        """Starts the server on address `host`; if `secret` is None, the server accepts any client.

        Port 0 selects a free port. Raises ArealError if the port cannot be opened; the message names
        `option`, the command-line option or config key with which the user sets the port.
        """
        self._thread.start()
        try:
            self.in_loop(self._open(host, port, secret, option), START_S)
        except BaseException:
            self._end_loop()
            raise

    def stop(self) -> None:
        """Ends requests in progress with gRPC status UNAVAILABLE, closes the port and ends the event loop."""
        self.streams.end()
        try:
            self.in_loop(self._grpc.stop(GRACE_S), STOP_S)
        finally:
            self._end_loop()

    def in_loop(self, work: Coroutine[Any, Any, Any], deadline_s: float) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(deadline_s)

    async def _open(self, host: str, port: int, secret: Secret | None, option: str) -> None:
        services = Services(self.streams, self.served, self.metrics, self._publish)
        self._grpc = grpc.aio.server(
            interceptors=[RequireSecret(secret)] if secret else [],
            options=[("grpc.so_reuseport", 0)],  # else a second server could share the port and its requests
        )
        self._grpc.add_generic_rpc_handlers(handlers(services, self.metrics))
        try:
            self.port = self._grpc.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except RuntimeError as error:
            free = ", or 0 for a free one" if option.startswith("--") else ""
            raise ArealError(
                f"{option} {port} on {host} cannot be bound ({error}); give another port{free}"
            ) from None
        await self._grpc.start()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)


# --- beside a training --------------------------------------------------------------------------------------


class TrainingEndpoint(Endpoint):
    """The gRPC server of host number `index` of a training run.

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
        self._address = g.serve_address, g.serve_port + index, None if is_open else secret
        served = Served(
            config.run.name,
            engine.tokenizer,
            length=engine.length,
            max_samples=engine.reserved_slots + QUEUE,
            sampling=g.sampling,
            decode_sampling=Sampling(temperature=0.0, max_tokens=g.max_tokens),
            has_penalties=False,
        )
        super().__init__(served, engine.reserved_slots, QUEUE)

    def around(self, run: Callable[[], None]) -> Callable[[], None]:
        """Returns a function that starts this server, calls `run` (the host's loop), and stops the server."""

        def answering() -> None:
            self.start(*self._address, "generation.serve_port")
            try:
                run()
            finally:
                self.stop()

        return answering
