"""A benchmark's other process: a child that a pipe connects to this one."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from areal_jax.types import ArealError

DEADLINE_S = 600.0


@contextmanager
def spawned(target: Callable[..., None], *args: Any) -> Iterator[Connection]:
    """Context manager: runs `target(pipe, *args)` in a child process; yields the pipe's other end.

    At the end of the block the process is killed.
    """
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=target, args=(there, *args), daemon=True)
    process.start()
    there.close()  # else the pipe stays open when the child ends
    try:
        yield here
    finally:
        process.kill()
        process.join()


def received(pipe: Connection) -> Any:
    """Returns the child's next message; raises ArealError if it ended, or after DEADLINE_S seconds."""
    if not pipe.poll(DEADLINE_S):
        raise ArealError(
            f"the benchmark's other process sent no message for {DEADLINE_S:g} s, so the benchmark ends; see "
            "its last lines above"
        )
    try:
        return pipe.recv()
    except EOFError:
        raise ArealError(
            "the benchmark's other process ended unexpectedly, so the benchmark ends; see its traceback above"
        ) from None
