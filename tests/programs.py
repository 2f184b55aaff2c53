"""Programs of the system that a test needs: without them it is skipped, and fails in CI, which has them."""

from __future__ import annotations

import os
import shutil

import pytest


def require(*programs: str) -> None:
    if missing := [program for program in programs if shutil.which(program) is None]:
        _without(f"not installed: {', '.join(missing)}")


def require_root(why: str) -> None:
    if os.geteuid() != 0:
        _without(f"not root: {why}")


def _without(message: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)
