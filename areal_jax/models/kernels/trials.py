"""Runs self-tests of kernels, each in a process of its own.

A CUDA kernel that reads or writes out of bounds leaves the GPU unusable for the rest of its process. A run
therefore tries a kernel in a child process first, and uses the kernel only if that process reports success.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

TIMEOUT_S = 180.0
"""A self-test whose process takes longer fails. The time includes the start of CUDA and compilation."""


class Trial(NamedTuple):
    """The result of a kernel's self-test."""

    problem: str | None
    """Why the kernel must not be used here; None if the kernel passes."""
    gap: float | None = None
    """The largest error of outputs and gradients, relative to their largest value; None if nothing ran."""


def failure(error: Exception) -> str:
    """Returns why a kernel cannot run on this device: the exception that it raised, in one line."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error) else ''}"


def tried_apart(test: Callable[..., Trial], kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Trial:
    """Returns `test(kernel, *args, **kwargs)`, called in a child process of its own.

    `test` and `kernel` must be functions at the top of a module; the arguments must be JSON. If the child
    crashes or takes more than TIMEOUT_S seconds, the kernel has failed and the trial's problem says how.
    """
    call = json.dumps({"test": _name(test), "kernel": _name(kernel), "args": args, "kwargs": kwargs})
    paths = (str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH"))
    # The parent process may have reserved most of the GPU's memory: the child takes only what it needs. Nor
    # does it measure which product is fastest, since it only compares results.
    env = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip(),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    words = [sys.executable, "-m", __name__, call]
    try:
        done = subprocess.run(
            words, env={**os.environ, **env}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Trial(f"its self-test did not end within {TIMEOUT_S:g} s")
    if done.returncode == 0:
        return Trial(*json.loads(done.stdout.splitlines()[-1]))
    if done.returncode < 0:
        return Trial(f"its self-test was killed by {signal.Signals(-done.returncode).name}")
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return Trial(f"its self-test ended with status {done.returncode}: {last[:200]}")


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{function.__qualname__}"


def _named(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    trial = _named(given["test"])(_named(given["kernel"]), *given["args"], **given["kwargs"])
    print(json.dumps(list(trial)))  # noqa: T201 - read by the parent process
