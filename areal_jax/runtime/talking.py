"""Makes the generation hosts of a training run, with endpoints at which clients send them requests."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

from areal_jax.assembly.device_memory_remedies import HOST, explained
from areal_jax.config.tree import Config
from areal_jax.generation.engine import Engine
from areal_jax.generation.host import Emit, Host
from areal_jax.observe.waits import Clock
from areal_jax.runtime.turns import OneDevice
from areal_jax.weights.store import ParamReader


class HostEndpoint(Protocol):
    """Lets clients send a host requests while it decodes the samples of a run."""

    streams: Any
    """Its `hear` receives each token, and its `beside(emit)` each event, of clients' requests."""

    def attach(self, host: Host) -> None: ...

    def around(self, run: Callable[[], None]) -> Callable[[], None]:
        """Returns a function that opens the ports, calls `run` (the host's loop) and closes them."""
        ...


def training_host(
    config: Config,
    index: int,
    engine: Engine,
    store: ParamReader,
    emit: Emit,
    *,
    name: str,
    clock: Clock,
    turns: OneDevice | None = None,
    endpoint: HostEndpoint | None = None,
    is_idle_bounded: bool = True,
) -> tuple[Host, Callable[[], None]]:
    """Returns generation host number `index` of a run, and the function to run in its thread.

    `emit(event, trajectory)` receives the host's events. `turns` decides when the host may use the device
    that it shares with the trainer; None: it shares no device. `endpoint`: through which clients send the
    host requests; None: no client can. `is_idle_bounded`: as in `Host.run`.
    """
    host = Host(
        name,
        engine,
        store,
        endpoint.streams.beside(emit) if endpoint else emit,
        on_tokens=endpoint.streams.hear if endpoint else None,
        seed=config.run.seed,
        sampling=config.generation.sampling,
        on_update=config.on_update,
        versions=config.parameter_sets,
        adopts_on_command=config.places_versions,
        turn=partial(turns.turn, "host", clock) if turns else nullcontext,
        calls_ahead=config.generation.calls_ahead,
        kept_tokens=config.episode.kept_tokens,
        clock=clock,
        deadline_s=config.runtime.deadline_s,
    )

    def run() -> None:
        with explained(HOST, config, engine.model.config):
            host.run(is_idle_bounded)

    if endpoint is not None:
        endpoint.attach(host)
        run = endpoint.around(run)
    return host, run
