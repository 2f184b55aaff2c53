"""What the processes of a simulated run have around them: the clock, the driver, and random latencies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from areal_jax.config.tree import Config
from areal_jax.control.events import Action, Event
from areal_jax.control.machine import ControlPlane
from areal_jax.lab.simulation.machines import Machines
from areal_jax.lab.simulation.meters import Meters
from areal_jax.lab.simulation.schedule import Schedule
from areal_jax.lab.simulation.virtual_clock import VirtualClock
from areal_jax.runtime.core import Offer
from areal_jax.types import Trajectory

BACK_S = 0.2
"""Seconds within which the driver notices that a process is back: about as long as a sample takes."""


class Surroundings(Protocol):
    """`lab.simulation.world.World`, as its hosts, trainer and reward process see it."""

    config: Config
    schedule: Schedule
    machines: Machines
    meters: Meters
    clock: VirtualClock
    epoch: int
    """Number of crashes of the driver that the other processes outlived."""

    @property
    def control(self) -> ControlPlane: ...

    def latency(self, seconds: float) -> float:
        """Return these seconds times a random factor, drawn from the schedule's seed."""
        ...

    def until_heard(self) -> float:
        """Return after how many seconds the driver notices that a lost process is back."""
        ...

    def send(self, event: Event, payload: Trajectory | Offer | None = None, epoch: int | None = None) -> None:
        """Deliver a process's event to the driver, once that is not paused.

        `epoch`: that of the process, if the driver refuses its events of earlier epochs.
        """
        ...

    def deliver(self, event: Event, payload: Trajectory | Offer | None = None) -> None:
        """Record the event and the control plane's actions, carry these out, then let faults occur."""
        ...

    def sample_ended(self, event: Event, trajectory: Trajectory | None, epoch: int) -> None:
        """Deliver the event of an ended sample at once or late, once or twice, at random by the schedule."""
        ...

    def act(self, actions: Iterable[Action]) -> None:
        """Carry out actions that no event of this moment gave."""
        ...
