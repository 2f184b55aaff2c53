"""Finds the addresses and the secret with which a process reaches the other processes of its cluster."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

from areal_jax.cluster.broker import Broker
from areal_jax.config.tree import Config
from areal_jax.secret import VARIABLE
from areal_jax.types import ArealError


def redis_url(config: Config) -> str:
    """Returns runtime.redis, the url of the run's Redis. Raises ArealError if it is not set."""
    if config.runtime.redis is None:
        raise ArealError(
            "runtime.redis is not set, but the processes of a cluster connect through Redis; set "
            "runtime.redis=redis://HOST:PORT/0, or start all processes with `areal-jax launch`"
        )
    return config.runtime.redis


def own_address(config: Config) -> str:
    """Returns this machine's IP address for other machines: that of the network interface towards Redis.

    Raises ArealError if runtime.redis is not set, or if there is no route to its host.
    """
    found = urlsplit(redis_url(config))
    try:
        known = socket.getaddrinfo(found.hostname, found.port or 6379, type=socket.SOCK_DGRAM)
        family, _, _, _, address = known[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # only chooses a route: a datagram socket sends nothing here
            return probe.getsockname()[0]
    except OSError as error:
        raise ArealError(
            f"runtime.redis={found.hostname}:{found.port} cannot be reached: {error}; "
            "correct runtime.redis, or this machine's network or DNS"
        ) from error


def connect(config: Config) -> Broker:
    return Broker(redis_url(config), config.run.name, deadline_s=config.runtime.deadline_s)


def secret() -> str | None:
    return os.environ.get(VARIABLE)
