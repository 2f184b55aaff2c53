"""Restores a trainer: loads the newest complete checkpoint, trains the journaled batches after it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_jax.assembly.parts import Inputs, Parts
from areal_jax.assembly.run_folder import BRANCH, JOURNAL
from areal_jax.control.events import (
    BatchTrained,
    RunResumed,
    RunStarted,
    Train,
    VersionCommitted,
    VersionReissued,
)
from areal_jax.control.reward_gate import paid
from areal_jax.runtime.compute_choice import recorded_choice
from areal_jax.runtime.trainer_loop import TrainBatch, Trainer, batch_again
from areal_jax.trainer.checkpoint import discard_newer, restore
from areal_jax.trainer.state import TrainState
from areal_jax.trajectories.sqlite import SqliteQueue
from areal_jax.types import ArealError, Group, PolicyVersion
from areal_jax.weights.store import wire_copy

Note = Callable[[str], None]


def start_state(
    parts: Parts, folder: Path, last: PolicyVersion, note: Note
) -> tuple[TrainState, PolicyVersion | None]:
    """Restore the newest complete checkpoint up to `last`, the version with which the journal ends.

    Checkpoints newer than `last` are deleted, and damaged checkpoints (other bits than in their manifest) are
    not used; `note(text)` reports each of them. Returns the restored state and its version; if no checkpoint
    is left, the initial state and None. Raises ArealError if none is left of a branch, whose first steps were
    trained by another config.
    """
    for version in discard_newer(folder / "checkpoints", max(last, 0)):
        note(
            f"checkpoint {version} is deleted, because it is newer than the journal, which ends at version "
            f"{last}; the run continues from an older checkpoint or, without one, from its start"
        )
    restored = restore(folder / "checkpoints", parts.learner.abstract_state())
    for reason in restored.refused:
        note(
            f"refused: checkpoint {reason}; the run continues from an older checkpoint or, without one, from "
            "its start"
        )
    if restored.state is None:
        _require_beginning(folder)
        return parts.first_state(), None
    return restored.state, int(restored.state.version)


def _require_beginning(folder: Path) -> None:
    """Raises ArealError if the run in `folder` is a branch, which cannot start again from version 0."""
    path = folder / JOURNAL
    if not path.exists():
        return
    with SqliteQueue.open(path, readonly=True) as journal:
        branch = journal.header.get(BRANCH)
    if branch:
        raise ArealError(
            f"{folder} has no undamaged checkpoint, and it is a branch of {branch['run']} from step "
            f"{branch['step']} on, so it cannot start again from version 0; restore its checkpoints from a "
            f"backup, or make the branch again: areal-jax replay {branch['run']} --until {branch['step']} "
            "--branch NAME"
        )


@dataclass(frozen=True)
class Journaled:
    """A batch that the journal records as trained."""

    train: Train
    digest: str
    """Digest of the trainer's parameters after this batch."""
    published: str
    """Digest of this version's weights as published to the hosts; "" if the version was not published."""
    metrics: Mapping[str, Any]
    """The step's metrics row, which says how the batch was computed (`compute_choice.recorded_choice`)."""
    steps: int
    """The run's number of steps when the batch was trained, on which the learning rate may depend; 0: the
    config's."""


def journaled_batches(journal: SqliteQueue, first: int, last: int) -> list[Journaled]:
    """Returns the journaled batches of steps `first` to `last` - 1, in order."""
    trains: dict[int, Train] = {}
    trained: dict[int, BatchTrained] = {}
    published: dict[PolicyVersion, str] = {}
    steps, steps_of = 0, {}
    for row in journal.rows():
        match row.event:
            case RunStarted() | RunResumed():
                steps = row.event.steps
            case BatchTrained(step):
                trained[step], steps_of[step] = row.event, steps
            case VersionCommitted(version, digest) | VersionReissued(version, _, digest):
                published[version] = digest
        trains |= {action.step: action for action in row.actions if isinstance(action, Train)}
    return [
        Journaled(
            trains[step],
            trained[step].digest,
            published.get(step + 1, ""),
            trained[step].metrics,
            steps_of[step],
        )
        for step in range(first, last)
    ]


def journaled_groups(inputs: Inputs, journal: SqliteQueue, train: Train) -> tuple[Group, ...]:
    """Returns the groups of the batch `train`, with their trajectories from the journal.

    Their rewards are those that the batch was trained on, by the gates in `train`. Raises JournalError if one
    of the trajectories was deleted from the journal.
    """
    size = inputs.config.algorithm.group_size
    groups = [
        Group(ordinal, inputs.prompts.prompt(ordinal), journal.group(ordinal, attempt, size))
        for ordinal, attempt in zip(train.ordinals, train.attempts, strict=True)
    ]
    return paid(groups, train.gates)


def require_one_run(first: int, last: int) -> None:
    """Raises ArealError if the restored version `first` is newer than `last`, the journal's last version."""
    if first > last:
        raise ArealError(
            f"the restored checkpoint has version {first}, but the journal ends at version {last}, so "
            "checkpoint and journal are not of one run; restore the whole run folder from one backup, then "
            "resume the run"
        )


def retrain(
    trainer: Trainer, batch: TrainBatch, digest: str, published: str, wire_dtype: str, note: Note
) -> VersionReissued | None:
    """Train a journaled batch again, and compare the digest of the parameters with the journaled `digest`.

    If the digests differ, `note(text)` reports the difference. Returns the event that records the new digest
    if the digests differ and this version was published; otherwise None. `published`: the journaled digest of
    the version as published in the dtype `wire_dtype`; "" if the version was not published.
    """
    value, _ = trainer.train(batch)
    if value.digest == digest:
        return None
    note(
        f"version {value.version} was trained again with digest {value.digest} instead of {digest}, which "
        "another device or jaxlib may cause; the run continues with the new parameters"
    )
    if not published:
        return None
    return VersionReissued(value.version, published, wire_copy(value, wire_dtype).digest)


def train_again(
    parts: Parts, trainer: Trainer, journal: SqliteQueue, last: PolicyVersion, note: Note
) -> list[VersionReissued]:
    """Train the journaled batches after the trainer's version again, up to version `last`.

    Returns an event for each published version that now has other parameters than the journal records;
    `note(text)` reports each version that differs. Raises ArealError if the trainer's version is newer than
    `last`.
    """
    first = int(trainer.state.version)
    require_one_run(first, last)
    if first < last:
        note(f"training steps {first} to {last - 1} again from the journal")
    found = []
    for one in journaled_batches(journal, first, last):
        groups = journaled_groups(parts, journal, one.train)
        choice = recorded_choice(parts.config, one.metrics)
        batch = batch_again(parts.config, parts.learner, one.train.step, groups, choice)
        dtype = parts.config.wire_dtype
        found.append(retrain(trainer, batch, one.digest, one.published, dtype, note))
    return [reissued for reissued in found if reissued is not None]
