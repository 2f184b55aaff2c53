"""Where a trainer goes on from: the newest whole checkpoint, and the journaled batches after it once more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from areal_jax.control.events import BatchTrained, RunStarted, Train, VersionCommitted, VersionReissued
from areal_jax.runtime.assembly import Parts
from areal_jax.runtime.trainer import Trainer, held_batch
from areal_jax.trainer.checkpoint import discard_newer, restore
from areal_jax.trainer.state import TrainState
from areal_jax.trajectories.journal import Journal
from areal_jax.types import ArealError, Group, PolicyVersion
from areal_jax.weights.store import wire_copy

Note = Callable[[str], None]


def start_state(
    parts: Parts, folder: Path, last: PolicyVersion, note: Note
) -> tuple[TrainState, PolicyVersion | None]:
    """From the newest whole checkpoint up to the journal's version `last`, with its version; else 0's."""
    for version in discard_newer(folder / "checkpoints", max(last, 0)):
        note(f"checkpoint {version} discarded: the journal ends at version {last}")
    restored = restore(folder / "checkpoints", parts.learner.abstract_state())
    for reason in restored.refused:
        note(f"refused: {reason}; going back to the one before")
    if restored.state is None:
        return parts.first_state(), None
    return restored.state, int(restored.state.version)


def train_again(
    parts: Parts, trainer: Trainer, journal: Journal, last: PolicyVersion, note: Note
) -> list[VersionReissued]:
    """Train the journaled batches up to version `last` again, from kept payloads; compare every digest.

    Returns the versions that hosts have seen with other bits. Raises ArealError for a checkpoint and a
    journal of two runs.
    """
    first = int(trainer.state.version)
    if first > last:
        raise ArealError(
            f"the checkpoint holds version {first}, the journal ends at version {last}: they are not of one "
            "run"
        )
    if first == last:
        return []
    note(f"training steps {first} to {last - 1} again from the journal")
    plans: dict[int, Train] = {}
    digests: dict[int, str] = {}
    published: dict[PolicyVersion, str] = {}
    for row in journal.rows():
        match row.event:
            case BatchTrained(step, _, digest):
                digests[step] = digest
            case RunStarted(digest):
                published[0] = digest
            case VersionCommitted(version, digest) | VersionReissued(version, _, digest):
                published[version] = digest
        plans |= {action.step: action for action in row.actions if isinstance(action, Train)}
    reissued = []
    for step in range(first, last):
        plan, size = plans[step], parts.config.algorithm.group_size
        groups = [
            Group(o, parts.prompts.prompt(o), journal.group(o, a, size))
            for o, a in zip(plan.ordinals, plan.attempts, strict=True)
        ]
        value, _ = trainer.train(held_batch(parts, step, groups))
        if value.digest != digests[step]:
            note(f"version {value.version} has digest {value.digest}, was {digests[step]}: reissued")
            if value.version in published:
                new = wire_copy(value, parts.config.weights.wire_dtype).digest
                reissued.append(VersionReissued(value.version, published[value.version], new))
    return reissued
