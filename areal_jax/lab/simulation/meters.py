"""Counters of a simulated run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from areal_jax.control import events as e
from areal_jax.control.events import Action, Event
from areal_jax.control.reward_gate import Gates
from areal_jax.trajectories.paths import spans_of
from areal_jax.types import Group


@dataclass
class Meters:
    """Counters of a simulated run; the driver calls `see` for each event and `make` for each batch."""

    head_ages: Counter[int] = field(default_factory=Counter)
    """Number of trained samples by age: version at the start of the update - version of the first token."""
    token_ages: Counter[int] = field(default_factory=Counter)
    """Number of trained tokens by age: version at the start of the update - version of the token."""
    faults: Counter[str] = field(default_factory=Counter)
    """Number of faults that occurred, by kind."""
    masked_above: int | None = None
    """Largest age of tokens that are trained with control.over_age=mask; None: all ages are trained."""
    masked_tokens: int = 0
    """Number of tokens of trained samples that control.over_age=mask kept out of training."""
    holds: int = 0
    """Number of batches that control.over_age=hold made wait."""
    interruptions: int = 0
    swaps: int = 0
    """Number of version changes on hosts; adopting version 0 is not counted."""
    recomputed_tokens: int = 0
    """Number of tokens for which the KV was recomputed at version changes."""
    held: Counter[int] = field(default_factory=Counter)
    """Number of decode calls, by how many versions of the parameters the host had in memory."""
    tokens: int = 0
    """Number of tokens decoded, including tokens of samples that later were lost with their host."""
    host_busy_s: float = 0.0
    """Virtual seconds that hosts spent working, summed over hosts."""

    def see(self, event: Event, actions: Iterable[Action]) -> None:
        if isinstance(event, e.HostAdopted):
            self.swaps += event.version > 0
            self.interruptions += event.interrupted

    def make(
        self, step: int, groups: Sequence[Group], trained: dict[str, float], digest: str, gates: Gates = ()
    ) -> dict[str, float]:
        """Count the ages of a trained batch's tokens; return `trained`, the trainer's metrics, unchanged.

        An age is `step`, the version at the start of the update, minus the token's version.
        """
        for trajectory in (t for group in groups for t in group.trajectories):
            spans = spans_of(trajectory)
            self.head_ages[step - spans[0].version] += 1
            for version, start, end in spans:
                if self.masked_above is not None and step - version > self.masked_above:
                    self.masked_tokens += end - start
                else:
                    self.token_ages[step - version] += end - start
        return trained
