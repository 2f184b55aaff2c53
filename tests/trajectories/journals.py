"""Entries of journals for tests."""

from __future__ import annotations

from typing import Any

from areal_jax.control.events import RewardScored, SampleFinished, Score
from areal_jax.trajectories.journal import Entry
from areal_jax.trajectories.sqlite import SqliteQueue
from areal_jax.types import SampleId
from tests.trajectories.samples import trajectory


def finished(sample: SampleId, **options: Any) -> Entry:
    one = trajectory(sample, **options)
    event = SampleFinished(sample, "host-0", one.spans, one.stop_reason, 1)
    return Entry(event, (Score(sample.ordinal, sample.attempt),), one)


def group(ordinal: int) -> list[Entry]:
    """Two samples and their rewards: three events."""
    scored = RewardScored(ordinal, 0, (ordinal / 10, 1.0))
    return [finished(SampleId(ordinal, 0)), finished(SampleId(ordinal, 1)), Entry(scored)]


def assert_whole(journal: SqliteQueue, groups: int) -> None:
    """Events 1 to 3 * groups, each once, with every payload and reward."""
    rows = list(journal.rows())
    assert [row.seq for row in rows] == list(range(1, 3 * groups + 1))
    assert [row.event for row in rows] == [entry.event for o in range(groups) for entry in group(o)]
    for ordinal in range(groups):
        assert [t.reward for t in journal.group(ordinal, 0, 2)] == [ordinal / 10, 1.0]
