"""Computes the train states of a run's past versions again, from its nearest checkpoint.

The journaled batches after the checkpoint are trained on the journal's trajectories, so nothing is generated;
`replay` generates them too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from areal_jax.assembly.parts import Parts, with_steps
from areal_jax.assembly.run_folder import CHECKPOINTS
from areal_jax.observe.waits import Timeline
from areal_jax.replay.reopened import Reopened
from areal_jax.runtime.compute_choice import recorded_choice
from areal_jax.runtime.differences import Comparison
from areal_jax.runtime.recovery import Journaled, Note, journaled_batches, journaled_groups
from areal_jax.runtime.trainer_loop import TrainBatch, batch_again, train_batch
from areal_jax.trainer.state import TrainState
from areal_jax.trajectories.journal import JournalError
from areal_jax.types import Group, VersionedParams
from areal_jax.weights import staged
from areal_jax.weights.errors import StagedError
from areal_jax.weights.manifest import committed


class Past(NamedTuple):
    """A version's train state, which the iterator donates when it goes on, and the parameters in it."""

    state: TrainState
    value: VersionedParams
    trained: int
    """Number of batches that were trained again so far."""


class OutOfReach(JournalError):
    """A version cannot be computed from a checkpoint; a replay of the whole run can compute it."""


def past_versions(
    run: Reopened, parts: Parts, first: int, last: int, compared: Comparison, note: Note
) -> Iterator[Past]:
    """Yields the train states of the versions `first` to `last`, in order.

    Starts from the newest undamaged checkpoint up to `first` or, without one, from version 0. `parts`: those
    of the part of the journal that trained the versions. `compared` compares every metric and digest with the
    journal, and raises Difference. `note(text)` says where it starts. Raises OutOfReach if neither is there,
    or if the journal has deleted a trajectory that is needed.
    """
    state, start = _start(run, parts, first, note)
    batches = journaled_batches(run.journal, start, last)
    clock = Timeline(None).clock("replay")
    value = parts.learner.versioned(state)
    if start and (digest := _digest_before(run, start)):
        compared.digest(f"checkpoint {start}", "digest of the parameters", digest, value.digest)
    if start >= first:
        yield Past(state, value, 0)
    for trained, one in enumerate(batches, 1):
        parts = with_steps(parts, one.steps)
        _, held = past_batch(run, parts, one)
        state, value, metrics = train_batch(parts.config, parts.learner, state, held, clock)
        one.compare(compared, metrics, value.digest)
        if value.version >= first:
            yield Past(state, value, trained)


def past_batch(run: Reopened, parts: Parts, one: Journaled) -> tuple[tuple[Group, ...], TrainBatch]:
    """Returns a journaled batch's groups, and the command to train them as they were trained.

    Raises OutOfReach if the journal has deleted one of its trajectories.
    """
    try:
        groups = journaled_groups(parts, run.journal, one.train)
    except JournalError as error:
        raise OutOfReach(str(error)) from None
    choice = recorded_choice(parts.config, one.metrics)
    return groups, batch_again(parts.config, parts.learner, one.train.step, groups, choice)


def _start(run: Reopened, parts: Parts, version: int, note: Note) -> tuple[TrainState, int]:
    folder, begun = run.folder / CHECKPOINTS, run.stretch_of(version).first_step
    usable = [one for one in committed(folder) if begun <= one <= version]
    for one in reversed(usable):
        try:
            state = staged.read(folder / str(one), parts.learner.abstract_state())
        except StagedError as error:
            note(f"checkpoint {one} is not used: {error}")
            continue
        note(f"starting from checkpoint {one}")
        return state, one
    if begun:
        raise OutOfReach(
            f"{folder} has no undamaged checkpoint from version {begun}, where the branch begins, on"
        )
    note("starting from version 0: no checkpoint is older than the versions that are needed")
    return parts.first_state(), 0


def _digest_before(run: Reopened, version: int) -> str:
    """Returns the journaled digest of the parameters of `version`.

    "" if the journal does not have it, or if the run trained versions again to other bits, which the
    checkpoint may have.
    """
    if any(True for _ in run.journal.events("VersionReissued")):
        return ""
    digests = (one.digest for one in run.journal.events("BatchTrained") if one.step + 1 == version)
    return next(digests, "")
