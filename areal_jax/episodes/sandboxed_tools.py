"""Tools that run code in the sandbox, for `Episode.tool`: what the policy wrote, or what is not trusted."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from areal_jax.sandbox.runner import SandboxLimits, require_sandbox, run_python


def python(
    source: str, stdin: str = "", seconds: float = 4.0, memory_bytes: int = 512 << 20
) -> dict[str, Any]:
    """Runs the Python program `source`, with the input `stdin`, without network and without files of its own.

    `seconds`: limit on its CPU time, of which wall time may be four times; `memory_bytes`: maximum address
    space of each process. Returns outcome (ok | error | timed_out | out_of_memory | too_much_output),
    exit_code, stdout and stderr: a program that fails or exceeds a limit is a result. Nothing of a call
    stays, so `Episode.tool` may have is_idempotent=True. Raises SandboxError if the sandbox does not work on
    this machine.
    """
    require_sandbox()
    limits = SandboxLimits(seconds=seconds, memory_bytes=memory_bytes)
    return asdict(run_python(source, stdin=stdin, limits=limits))
