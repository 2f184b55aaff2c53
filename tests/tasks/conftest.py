"""Shared by the tests of tasks."""

from __future__ import annotations

import os

import pytest

from areal_jax.tasks.sandbox import require_sandbox
from areal_jax.tasks.task import TaskError


@pytest.fixture(scope="session")
def sandbox() -> None:
    """Skips where code cannot be sandboxed; in CI that is a failure."""
    try:
        require_sandbox()
    except TaskError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))
