"""The in-memory journal of a simulated run, which survives simulated crashes of the driver."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from areal_jax.control.audit import Row
from areal_jax.control.events import EpisodeEnded, RewardScored, TurnFinished
from areal_jax.trajectories.journal import Entry, with_rewards
from areal_jax.types import SampleId, Trajectory


class MemoryJournal:
    """In-memory counterpart of `SqliteQueue`, the journal of a real run, with the methods needed here."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._payloads: dict[SampleId, Trajectory] = {}

    def append(self, entries: Sequence[Entry], durable: bool = False) -> int:
        for entry in entries:
            event, trajectory = entry.event, entry.trajectory
            self.rows.append((len(self.rows), event, entry.actions))
            if isinstance(event, TurnFinished | EpisodeEnded) and trajectory is not None:
                self._payloads[trajectory.sample] = trajectory
            elif trajectory is not None:
                self._payloads.setdefault(trajectory.sample, trajectory)
        return len(self.rows)

    def live_events(self, kind: str) -> Iterator[Any]:
        return (event for _, event, _ in self.rows if type(event).__name__ == kind)

    def trajectory(self, sample: SampleId) -> Trajectory:
        return self._payloads[sample]

    def group(self, ordinal: int, attempt: int, size: int) -> tuple[Trajectory, ...]:
        """Return a group's `size` trajectories in member order, with rewards if the group was scored.

        `ordinal`: the prompt's place in the run's order; `attempt`: how often its group was sampled again.
        Raises KeyError if a trajectory is missing.
        """
        members = tuple(self._payloads[SampleId(ordinal, member, attempt)] for member in range(size))
        for _, event, _ in self.rows:  # seldom: the core asks only after a simulated crash
            if isinstance(event, RewardScored) and (event.ordinal, event.attempt) == (ordinal, attempt):
                return with_rewards(members, event)
        return members

    def forget(self, ordinals: Sequence[int]) -> None:
        """Delete all trajectories of the groups with these ordinals (places in the run's order)."""
        gone = set(ordinals)
        self._payloads = {s: payload for s, payload in self._payloads.items() if s.ordinal not in gone}
