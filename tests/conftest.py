"""What every test shares: virtual devices, properties that fail the same way twice, the data sets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from areal_jax.runtime.redis_server import RedisServer

# Read by jax when it first asks for devices, so it has to stand before any test imports it.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")

# No deadline: the first example may compile. Derandomised: a red test is red for whoever runs it next.
settings.register_profile("areal", deadline=None, derandomize=True, database=None)
settings.load_profile("areal")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of data sets (gsm8k/, math500/) that no repository of ours may hold.

    AREAL_JAX_DATA names it; beside a checkout it is ../shared/data. In CI its absence is a failure.
    """
    folder = Path(os.environ.get("AREAL_JAX_DATA") or Path(__file__).parents[2] / "shared" / "data")
    if (folder / "gsm8k").is_dir():
        return folder
    message = f"no data sets in {folder}: set AREAL_JAX_DATA to the folder that holds gsm8k/ and math500/"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="session")
def redis_at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server for all; each test takes a run name of its own. In CI its absence is a failure."""
    from areal_jax.runtime.redis_server import redis_server
    from tests.redis_servers import SECRET, require_redis

    require_redis()
    with redis_server(tmp_path_factory.mktemp("redis"), secret=SECRET) as server:
        yield server
