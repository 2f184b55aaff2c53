"""`areal-jax serve`: one generation host behind gRPC and HTTP.

Three threads: the caller's, which waits; the decode loop's; and the event loop's, which owns every socket.
The server opens its ports only after it has compiled every program.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax

from areal_jax.assembly.device_memory_remedies import HOST, explained
from areal_jax.assembly.devices import host_mesh, use_compilation_cache
from areal_jax.assembly.gpus import use_gpu_environment
from areal_jax.assembly.parts import make_engine
from areal_jax.assembly.sources import open_source
from areal_jax.assembly.tokenizer_source import MODEL_CONFIG
from areal_jax.config.loading import load_config
from areal_jax.config.tree import Config
from areal_jax.evaluation.command import DEFAULTS, model_section
from areal_jax.evaluation.evaluator import as_served
from areal_jax.generation.commands import Stop
from areal_jax.generation.engine import Engine
from areal_jax.generation.host import Host
from areal_jax.models.io.huggingface import open_folder
from areal_jax.models.model import Model
from areal_jax.observe.threads import reporting_thread
from areal_jax.secret import Secret, require_secret
from areal_jax.serving.answers import require_tags
from areal_jax.serving.endpoint import STOP_S, Address, HostServers, ServerLimits, require_free
from areal_jax.serving.requests import RequestError, Served, invalid
from areal_jax.types import ArealError, Sampling, VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.manifest import committed
from areal_jax.weights.memory import MemoryStore
from areal_jax.weights.orbax import OrbaxReader
from areal_jax.weights.store import load_newer

WATCH_S = 0.2


@dataclass(frozen=True, kw_only=True)
class ServeSettings(ServerLimits):
    host: str = "127.0.0.1"
    port: int = 9000
    """Port of JetStream's gRPC service; 0 selects a free port."""
    http_port: int = 9001
    queue: int = 1024
    is_sampled: bool = False
    """True: JetStream's Decode requests are sampled by the config's generation.*; False: decoded greedily."""
    is_answers_only: bool = False
    """True: clients get the text of answers alone; False: the text, token ids and log-probs of all tokens."""
    weights: tuple[Path, ...] = ()
    """Folders from which a request to /swap may load weights, with subfolders; empty: it is refused."""
    secret: Secret | None = None


class Server:
    """A generation host behind gRPC and HTTP, which answer from `start` until `stop`."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        params: VersionedParams,
        settings: ServeSettings,
        sampling: Sampling,
        *,
        on_update: str = "recompute",
        calls_ahead: int | Literal["auto"] = "auto",
    ) -> None:
        """`engine` must be made with has_penalties=True, because requests may have penalties.

        `name`: the model's name in requests and in /health; `params`: the weights to start with; `sampling`:
        the defaults of requests; `on_update`: what a swap does to live samples, as generation.on_update;
        `calls_ahead`: as generation.calls_ahead. Raises ArealError if other machines can reach settings.host
        and settings.secret is None, or if settings.is_answers_only is set and the tokenizer has no tags.
        """
        require_secret(settings.host, settings.secret)
        if settings.is_answers_only:
            require_tags(engine.tokenizer, name)
        self._settings, self._engine, self.model = settings, engine, engine.model
        self._store = MemoryStore(engine.canary, engine.model.config.params_dtype)
        self._store.publish(params)
        served = Served(
            name,
            engine.tokenizer,
            length=engine.length,
            max_samples=engine.slots + settings.queue,
            sampling=sampling,
            decode_sampling=sampling
            if settings.is_sampled
            else Sampling(temperature=0.0, max_tokens=sampling.max_tokens),
            is_answers_only=settings.is_answers_only,
        )
        self._endpoint = HostServers(served, engine.slots, settings, self._publish)
        self.served, self.streams = served, self._endpoint.streams
        self.host = Host(
            "the server",
            engine,
            self._store,
            self.streams.emit,
            seed=secrets.randbits(31),
            sampling=sampling,
            on_update=on_update,
            on_tokens=self.streams.hear,
            calls_ahead=calls_ahead,
        )
        self._endpoint.attach(self.host)
        self._failures: list[BaseException] = []
        self._decoding = reporting_thread("decode", self.streams.run, self._failures.append)
        self.port = self.http_port = 0

    def start(self) -> None:
        """Opens the ports and starts decoding. Raises ArealError if a port cannot be opened."""
        self.host.step()  # adopt the first version before any request arrives
        s = self._settings
        self._endpoint.start(Address(s.host, s.port, s.http_port, s.secret))
        self.port, self.http_port = self._endpoint.port, self._endpoint.http_port
        self._decoding.start()

    def wait(self) -> None:
        """Blocks until the decode loop ends; if an exception ended the loop, raises that exception."""
        while self._decoding.is_alive():
            self._decoding.join(WATCH_S)
        if self._failures:
            raise self._failures[0]

    def stop(self) -> None:
        """Ends requests in progress with status UNAVAILABLE, closes the ports and joins the threads."""
        self.streams.tell(Stop())
        self._decoding.join(STOP_S)
        self._endpoint.stop()

    # --- weights --------------------------------------------------------------------------------------------

    def _publish(self, path: str, version: int) -> VersionedParams:
        """Loads weights from folder `path`, publishes them to the host and returns them with their version.

        `version` is the version that the host has now. From a folder with versions, the newest is loaded; a
        Hugging Face model becomes version `version` + 1. Raises RequestError if the folder is not below one
        of settings.weights, or has neither a model nor a version above `version`.
        """
        folder = self._allowed(path)
        if committed(folder):
            return self._store.publish(self._newest_in(folder, version))
        if not (folder / MODEL_CONFIG).exists():
            raise invalid(
                f"path={path}: the folder has neither versions nor a Hugging Face model; give a run's "
                f"weights folder, or a folder with {MODEL_CONFIG}"
            )
        params = self._of_model(folder)
        return self._store.publish(VersionedParams(version + 1, params, digest(params)))

    def _allowed(self, path: str) -> Path:
        try:
            folder = Path(path).resolve()
        except (OSError, RuntimeError, ValueError) as error:  # too long, a cycle of links, or a zero byte
            raise invalid(f"path={path!r:.200} is not a path ({error}); give the path of a folder") from None
        if not any(folder.is_relative_to(root.resolve()) for root in self._settings.weights):
            raise RequestError(
                "PERMISSION_DENIED",
                f"path={path!r:.200} is in no folder that this server may read; start the server with "
                "--weights FOLDER",
            )
        return folder

    def _newest_in(self, folder: Path, version: int) -> VersionedParams:
        found = load_newer(OrbaxReader(folder, self._engine.canary), self._engine.param_shardings, version)
        if found is None:
            raise RequestError(
                "FAILED_PRECONDITION",
                f"{folder} contains versions up to {committed(folder)[-1]}, but version {version} is served "
                "already; give a folder with a newer version",
            )
        return found

    def _of_model(self, folder: Path) -> Any:
        """Returns the parameters in a Hugging Face folder, on the engine's mesh.

        Raises ArealError if their shapes differ from the shapes of the served model's parameters.
        """
        model, theirs = self._engine.model, open_folder(folder)
        shapes = [
            jax.tree.map(lambda leaf: leaf.shape, tree)
            for tree in (model.abstract_params, Model(theirs.config, model.tokenizer).abstract_params)
        ]
        if shapes[0] != shapes[1]:
            raise ArealError(
                f"the parameters in {folder} have other shapes than those of {self.served.name}, for "
                "which this server compiled its programs; start another server with this folder as MODEL"
            )
        return theirs.load(model.abstract_params, self._engine.param_shardings)


# --- from a model's name ------------------------------------------------------------------------------------


def make_server(name: str, words: Sequence[str], settings: ServeSettings) -> Server:
    """Returns a server for the model `name`, with every program compiled and no port open yet.

    `name` and `words` (YAML files and section.key=value) are the arguments of `areal-jax serve`.
    """
    require_secret(settings.host, settings.secret)
    config = _config(name, words)
    use_gpu_environment(config)
    use_compilation_cache()
    source = open_source(config, {})
    model = source.model.base
    mesh = host_mesh(config, "the server")
    engine = make_engine(config.generation, model, mesh, has_penalties=True)
    with explained(HOST, config, model.config):
        params = as_served(VersionedParams(0, source.load(engine.param_shardings), ""), config)
        engine.warm(engine.load_params(params))
    g = config.generation
    on_update = g.on_update or "recompute"
    return Server(name, engine, params, settings, g.sampling, on_update=on_update, calls_ahead=g.calls_ahead)


def _config(name: str, words: Sequence[str]) -> Config:
    return load_config(DEFAULTS, *words, {"model": model_section(name)})


def serve(name: str, words: Sequence[str], settings: ServeSettings, say: Callable[[str], None]) -> None:
    """Serves the model `name` until Ctrl-C, which raises KeyboardInterrupt.

    `name` and `words` (YAML files and section.key=value) are the arguments of `areal-jax serve`; `say(line)`
    prints a line, which has the server's addresses. Raises ArealError if the server cannot start, or the
    exception that ended the decode loop.
    """
    require_free(settings.host, {"--port": settings.port, "--http-port": settings.http_port})
    server = make_server(name, words, settings)
    with explained(HOST, _config(name, words), server.model.config):
        _run(server, name, settings, say)


def _run(server: Server, name: str, settings: ServeSettings, say: Callable[[str], None]) -> None:
    server.start()
    say(
        f"{name} is served: gRPC on {settings.host}:{server.port}, HTTP on {settings.host}:"
        f"{server.http_port} (/v1 as OpenAI's, /health, /metrics)"
    )
    try:
        server.wait()
    finally:
        server.stop()
