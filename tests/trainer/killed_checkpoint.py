"""A process that is killed in the middle of a checkpoint; for test_checkpoint.

`python -m tests.trainer.killed_checkpoint FOLDER MOMENT` writes checkpoint 3 and is killed while it writes
checkpoint 7: between two leaves of the copy, between two leaves' files, or before the rename.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from areal_jax.trainer.checkpoint import Checkpointer
from areal_jax.trainer.state import TrainState
from areal_jax.weights import staged
from tests.hangs import HANG_S


def small_state(version: int) -> TrainState:
    """A state without a model, in which every version has other bits."""
    rng = np.random.default_rng(version)
    params, moments = (
        {name: jnp.asarray(rng.normal(size=(4, 8)), jnp.float32) for name in "abcd"} for _ in range(2)
    )
    return TrainState(jnp.int32(version), jnp.int32(version), params, moments)


def killed_at_call(number: int, of: Callable[..., Any]) -> Callable[..., Any]:
    """The function `of`; its call of this number kills the process instead."""
    calls: list[Any] = []

    def watched(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return of(*args)

    return watched


def partly(save: Callable[[Path, dict[str, Any]], None]) -> Callable[[Path, dict[str, Any]], None]:
    """The function `staged._save`, which writes the first three leaves, and then kills the process."""

    def watched(folder: Path, plain: dict[str, Any]) -> None:
        save(folder, dict(list(plain.items())[:3]))
        os.kill(os.getpid(), signal.SIGKILL)

    return watched


def main(folder: Path, moment: str) -> None:
    checkpointer = Checkpointer(folder)
    checkpointer.save(small_state(3), lambda version: None, HANG_S)
    checkpointer.wait(HANG_S)
    if moment == "copy":
        staged._leaf_to_host = killed_at_call(3, staged._leaf_to_host)
    elif moment == "write":
        staged._save = partly(staged._save)
    else:
        staged._commit = killed_at_call(1, staged._commit)
    checkpointer.save(small_state(7), lambda version: None, HANG_S)
    checkpointer.close(HANG_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
