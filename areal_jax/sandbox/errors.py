"""The error of the sandbox itself, never of the program that runs in it."""

from __future__ import annotations

from areal_jax.types import ArealError


class SandboxError(ArealError):
    """The sandbox cannot run; the message says what is missing and how to get it."""
