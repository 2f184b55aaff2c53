"""What of a server a training run uses: endpoints of its hosts for clients, and the gateway for agents.

A run that needs neither imports no server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_jax.config.tree import Config
from areal_jax.generation.engine import Engine
from areal_jax.plugin import needing

if TYPE_CHECKING:
    from areal_jax.serving.endpoint import TrainingEndpoint
    from areal_jax.serving.episode_gateway import EpisodeGateway


def make_endpoint(config: Config, index: int, engine: Engine) -> TrainingEndpoint | None:
    """Returns the endpoint of generation host number `index`; None without generation.serve_port.

    Raises ArealError if other machines can reach the endpoint but AREAL_JAX_SECRET is unset, except with
    generation.serve_is_open.
    """
    if config.generation.serve_port is None:
        return None
    from areal_jax.secret import read_secret
    from areal_jax.serving.endpoint import TrainingEndpoint

    return TrainingEndpoint(config, index, engine, read_secret(None))


def make_gateway() -> EpisodeGateway:
    """Returns what serves the chats of agents; called in the event loop of their workflows."""
    with needing("episode.base_url", "serve"):
        from areal_jax.serving.episode_gateway import EpisodeGateway
    return EpisodeGateway()
