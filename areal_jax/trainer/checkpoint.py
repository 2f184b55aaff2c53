"""Checkpoints of the train state: what a run goes on from, bit for bit, on whatever mesh.

`checkpoints/<version>/` holds every leaf of the TrainState, whichever there are, staged and committed as
`weights.staged` says. One that is not as it was written is refused by name, and the one before is used. The
control plane's state is not in here: it is the fold of the journal, whose snapshots are written when the
journal has heard of a checkpoint.

Where several processes train as one, all of them save, each its own shards, and all restore, whatever number
of them saved.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from areal_jax.models.model import Params
from areal_jax.parallel.agreement import leads
from areal_jax.trainer.state import TrainState
from areal_jax.weights import staged
from areal_jax.weights.staged import MANIFEST, Detached, OnFailure, StagedError, Writer, committed

__all__ = [
    "MANIFEST",
    "CheckpointError",
    "Checkpointer",
    "Restored",
    "committed",
    "discard_newer",
    "prune",
    "restore",
    "restore_params",
]


class CheckpointError(StagedError):
    """A checkpoint that cannot be used; the message says which and why."""


class Restored(NamedTuple):
    state: TrainState | None
    """None where no checkpoint can be used."""
    refused: tuple[str, ...]
    """Newer checkpoints that were refused, and why."""


class Checkpointer:
    """Writes off the caller's path: `save` copies the state to the host and returns; one write at a time."""

    def __init__(
        self, folder: Path, restored: int | None = None, on_failure: OnFailure | None = None
    ) -> None:
        """`restored`: the version that the run goes on from, which is whole. `on_failure` hears at once of a
        write that failed; the next call here raises it.
        """
        self._folder = folder
        self._writer = Writer(f"writing checkpoints to {folder}", on_failure=on_failure)
        self._last_saved = restored
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, state: TrainState, on_commit: Callable[[int], None], deadline_s: float) -> None:
        """Write `state`, which may be donated at once; `on_commit(version)` is called from the writer once it
        is whole on disk, in the first of several processes.

        Does nothing for the version saved or restored last. One that lies there from an earlier process is
        written anew: it is the damaged one for whose sake that version was trained again.
        """
        self.wait(deadline_s)
        version = int(state.version)
        if version == self._last_saved:
            return
        write = partial(self._write, version, Detached.copy(state), on_commit, deadline_s)
        self._writer.submit(write, deadline_s)
        self._last_saved = version

    def wait(self, deadline_s: float) -> None:
        """Until the write under way is committed. Raises StagedError where it failed, or at the deadline."""
        self._writer.wait(deadline_s)

    def close(self, deadline_s: float) -> None:
        self._writer.close(deadline_s)

    def _write(
        self, version: int, state: Detached, on_commit: Callable[[int], None], deadline_s: float
    ) -> None:
        staged.write(self._folder, version, state, deadline_s=deadline_s)
        if leads():
            on_commit(version)


def prune(folder: Path, newest: int, keep: int) -> None:
    """Keep checkpoint `newest` and the `keep - 1` before it. Newer ones were refused, and do not count.

    To be called once the journal has heard of `newest`: until then the ones before it are what a resumed run
    starts from.
    """
    before = [version for version in committed(folder) if version < newest]
    staged.remove(folder, before[: max(0, len(before) - keep + 1)])


def discard_newer(folder: Path, than: int) -> list[int]:
    """Remove checkpoints beyond version `than`, and say which: their last batch is not in the journal.

    A run killed between the two trains that batch again, maybe on other samples.
    """
    void = [version for version in committed(folder) if version > than]
    staged.remove(folder, void)
    return void


def restore(folder: Path, like: TrainState) -> Restored:
    """The newest checkpoint whose bits are those its manifest names, on the shardings of `like`.

    `like` is a tree of jax.ShapeDtypeStruct (`Learner.abstract_state`).
    """
    refused = []
    for version in reversed(committed(folder)):
        try:
            return Restored(_read(folder / str(version), like), tuple(refused))
        except CheckpointError as error:
            refused.append(str(error))
    return Restored(None, tuple(refused))


def restore_params(path: Path, like: Params) -> Params:
    """The parameters alone of one checkpoint, checked as `restore` checks; `like` as there.

    Raises CheckpointError, also for a checkpoint that is pruned meanwhile.
    """
    return _read(path, {"params": like}, is_part=True)["params"]


def _read(path: Path, like: Any, is_part: bool = False) -> Any:
    try:
        return staged.read(path, like, is_part)
    except StagedError as error:
        raise CheckpointError(f"checkpoint {error}") from None
