"""`areal-jax serve`: one generation host behind gRPC and HTTP, from a model's name to its last request.

Three threads: the caller's, which waits; the decode loop's; and the event loop's, which holds every socket.
Nothing is bound to a port before every program is compiled.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import jax
import uvicorn

from areal_jax.config import load_config
from areal_jax.generation.commands import Stop
from areal_jax.generation.engine import Engine
from areal_jax.generation.host import Host
from areal_jax.generation.serving import Orchestrator, RequireSecret, Rollout, handlers
from areal_jax.generation.serving_metrics import Metrics, http_app
from areal_jax.generation.serving_requests import RequestError, Served, invalid
from areal_jax.generation.serving_secret import VARIABLE, Secret, require_secret
from areal_jax.generation.serving_streams import Streams
from areal_jax.models.huggingface import open_folder
from areal_jax.models.model import Model
from areal_jax.parallel.mesh import make_mesh
from areal_jax.runtime.assembly import make_engine
from areal_jax.runtime.devices import use_virtual_cpus
from areal_jax.runtime.eval_jobs import DEFAULTS, model_section
from areal_jax.runtime.evaluator import as_served
from areal_jax.runtime.jobs import use_compilation_cache
from areal_jax.runtime.sources import MODEL_CONFIG, open_source
from areal_jax.types import ArealError, Sampling, VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.memory import MemoryStore
from areal_jax.weights.orbax import OrbaxStore
from areal_jax.weights.staged import committed
from areal_jax.weights.store import load_newer

SERVE_DEFAULTS = DEFAULTS
"""What a model is served with, unless words say otherwise."""

PORT_REMEDY = "give another, or 0 for a free one"

GRACE_S = 2.0
"""What requests in progress get when the server stops."""

START_S = 60.0
STOP_S = 30.0
WATCH_S = 0.2


@dataclass(frozen=True)
class ServeSettings:
    host: str = "127.0.0.1"
    port: int = 9000
    """gRPC; 0 takes a free one."""
    http_port: int = 9001
    queue: int = 1024
    """Samples that may wait beyond the slots."""
    unread: int = 4096
    """Tokens that a stream may leave unread."""
    is_sampled: bool = False
    """Decode draws as generation.* says; greedy otherwise."""
    weights: tuple[Path, ...] = ()
    """Folders that Swap may read."""
    secret: Secret | None = None
    deadline_s: float = 120.0
    """How long a swap or a pause may take."""


def read_secret(file: Path | None) -> Secret | None:
    """Of the file, else of the environment; None where neither says one. Raises ArealError."""
    if file is None:
        text = os.environ.get(VARIABLE)
        return None if text is None else Secret(text)
    try:
        return Secret(file.read_text("utf-8").strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ArealError(f"--secret-file {file} cannot be read: {error}; give a file that holds it") from None


class Server:
    """One host's two services and its HTTP side. `start` returns once they answer; `stop` ends them."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        params: VersionedParams,
        settings: ServeSettings,
        sampling: Sampling,
        on_update: str = "recompute",
    ) -> None:
        """`engine` has penalties. Raises ArealError for an address that needs a secret."""
        require_secret(settings.host, settings.secret)
        self._settings, self._engine = settings, engine
        self._loop = asyncio.new_event_loop()
        self._store = MemoryStore(engine.canary)
        self._store.publish(params)
        self.served = Served(
            name,
            engine.get_tokenizer(),
            length=engine.length,
            max_samples=engine.slots + settings.queue,
            sampling=sampling,
            decode_sampling=sampling
            if settings.is_sampled
            else Sampling(temperature=0.0, max_tokens=sampling.max_tokens),
        )
        self.streams = Streams(
            self._loop, slots=engine.slots, queue=settings.queue, room_tokens=settings.unread
        )
        self.host = Host(
            "the server",
            engine,
            self._store,
            self.streams.emit,
            seed=secrets.randbits(31),
            sampling=sampling,
            on_update=on_update,
            on_tokens=self.streams.on_tokens,
            is_server=True,
        )
        self.streams.attach(self.host)
        self._decoding = threading.Thread(target=self._decode, name="decode", daemon=True)
        self._answering = threading.Thread(target=self._loop.run_forever, name="answer", daemon=True)
        self._failure: BaseException | None = None
        self.port = self.http_port = 0

    def start(self) -> None:
        """Raises ArealError for a port that is in use."""
        self.host.step()  # the first version is in force before anybody asks
        self._answering.start()
        try:
            self._in_loop(self._open(), START_S)
        except BaseException:
            self._end_loop()
            raise
        self._decoding.start()

    def wait(self) -> None:
        """Until the decode loop ends; raises what ended it."""
        while self._decoding.is_alive():
            self._decoding.join(WATCH_S)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Requests in progress end with UNAVAILABLE, ports are closed, threads have ended."""
        self.streams.tell(Stop())
        self._decoding.join(STOP_S)
        try:
            self._in_loop(self._close(), STOP_S)
        finally:
            self._end_loop()

    def _decode(self) -> None:
        try:
            self.streams.run()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits, which raises it
            self._failure = error

    # --- in the event loop ----------------------------------------------------------------------------------

    async def _open(self) -> None:
        s = self._settings
        metrics = Metrics(self.host.statistics)
        orchestrator = Orchestrator(self.streams, self.served)
        rollout = Rollout(self.streams, self.served, metrics, self._publish, s.deadline_s)
        self._grpc = grpc.aio.server(
            interceptors=[RequireSecret(s.secret)] if s.secret else [],
            options=[("grpc.so_reuseport", 0)],  # or a second server would share the port, and the requests
        )
        self._grpc.add_generic_rpc_handlers(handlers(orchestrator, rollout, metrics))
        try:
            self.port = self._grpc.add_insecure_port(
                f"[{s.host}]:{s.port}" if ":" in s.host else f"{s.host}:{s.port}"
            )
        except RuntimeError as error:
            raise ArealError(
                f"--port {s.port} on {s.host} cannot be bound ({error}); {PORT_REMEDY}"
            ) from None
        listening = _listening(s.host, s.http_port)
        self.http_port = listening.getsockname()[1]
        app = http_app(
            self.served.name, lambda: self.streams.is_live, self.host.statistics, metrics, s.secret
        )
        self._http = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", access_log=False))
        self._http_task = asyncio.create_task(self._http.serve(sockets=[listening]))
        while not self._http.started and not self._http_task.done():
            await asyncio.sleep(0.01)
        await self._grpc.start()

    async def _close(self) -> None:
        await self._grpc.stop(GRACE_S)
        self._http.should_exit = True
        await self._http_task

    def _in_loop(self, work: Coroutine[Any, Any, None], deadline_s: float) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(deadline_s)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._answering.join(STOP_S)

    # --- weights --------------------------------------------------------------------------------------------

    def _publish(self, path: str, version: int) -> VersionedParams:
        """What `path` holds becomes the host's next version."""
        folder = self._allowed(path)
        if committed(folder):
            return self._store.publish(self._newest_in(folder, version))
        if not (folder / MODEL_CONFIG).exists():
            raise invalid(
                f"path={path}: neither versions nor a Hugging Face model are there; give a run's weights "
                f"folder, or one with {MODEL_CONFIG}"
            )
        params = self._of_model(folder)
        return self._store.publish(VersionedParams(version + 1, params, digest(params)))

    def _allowed(self, path: str) -> Path:
        try:
            folder = Path(path).resolve()
        except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, a zero byte
            raise invalid(f"path={path!r:.200} is no path ({error}); give a folder's") from None
        if not any(folder.is_relative_to(root.resolve()) for root in self._settings.weights):
            raise RequestError(
                "PERMISSION_DENIED",
                f"path={path!r:.200} is below no folder that this server may read; start it with --weights "
                "FOLDER",
            )
        return folder

    def _newest_in(self, folder: Path, version: int) -> VersionedParams:
        found = load_newer(OrbaxStore(folder, self._engine.canary), self._engine.param_shardings, version)
        if found is None:
            raise RequestError(
                "FAILED_PRECONDITION",
                f"{folder} holds versions up to {committed(folder)[-1]}, and {version} is served: versions "
                "only grow",
            )
        return found

    def _of_model(self, folder: Path) -> Any:
        """Raises ArealError for another architecture than the one that is served."""
        model, theirs = self._engine.model, open_folder(folder)
        shapes = [
            jax.tree.map(lambda leaf: leaf.shape, tree)
            for tree in (model.abstract_params, Model(theirs.config, model.tokenizer).abstract_params)
        ]
        if shapes[0] != shapes[1]:
            raise ArealError(
                f"{folder} is of another shape than {self.served.name}, for which every program is compiled; "
                "serve it by its own name"
            )
        return theirs.load(model.abstract_params, self._engine.param_shardings)


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), port), family=family)
    except OSError as error:
        raise ArealError(
            f"--http-port {port} on {host} cannot be bound ({error.strerror}); {PORT_REMEDY}"
        ) from None


# --- from a model's name ------------------------------------------------------------------------------------


def make_server(name: str, words: Sequence[str], settings: ServeSettings) -> Server:
    """The server of a model, every program compiled. Raises ArealError."""
    require_secret(settings.host, settings.secret)
    config = load_config(SERVE_DEFAULTS, *words, {"model": model_section(name)})
    use_compilation_cache()
    source = open_source(config, {})
    model = source.model.base
    use_virtual_cpus(config.runtime.host_tensor)
    mesh = make_mesh({"tensor": config.runtime.host_tensor}, jax.devices(), "the server")
    engine = make_engine(config.generation, model, mesh, has_penalties=True)
    params = as_served(VersionedParams(0, source.load(engine.param_shardings), ""), config)
    engine.warm(engine.load_params(params))
    on_update = config.generation.on_update or "recompute"
    return Server(name, engine, params, settings, config.generation.sampling, on_update)


def serve(name: str, words: Sequence[str], settings: ServeSettings, say: Callable[[str], None]) -> None:
    """Until interrupted. Raises ArealError, and whatever ends the decode loop."""
    server = make_server(name, words, settings)
    server.start()
    say(
        f"{name} is served: gRPC on {settings.host}:{server.port}, HTTP on {settings.host}:"
        f"{server.http_port} (/health, /metrics)"
    )
    try:
        server.wait()
    finally:
        server.stop()
