"""Journals for tests: of either store, by the same words, also from another process."""

from __future__ import annotations

import itertools
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_jax.control.events import RewardScored, SampleFinished, Score
from areal_jax.runtime.redis_server import RedisServer
from areal_jax.trajectories.journal import Entry, Journal
from areal_jax.trajectories.sqlite import SqliteQueue
from areal_jax.types import SampleId
from tests.trajectories.samples import trajectory

_NUMBERS = itertools.count()


def finished(sample: SampleId, **options: Any) -> Entry:
    one = trajectory(sample, **options)
    event = SampleFinished(sample, "host-0", one.spans, one.stop_reason, 1)
    return Entry(event, (Score(sample.ordinal, sample.attempt),), one)


def group(ordinal: int) -> list[Entry]:
    """Two samples and their rewards: three events."""
    scored = RewardScored(ordinal, 0, (ordinal / 10, 1.0))
    return [finished(SampleId(ordinal, 0)), finished(SampleId(ordinal, 1)), Entry(scored)]


def assert_whole(journal: Journal, groups: int) -> None:
    """Events 1 to 3 * groups, each once, with every payload and reward."""
    rows = list(journal.rows())
    assert [row.seq for row in rows] == list(range(1, 3 * groups + 1))
    assert [row.event for row in rows] == [entry.event for o in range(groups) for entry in group(o)]
    for ordinal in range(groups):
        assert [t.reward for t in journal.group(ordinal, 0, 2)] == [ordinal / 10, 1.0]


@dataclass(frozen=True)
class Store:
    """One journal's place; without a url it is a file alone."""

    folder: Path
    url: str = ""
    secret: str = ""
    run: str = ""

    def create(self, header: dict[str, Any]) -> Journal:
        if not self.url:
            return SqliteQueue.create(self.folder / "journal.sqlite", header)
        from areal_jax.trajectories.redis import RedisQueue

        return RedisQueue.create(self.url, self.run, header, self.folder, secret=self.secret, deadline_s=20)

    def open(self, readonly: bool = False, deadline_s: float = 20) -> Any:
        if not self.url:
            return SqliteQueue.open(self.folder / "journal.sqlite", readonly)
        from areal_jax.trajectories.redis import RedisQueue

        return RedisQueue.open(
            self.url, self.run, self.folder, readonly, secret=self.secret, deadline_s=deadline_s
        )


def make_store(folder: Path, server: RedisServer | None, url: str = "") -> Store:
    if server is None:
        return Store(folder)
    return Store(folder, url or server.url, server.secret, f"run-{next(_NUMBERS)}-{uuid.uuid4().hex[:8]}")
