"""Self-tests and kernels for tests/models/kernels/test_trials.py; child processes import them by name."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from areal_jax.models.kernels.trials import Trial


def kernel() -> float:
    return 0.25


def reads_out_of_bounds() -> float:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0.0


def hangs() -> float:
    time.sleep(60)
    return 0.0


def raises() -> float:
    raise ValueError("no such device")


def a_self_test(tried: Any, heads: int, *, problem: str | None) -> Trial:
    return Trial(problem, heads * tried())


def an_environment_test(tried: Any) -> Trial:
    return Trial(os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"])
