"""Checkpoints of the train state: a run resumes from them bit for bit, on any mesh.

`checkpoints/<version>/` contains every leaf of the TrainState. A checkpoint is written under a hidden name
and renamed when it is complete (`weights.staged`). If the newest checkpoint is damaged, the damage is
reported and an older checkpoint is used. Checkpoints do not contain the control plane's state, which is
computed from the journal.

If several processes train as one, each saves its own shards. Any number of processes can restore them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from areal_jax.models.model import Params
from areal_jax.parallel.agreement import leads
from areal_jax.trainer.state import TrainState
from areal_jax.weights import staged
from areal_jax.weights.digest import leaf_sums
from areal_jax.weights.errors import StagedError
from areal_jax.weights.manifest import committed
from areal_jax.weights.staged import Detached
from areal_jax.weights.writer import OnFailure, Writer


class Restored(NamedTuple):
    """The result of `restore`: a train state, and the reasons why newer checkpoints were not used."""

    state: TrainState | None
    """The state of the newest undamaged checkpoint; None if no checkpoint is undamaged."""
    refused: tuple[str, ...]
    """What is damaged in each checkpoint that is newer than `state`; one message per checkpoint."""


class Checkpointer(Writer):
    """Copies train states to host memory and writes them to files, in a thread, one state at a time."""

    def __init__(
        self, folder: Path, restored: int | None = None, on_failure: OnFailure | None = None
    ) -> None:
        """`restored`: version of the checkpoint from which the run resumes; None for a new run.

        If a write fails, `on_failure` is called at once, and the next call of any method raises the error.
        """
        super().__init__(f"writing checkpoints to {folder}", on_failure=on_failure)
        self._folder = folder
        self._last_saved = restored
        self._copied = threading.Event()
        """Whether the state that was saved last is in host memory."""
        self._copied.set()
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, state: TrainState, on_commit: Callable[[int], None], deadline_s: float) -> None:
        """Write `state` in the background; the caller may donate `state` once `wait_copied` returns.

        First waits up to `deadline_s` seconds for the previous write; raises that write's error, or
        StagedError if the write has not ended. Once the checkpoint is complete on disk, the writing thread
        calls `on_commit(version)`; if several processes train as one, only process 0 does. A state of the
        version that was saved or restored last is not written again. Any other checkpoint of this version is
        overwritten: it was damaged, so the run resumed from an older one and trained the version again.
        """
        self.wait(deadline_s)
        version = int(state.version)
        if version == self._last_saved:
            return
        # In the caller's thread: all processes must start the programs of their common devices in one order.
        sums = leaf_sums(state)
        self._copied.clear()

        def write() -> None:
            try:
                copy = staged.copy_to_host(state)
            finally:  # if this fails, no later write needs the state, and `_run` reports the error
                self._copied.set()
            staged.write(self._folder, version, Detached(copy, sums), deadline_s=deadline_s)
            if leads():
                on_commit(version)

        self.submit(write, deadline_s)
        self._last_saved = version

    def wait_copied(self, deadline_s: float) -> None:
        """Wait until no array of the state that was saved last is read any more.

        Raises StagedError if this takes longer than `deadline_s` seconds.
        """
        if not self._copied.wait(deadline_s):
            raise StagedError(
                f"copying checkpoint {self._last_saved} from the devices took longer than {deadline_s:g} s "
                "(runtime.deadline_s): check that the machine has free memory; if it is only slow, raise "
                "runtime.deadline_s"
            )


def prune(folder: Path, newest: int, keep: int) -> None:
    """Of the checkpoints up to version `newest`, remove all but the `keep` newest ones.

    Checkpoints newer than `newest`, which `restore` found damaged, are neither counted nor removed. Call this
    only once the journal contains the event CheckpointCommitted of `newest`: until then a resumed run starts
    from an older checkpoint.
    """
    before = [version for version in committed(folder) if version < newest]
    staged.remove(folder, before[: max(0, len(before) - keep + 1)])


def discard_newer(folder: Path, than: int) -> list[int]:
    """Remove the checkpoints newer than version `than` and return their versions.

    Call this when a run resumes, with the journal's last version. A newer checkpoint exists if the run was
    killed after writing the checkpoint and before journaling the batch's event. The resumed run trains that
    version again, maybe on other samples.
    """
    void = [version for version in committed(folder) if version > than]
    staged.remove(folder, void)
    return void


def restore(folder: Path, like: TrainState) -> Restored:
    """Returns the state of the newest undamaged checkpoint, and the reasons why newer ones were not used.

    A checkpoint is damaged if it differs from its manifest, a list of its files, leaves and checksums. The
    state is None if no checkpoint is undamaged. `like`: a tree of jax.ShapeDtypeStruct with the shardings of
    the restored state (`Learner.abstract_state`).
    """
    refused = []
    for version in reversed(committed(folder)):
        try:
            return Restored(staged.read(folder / str(version), like), tuple(refused))
        except StagedError as error:
            refused.append(str(error))
    return Restored(None, tuple(refused))


def restore_params(path: Path, like: Params) -> Params:
    """Returns only the parameters of the checkpoint in the folder `path`.

    `like`: the parameters as a tree of jax.ShapeDtypeStruct with shardings. Raises StagedError if the
    checkpoint is damaged, or is pruned while it is read.
    """
    return staged.read(path, {"params": like}, is_part=True)["params"]
