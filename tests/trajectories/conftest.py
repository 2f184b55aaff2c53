"""Journals in Redis: on the session's server, and on one that the test may kill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_jax.runtime.redis_server import RedisServer
from areal_jax.trajectories.redis import RedisQueue
from tests.redis_servers import Killable, require_redis
from tests.trajectories.journals import Store, make_store


@pytest.fixture
def store(redis_at: RedisServer, tmp_path: Path) -> Store:
    return make_store(tmp_path / "run", redis_at)


@pytest.fixture
def queue(store: Store) -> Iterator[RedisQueue]:
    with store.create({}) as queue:
        assert isinstance(queue, RedisQueue)
        yield queue


@pytest.fixture
def killable(tmp_path: Path) -> Iterator[Killable]:
    require_redis()
    with Killable(tmp_path / "redis") as killable:
        yield killable
