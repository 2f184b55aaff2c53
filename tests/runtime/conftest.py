"""What every test of the drivers shares."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _priority() -> Iterator[None]:
    """An evaluation beside a run lowers the priority of its process: here, that of all later tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "nice", lambda step: step)
        yield


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps; checkpoints of versions 2 and 3. Not to be written into."""
    from areal_jax.runtime.jobs import run
    from tests.runtime.small import small

    folder = tmp_path_factory.mktemp("trained") / "run"
    run(small(folder, "run.steps=3"), stream=io.StringIO())
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy to evaluate, damage or lock."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"
