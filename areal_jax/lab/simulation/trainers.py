"""The trainer of a simulated run: its batches, versions and checkpoints, its restarts and its pauses."""

from __future__ import annotations

from areal_jax.control import events as e
from areal_jax.lab.simulation.surroundings import Surroundings
from areal_jax.lab.simulation.virtual_clock import DRIVER, TRAINER
from areal_jax.types import Group


class Trainer:
    """One trainer process after another: a crash ends one, and its results are ignored from then on."""

    def __init__(self, world: Surroundings) -> None:
        self._world, self._clock = world, world.clock
        self._process = 0
        """Number of the current process."""
        self._is_up = True
        self._begun = -1
        """Step of the newest batch that the process has begun; it ignores that batch if it comes again."""
        self._unread: tuple[e.Train, tuple[Group, ...]] | None = None
        """The batch that the paused process has not read yet."""
        self._published_s = 0.0
        self._checkpoint = 0

    # --- batches and versions -------------------------------------------------------------------------------

    def train(self, action: e.Train, groups: tuple[Group, ...]) -> None:
        # Otherwise the trainer gets the batch after its restart, or when it comes back.
        if not self._is_up or action.step <= self._begun:
            return
        if self._clock.is_paused(TRAINER):
            self._unread = action, groups
            return
        self._begun = action.step
        seconds = self._world.latency(self._world.schedule.train_s)
        self._clock.later(seconds, self._trained, self._process, action, groups, of=TRAINER)

    def trained(self, step: int) -> None:
        """Publish the version of a batch that is journaled as trained, and perhaps make a checkpoint of it.

        That is every trainer.checkpoint_every versions.
        """
        version = step + 1
        self._publish(version)
        if version % self._world.config.trainer.checkpoint_every == 0:
            seconds = self._world.latency(self._world.schedule.publish_s)
            self._clock.later(seconds, self._checkpointed, self._process, version, of=TRAINER)

    def _trained(self, process: int, batch: e.Train, groups: tuple[Group, ...]) -> None:
        if process == self._process:
            digest, metrics = self._world.machines.train(batch, groups)
            self._world.send(e.BatchTrained(batch.step, batch.ordinals, digest, metrics))

    def _publish(self, version: int) -> None:
        """Schedule the time from which hosts can load a version; versions are published one after another."""
        latency = self._world.latency(self._world.schedule.publish_s)
        self._published_s = max(self._published_s, self._clock.now_s) + latency
        seconds = self._published_s - self._clock.now_s
        self._clock.later(seconds, self._committed, self._process, version, of=TRAINER)

    def _committed(self, process: int, version: int) -> None:
        if process == self._process:
            self._world.send(e.VersionCommitted(version, self._world.machines.publish(version)))

    def _checkpointed(self, process: int, version: int) -> None:
        if process == self._process and version > self._checkpoint:
            self._checkpoint = version
            self._world.send(e.CheckpointCommitted(version))

    # --- crashes --------------------------------------------------------------------------------------------

    def crash(self, down_s: float) -> None:
        """End the process; another one starts after `down_s` seconds, and asks for the batch in training."""
        self.end()
        self._is_up = False
        self._clock.later(down_s, self._restart, self._process, of=DRIVER)

    def end(self) -> None:
        self._process += 1
        self._begun, self._unread = -1, None
        self._clock.end_pause(TRAINER)

    def start(self) -> None:
        """Start a new process: load the last checkpoint, and publish newer versions once more."""
        self._published_s, self._is_up = self._clock.now_s, True
        state = self._world.control.state
        is_checkpoint_published = state.version >= self._checkpoint
        for version in range(self._checkpoint + is_checkpoint_published, state.trained_version + 1):
            self._publish(version)

    def _restart(self, process: int) -> None:
        if process == self._process:
            self._clock.end_pause(TRAINER)
            self.start()
            self._ask_again(process)

    def _ask_again(self, process: int) -> None:
        if process != self._process:
            return
        self._is_up = True
        if (batch := self._world.control.state.training) is not None:
            self._world.act([batch])

    # --- pauses ---------------------------------------------------------------------------------------------

    def pause(self, down_s: float) -> None:
        """Pause the process; the driver finds it lost after Schedule.lost_s."""
        self._clock.pause(TRAINER, down_s)
        if down_s > (lost_s := self._world.schedule.lost_s):
            self._clock.later(lost_s, self._lose, self._process, of=DRIVER)
        self._clock.later(down_s, self._go_on, self._process)

    def _lose(self, process: int) -> None:
        if process == self._process and self._clock.is_paused(TRAINER):
            self._is_up, self._unread = False, None

    def _go_on(self, process: int) -> None:
        if process != self._process or self._clock.is_paused(TRAINER):
            return
        if not self._is_up:
            seconds = self._world.until_heard()
            self._clock.later(seconds, self._clock.with_driver, TRAINER, self._ask_again, process)
        elif self._unread is not None:
            unread, self._unread = self._unread, None
            self.train(*unread)
