"""Where the processes of a cluster meet, and what they show at the door."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from areal_jax.config import Config
from areal_jax.generation.serving_secret import VARIABLE
from areal_jax.runtime.broker import Broker
from areal_jax.trajectories.redis import RedisQueue
from areal_jax.types import ArealError


def redis_url(config: Config) -> str:
    """Raises ArealError where the config names no Redis."""
    if config.runtime.redis is None:
        raise ArealError(
            "the processes of a cluster meet at Redis; set runtime.redis=redis://host:port/0, or start them "
            "by `areal-jax launch`"
        )
    return config.runtime.redis


def own_address(config: Config) -> str:
    """By which others reach this machine: that from which it reaches Redis. Raises ArealError."""
    found = urlsplit(redis_url(config))
    try:
        known = socket.getaddrinfo(found.hostname, found.port or 6379, type=socket.SOCK_DGRAM)
        family, _, _, _, address = known[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # which sends nothing
            return probe.getsockname()[0]
    except OSError as error:
        raise ArealError(f"runtime.redis={found.hostname}:{found.port} cannot be reached: {error}") from error


def connect(config: Config) -> Broker:
    return Broker(redis_url(config), config.run.name, deadline_s=config.runtime.deadline_s)


def make_journal(config: Config, folder: Path, header: dict[str, Any]) -> RedisQueue:
    """The journal of a new run. Raises ArealError."""
    return RedisQueue.create(redis_url(config), config.run.name, header, folder, secret=secret())


def open_journal(config: Config, folder: Path, readonly: bool = False) -> RedisQueue:
    """Of one that was begun. Raises ArealError."""
    return RedisQueue.open(redis_url(config), config.run.name, folder, readonly, secret=secret())


def secret() -> str | None:
    return os.environ.get(VARIABLE)
