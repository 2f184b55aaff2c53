"""Opens a run's folder so that parts of the run can be computed again, with the run's programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_jax.assembly.devices import (
    header,
    repeats_bits,
    training_machine,
    use_compilation_cache,
    use_virtual_cpus,
)
from areal_jax.assembly.gpus import use_gpu_environment
from areal_jax.assembly.run_folder import BRANCH, open_journal, run_config
from areal_jax.config.loading import load_config, make_config, resolved
from areal_jax.config.tree import Config
from areal_jax.runtime.differences import MACHINE
from areal_jax.trajectories.sqlite import SqliteQueue

IN_MEMORY = ("weights.backend=memory",)
"""The setting of each replay, which is one process."""

OF_PROCESSES = (*IN_MEMORY, "runtime.hosts=1", "observe.evaluate=0", "observe.exports=0")
"""Further settings for a run of several processes: the replay has one engine, and evaluates nothing."""

ON_ONE_DEVICE = ("runtime.placement=shared", "generation.calls_ahead=0")
"""Settings for such a run on CPUs, where XLA divides work by a process's number of devices: each role
had only its own in its process, and one more in this process might change bits.
"""


UNREPEATED: dict[str, tuple[Any, Any]] = {"deterministic_kernels": (False, False)}
"""The difference of a machine from itself, if its devices do not repeat bits (`devices.repeats_bits`)."""


@dataclass(frozen=True)
class Stretch:
    """The part of a run's journal that was written under one config: a branch's journal has several."""

    after: int
    """The part begins after the event with this number."""
    config: Config
    """The part's config, with the settings of a replay."""
    header: Mapping[str, Any]
    """What bits depended on when the part began (`assembly.devices.header`)."""
    is_of_processes: bool
    """Whether each role of the run was a process of its own."""
    first_step: int = 0
    """Number of the part's first batch."""

    def differences(self, stored: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Returns name -> (value in `stored`, a header of the run; value here), where they differ."""
        own = header(self.config)
        # The header of a run of processes is the controller's, which has no devices.
        unknown = {"devices"} if self.is_of_processes else set()
        return {
            name: (stored[name], own[name])
            for name in (stored.keys() & own.keys()) - unknown
            if stored[name] != own[name]
        }

    def machine(self) -> str:
        """Returns what this machine's trainer would record of itself in a batch of this part."""
        # A trainer that is a process of its own has its own devices alone.
        return training_machine(self.config, self.config.trainer_devices if self.is_of_processes else None)


@dataclass(frozen=True)
class Reopened:
    """A run whose journal is open for reading."""

    folder: Path
    config: Config
    """The run's own config."""
    journal: SqliteQueue
    stretches: tuple[Stretch, ...]
    """In order; more than one if the run is a branch of another run."""

    def stretch_of(self, step: int) -> Stretch:
        """Returns the part of the journal in which batch `step` was trained."""
        return next(one for one in reversed(self.stretches) if one.first_step <= step)

    def unlike(self, first: int, last: int) -> dict[str, tuple[Any, Any]]:
        """Returns why the batches `first` to `last` may have other bits here, though headers are equal.

        Name of a value -> (of the run, here). Empty if nothing is known of such a reason: older versions of
        areal-jax did not record the machine. Samples after the last batch are taken for those of its machine.
        """
        of_step = {one.step: one.metrics.get(MACHINE) for one in self.journal.events("BatchTrained")}
        newest = max(of_step, default=0)
        for step in range(min(first, newest), min(last, newest) + 1):
            recorded, own = of_step.get(step), self.stretch_of(step).machine()
            if recorded not in (None, own):
                return {MACHINE: (recorded, own)}
        return {} if repeats_bits() else UNREPEATED


@contextmanager
def reopened(folder: Path) -> Iterator[Reopened]:
    """Context manager: opens the run in `folder` for computing parts of it again.

    Raises ArealError if `folder` is not a run's folder.
    """
    config = run_config(folder)
    use_gpu_environment(config)
    use_compilation_cache()
    with open_journal(folder) as journal:
        run = Reopened(folder, config, journal, _stretches(config, journal))
        first = run.stretches[0]
        if first.header.get("device_kind") == "cpu" and not first.is_of_processes:
            use_virtual_cpus(first.header["devices"])  # XLA divides work by it
        yield run


def branch_record(run: Reopened, step: int, seq: int) -> dict[str, Any]:
    """Returns the record of a branch that has `run`'s events up to number `seq`, and so `step` steps."""
    return {
        "run": str(run.folder),
        "step": step,
        "seq": seq,
        "config": resolved(run.config),
        "header": run.journal.header,
        "is_of_processes": run.journal.is_of_processes,
    }


def differences_text(differences: Mapping[str, tuple[Any, Any]]) -> str:
    """Returns, as text, name -> (value of the run, value here)."""
    return ", ".join(
        f"{name} was {then!r}, now {now!r}" if then != now else f"{name} is {now!r}"
        for name, (then, now) in differences.items()
    )


def _stretches(config: Config, journal: SqliteQueue) -> tuple[Stretch, ...]:
    found: list[Stretch] = []
    stored, is_of_processes = journal.header, journal.is_of_processes
    while True:
        own = load_config(resolved(config), *_settings(config, stored, is_of_processes))
        branch = stored.get(BRANCH)
        after, step = (branch["seq"], branch["step"]) if branch else (0, 0)
        found.append(Stretch(after, own, stored, is_of_processes, step))
        if branch is None:
            return tuple(reversed(found))
        config = make_config(branch["config"])
        stored, is_of_processes = branch["header"], branch["is_of_processes"]


def _settings(config: Config, stored: Mapping[str, Any], is_of_processes: bool) -> tuple[str, ...]:
    """Returns what a replay sets, so that its trainer and its engine compute with the run's programs."""
    if not is_of_processes:
        return IN_MEMORY
    is_apart = config.runtime.reference.is_apart or config.runtime.teacher.is_apart
    is_on_cpus = stored.get("device_kind") == "cpu"
    return (*OF_PROCESSES, *(ON_ONE_DEVICE if is_on_cpus and not is_apart else ()))
