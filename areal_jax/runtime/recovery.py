"""Restores a trainer: loads the newest complete checkpoint, trains the journaled batches after it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_jax.assembly.devices import header, repeats_bits
from areal_jax.assembly.parts import Inputs, Parts, with_steps
from areal_jax.assembly.run_folder import BRANCH, JOURNAL
from areal_jax.control.events import (
    BatchTrained,
    Event,
    RunResumed,
    RunStarted,
    Train,
    VersionCommitted,
    VersionReissued,
)
from areal_jax.control.reward_gate import paid
from areal_jax.runtime.compute_choice import recorded_choice
from areal_jax.runtime.differences import MACHINE, Comparison, Difference
from areal_jax.runtime.trainer_loop import TrainBatch, Trainer, batch_again
from areal_jax.trainer.checkpoint import discard_newer, restore
from areal_jax.trainer.state import TrainState
from areal_jax.trajectories.sqlite import SqliteQueue
from areal_jax.types import ArealError, Group, PolicyVersion
from areal_jax.weights.store import wire_copy

Note = Callable[[str], None]
"""Takes a line for people, about what a resume or a replay cannot promise."""


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
    is_reissued: bool = False
    """Whether `published` is the digest of parameters with other bits, to which another machine trained the
    batch again (VersionReissued)."""
    header: Mapping[str, Any] = field(default_factory=dict)
    """What of the machine that trained the batch may change its bits (`assembly.devices.header`); empty if
    that was a process of its own: then only `metrics` name its machine."""

    def compare(self, compared: Comparison, metrics: Mapping[str, Any], digest: str) -> None:
        """Raises Difference unless the batch, trained again, gave the journaled metrics and parameters."""
        place = f"step {self.train.step}"
        compared.metrics(place, self.metrics, metrics)
        compared.digest(place, "digest of the parameters", self.digest, digest)


def journaled_batches(journal: SqliteQueue, first: int, last: int) -> list[Journaled]:
    """Returns the journaled batches of steps `first` to `last` - 1, in order."""
    trains: dict[int, Train] = {}
    trained: dict[int, BatchTrained] = {}
    published: dict[PolicyVersion, str] = {}
    reissued: set[PolicyVersion] = set()
    if first >= last:
        return []
    # The batch before, if there is one, may be answered with the command to train this one.
    start = journal.last("BatchTrained", first - 1)
    begun = max(journal.last(kind, until=start) for kind in ("RunStarted", "RunResumed"))
    then = _asked(journal.row(begun).event, journal) if begun else (0, {})
    thens: dict[int, tuple[int, Mapping[str, Any]]] = {}
    for row in journal.rows(max(0, start - 1)):
        match row.event:
            case RunStarted() | RunResumed():
                then = _asked(row.event, journal)
            case BatchTrained(step) if step not in trained:  # else a duplicate delivery
                trained[step], thens[step] = row.event, then
            case VersionCommitted(version, digest):
                published[version] = digest
            case VersionReissued(version, _, digest):
                published[version] = digest
                reissued.add(version)
        trains |= {action.step: action for action in row.actions if isinstance(action, Train)}
    return [
        Journaled(
            trains[step],
            trained[step].digest,
            published.get(step + 1, ""),
            trained[step].metrics,
            thens[step][0],
            step + 1 in reissued,
            {} if journal.is_of_processes else thens[step][1],
        )
        for step in range(first, last)
    ]


def _asked(event: Event, journal: SqliteQueue) -> tuple[int, Mapping[str, Any]]:
    """Returns the number of steps and the header of the run from this start or resume on."""
    match event:
        case RunStarted(_, steps):
            return steps, journal.header
        case RunResumed(steps, stored):
            return steps, stored
    return 0, {}


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


class Repetition:
    """Trains the journaled batches after a trainer's state again, with the run.steps of then.

    On the machine that trained them it compares the results with the journal, as a replay does.
    """

    def __init__(self, parts: Parts, trainer: Trainer, note: Note) -> None:
        self._parts, self._trainer, self._note = parts, trainer, note
        self._has_diverged = False
        """Whether a batch came out with other bits than the run had, on which all later ones build."""

    def batch(self, one: Journaled, groups: Sequence[Group]) -> TrainBatch:
        """Returns the command to train a journaled batch again; this process holds its `groups`."""
        choice = recorded_choice(self._parts.config, one.metrics)
        return batch_again(self._parts.config, self._parts.learner, one.train.step, groups, choice)

    def train(self, one: Journaled, batch: TrainBatch) -> VersionReissued | None:
        """Train a journaled batch again.

        Raises ArealError if the machine is the one that trained it, and the result differs. On another
        machine `note(text)` reports other parameters; returns the event that records their digest if this
        version was published, otherwise None.
        """
        self._parts = with_steps(self._parts, one.steps)
        value, metrics = self._trainer.train_again(self._parts, batch)
        dtype = self._parts.config.wire_dtype
        if self._is_same_machine(one) and not self._has_diverged:
            try:
                one.compare(Comparison(dtype), metrics, value.digest)
            except Difference as difference:
                raise ArealError(_changed(one, difference)) from None
            return None

        def wire() -> str:
            return wire_copy(value, dtype).digest

        was, now = (one.published, wire()) if one.is_reissued else (one.digest, value.digest)
        if now == was:
            return None
        self._has_diverged = True
        self._note(
            f"version {value.version} was trained again with digest {now} instead of {was}, because the "
            "device, the CPU or the packages are not those that trained it, or do not repeat bits; the run "
            "continues with the new parameters"
        )
        return VersionReissued(value.version, one.published, wire()) if one.published else None

    def _is_same_machine(self, one: Journaled) -> bool:
        """Whether this process must give the bits that the batch was trained to.

        False if an older version of areal-jax trained the batch, which did not record its machine.
        """
        is_same = one.metrics.get(MACHINE) == self._trainer.machine and repeats_bits()
        is_same &= not one.is_reissued  # as another machine trained it again
        now = header(self._parts.config)
        # The layout of the hosts' weights changes no update.
        names = (one.header.keys() & now.keys()) - {"weight_layout"}
        return is_same and all(one.header[name] == now[name] for name in names)


def _changed(one: Journaled, difference: Difference) -> str:
    return (
        f"the run cannot go on, because a batch that is trained again from the journal gives other bits than "
        f"the run had: {difference}. The machine is as it was (device, cores, CPU, packages and XLA flags "
        "are equal), so the run's folder has changed since: its config.yaml, a checkpoint or the journal. "
        "`areal-jax audit RUN_FOLDER` and `areal-jax replay RUN_FOLDER` show what; restore the folder from a "
        f"backup, or go on before the batch with `areal-jax replay RUN_FOLDER --until {one.train.step} "
        "--branch NAME`"
    )


def train_again(
    parts: Parts, trainer: Trainer, journal: SqliteQueue, last: PolicyVersion, note: Note
) -> list[VersionReissued]:
    """Train the journaled batches after the trainer's version again, up to version `last`.

    Returns an event for each published version that now has other parameters than the journal records, as
    another kind of machine may give them; `note(text)` reports each. Raises ArealError if the trainer's
    version is newer than `last`, or if a batch gives other bits on the machine that trained it.
    """
    first = int(trainer.state.version)
    require_one_run(first, last)
    if first < last:
        note(f"training steps {first} to {last - 1} again from the journal")
    again, found = Repetition(parts, trainer, note), []
    for one in journaled_batches(journal, first, last):
        batch = again.batch(one, journaled_groups(parts, journal, one.train))
        found.append(again.train(one, batch))
    return [reissued for reissued in found if reissued is not None]
