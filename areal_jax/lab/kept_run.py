"""Simulates a run that leaves a run's folder, for tests and measurements of long runs.

The driver, the control plane, the journal and the metrics are those of a real run; hosts, trainer and rewards
are simulated, as `simulation.world` does it, and no weights exist. The process may be killed at any moment:
the next `keep_run` in that folder resumes the run as `areal-jax resume` does.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from areal_jax.assembly.devices import header
from areal_jax.assembly.parts import open_inputs
from areal_jax.assembly.run_folder import CHECKPOINTS, CONFIG_DIGEST, JOURNAL, config_digest, make_folders
from areal_jax.config.loading import load_config
from areal_jax.config.tree import Config
from areal_jax.control import events as e
from areal_jax.control.events import Event
from areal_jax.lab.published.sleeping import REQUIRED_OF_TRAINER, numbered_state
from areal_jax.lab.simulation.machines import DrawnMachines
from areal_jax.lab.simulation.schedule import Schedule
from areal_jax.lab.simulation.world import World
from areal_jax.observe.waits import Timeline
from areal_jax.runtime.context import RunContext, make_folder, open_context
from areal_jax.runtime.core import Offer
from areal_jax.runtime.differences import MACHINE
from areal_jax.runtime.driver import Driver
from areal_jax.trainer.checkpoint import discard_newer
from areal_jax.trajectories.sqlite import SqliteQueue
from areal_jax.types import Group, PolicyVersion, Trajectory
from areal_jax.weights import staged
from areal_jax.weights.digest import digest, leaf_sums
from areal_jax.weights.manifest import committed
from areal_jax.weights.staged import Detached


def long_config(folder: Path, steps: int, samples: int, group: int = 16) -> Config:
    """Returns the config of a run of batches of `samples` samples, in groups of `group`, on 8 hosts."""
    return load_config(
        "tasks=arithmetic",
        f"run.dir={folder}",
        f"run.steps={steps}",
        f"trainer.batch_size={samples // group}",
        f"algorithm.group_size={group}",
        f"trainer.rows={samples}",
        "trainer.checkpoint_every=25",
        f"generation.slots={max(1, samples // 4)}",
        "runtime.hosts=8",
        "control.max_staleness=4",
        "observe.live=false",
    )


def keep_run(config: Config, schedule: Schedule) -> None:
    """Simulates the run of `config` in its folder, or goes on with it there, up to its end.

    A run that has ended stays as it is. Raises SimulationError if the run hangs or becomes inconsistent.
    """
    folder = config.run.folder
    path = folder / JOURNAL
    if not path.exists():
        make_folder(config, folder)
        make_folders(folder, CHECKPOINTS)
        own = header(config) | {CONFIG_DIGEST: config_digest(folder)}
        SqliteQueue.create(path, own).close()
    with ExitStack() as files:
        KeptRun(config, schedule, files).start()


@contextmanager
def opened(config: Config) -> Iterator[RunContext]:
    """Context manager: opens the folder of a run as a new run or a resume does."""
    folder = config.run.folder
    timeline = Timeline(folder / "logs" / "timeline.jsonl")
    with (
        SqliteQueue.open(folder / JOURNAL) as journal,
        open_context(config, folder, journal, timeline, io.StringIO()) as context,
    ):
        yield context


@lru_cache(64)
def _digest(version: PolicyVersion) -> str:
    return digest(numbered_state(version).params)


class KeptMachines(DrawnMachines):
    """Random results, with the prompts of the config's tasks and the fields that a trainer reports."""

    def __init__(self, config: Config, schedule: Schedule) -> None:
        super().__init__(config, schedule)
        self.inputs = open_inputs(config)

    def publish(self, version: PolicyVersion) -> str:
        """Returns the digest of the parameters that a checkpoint of this version contains."""
        return _digest(version)

    def train(self, action: e.Train, groups: tuple[Group, ...]) -> tuple[str, dict[str, Any]]:
        digest, metrics = super().train(action, groups)
        return digest, dict.fromkeys(REQUIRED_OF_TRAINER, 0.0) | metrics | {MACHINE: "simulated"}


class KeptRun(World):
    """A simulation that writes the folder of a real run."""

    def __init__(self, config: Config, schedule: Schedule, files: ExitStack) -> None:
        """`files` closes the run's open files."""
        self._files, self._own = files, KeptMachines(config, schedule)
        self._checkpoints = config.run.folder / CHECKPOINTS
        super().__init__(config, schedule, self._own)

    def _open(self) -> Driver:
        self._files.close()
        context = self._files.enter_context(opened(self.config))
        self._kept = context.journal
        return Driver(self._own.inputs, context, self, (), dict)

    @property
    def row(self) -> int:
        return self._kept.last_seq

    def start(self) -> None:
        """Begins the run or goes on with it, up to its end."""
        if self.control.state.is_finished:
            return
        if self.control.state.version < 0:
            self.deliver(e.RunStarted(self.machines.publish(0), self.config.run.steps))
            self._join_all()
        else:
            discard_newer(self._checkpoints, self.control.state.trained_version)
            self._trainer.restored(max(committed(self._checkpoints), default=0))
            self._resume()
        self.to_end()

    def send(self, event: Event, payload: Trajectory | Offer | None = None, epoch: int | None = None) -> None:
        if isinstance(event, e.CheckpointCommitted):
            state = numbered_state(event.version)
            staged.write(self._checkpoints, event.version, Detached(state, leaf_sums(state)))
        super().send(event, payload, epoch)

    def _forget(self, ordinals: Sequence[int]) -> None:
        """The driver deletes trajectories after checkpoints."""
