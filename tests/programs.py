"""Programs of the system that a test needs. A missing one skips the test, or fails it in CI."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest


def require(*programs: str) -> None:
    if missing := [program for program in programs if shutil.which(program) is None]:
        unavailable(f"not installed: {', '.join(missing)}")


def require_root(why: str) -> None:
    if os.geteuid() != 0:
        unavailable(f"not root: {why}")


def unavailable(message: str) -> NoReturn:
    """Skip the test, or fail it where the environment sets CI."""
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)
