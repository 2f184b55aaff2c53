"""Tasks that show something rather than being trained for, which the command line knows by name."""

from __future__ import annotations

from areal_jax.tasks.source import BUILTIN

TASKS = {"multihop": "areal_jax.lab.multihop:MultiHop"}
"""Name -> module:Name, as in `tasks.source.BUILTIN`."""


def register() -> None:
    """Adds the tasks to those that a config may name."""
    BUILTIN.update(TASKS)
