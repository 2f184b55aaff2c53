"""Makes the generation hosts of a training run, and the endpoints at which clients send them requests."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from areal_jax.config.tree import Config
from areal_jax.generation.engine import Engine
from areal_jax.generation.host import Emit, Host
from areal_jax.observe.waits import Clock
from areal_jax.runtime.turns import OwnDevices
from areal_jax.weights.store import ParamReader

if TYPE_CHECKING:
    from areal_jax.serving.endpoint import TrainingEndpoint


def training_host(
    config: Config,
    index: int,
    engine: Engine,
    store: ParamReader,
    emit: Emit,
    *,
    name: str,
    clock: Clock,
    turns: OwnDevices,
) -> tuple[Host, TrainingEndpoint | None]:
    """Returns generation host number `index` of a run and its gRPC endpoint for clients.

    `emit(event, trajectory)` receives the host's events; `turns` decides when it may use a device that it
    shares with the trainer. The endpoint is None if generation.serve_port is unset; gRPC is then not
    imported. Raises ArealError if other machines can reach the endpoint but AREAL_JAX_SECRET is unset, except
    with generation.serve_is_open.
    """
    endpoint = None
    if config.generation.serve_port is not None:
        from areal_jax.serving.endpoint import TrainingEndpoint
        from areal_jax.serving.secret import VARIABLE, Secret

        text = os.environ.get(VARIABLE)
        endpoint = TrainingEndpoint(config, index, engine, None if text is None else Secret(text))
    host = Host(
        name,
        engine,
        store,
        endpoint.streams.beside(emit) if endpoint else emit,
        on_tokens=endpoint.streams.on_tokens if endpoint else None,
        seed=config.run.seed,
        sampling=config.generation.sampling,
        on_update=config.on_update,
        versions=config.parameter_sets,
        turn=partial(turns.turn, "host", clock),
        clock=clock,
        deadline_s=config.runtime.deadline_s,
    )
    if endpoint is not None:
        endpoint.attach(host)
    return host, endpoint
