"""What every test of the drivers shares."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _priority() -> Iterator[None]:
    """An evaluation beside a run lowers the priority of its process: here, that of all later tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "nice", lambda step: step)
        yield
