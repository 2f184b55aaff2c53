"""A run's folder from its first second to its report: start, resume, and what a dry run says."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from areal_jax.config import Config, ConfigError, load_config, resolved, to_yaml
from areal_jax.control.events import BatchTrained, Event, Train, VersionReissued
from areal_jax.control.machine import ControlPlane
from areal_jax.observe.live import View, make_view
from areal_jax.observe.metrics import MetricsWriter, read_rows, rewrite
from areal_jax.observe.waits import Timeline
from areal_jax.runtime.assembly import Parts, assemble
from areal_jax.runtime.devices import header, memory_table
from areal_jax.runtime.local import LocalRun
from areal_jax.runtime.reading import write_report
from areal_jax.runtime.trainer import Trainer, held_batch
from areal_jax.tasks.source import BUILTIN
from areal_jax.tasks.task import Task
from areal_jax.trainer.checkpoint import discard_newer, restore
from areal_jax.trainer.state import TrainState
from areal_jax.trajectories.sqlite import Entry, SqliteQueue
from areal_jax.types import ArealError, Group
from areal_jax.weights.store import wire_copy

JOURNAL = "journal.sqlite"
CHANGES_NO_PAST = (
    "run.steps",
    "observe.",
    "runtime.",
    "trainer.checkpoint_every",
    "trainer.keep_checkpoints",
    "weights.backend",
    "weights.keep_versions",
)
"""Keys that `resume` takes: what they say of the steps already trained stays true."""


@dataclass(frozen=True)
class RunResult:
    folder: Path
    metrics: list[dict[str, Any]]
    """One row a training step, as in metrics.jsonl."""
    report: Path | None


def run(config: Config, tasks: Sequence[Task] = (), stream: TextIO | None = None) -> RunResult:
    """Train from scratch in the config's folder, which must not exist. `tasks` stand in for the config's.

    Raises ArealError; whatever ends the run early, `resume` goes on from there.
    """
    folder = config.run.folder
    if folder.exists():
        raise ArealError(
            f"the run folder {folder} exists; choose another run.name or run.dir, or go on with `areal-jax "
            f"resume {folder}`"
        )
    use_compilation_cache()
    parts = assemble(config, tasks)
    config = _naming(config, parts) if tasks else config
    (folder / "logs").mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    with SqliteQueue.create(folder / JOURNAL, header(config)) as journal:
        return _train(parts, ControlPlane(config), journal, folder, stream)


def resume(
    folder: str | Path,
    overrides: Sequence[str] = (),
    tasks: Sequence[Task] = (),
    stream: TextIO | None = None,
) -> RunResult:
    """Go on with a run after any end. Raises ArealError for no run, or a key that changes the past."""
    folder = Path(folder)
    config = read_config(folder, overrides)
    objects = [name for name in config.tasks if name not in BUILTIN and ":" not in name]
    if objects and not tasks:
        raise ArealError(
            f"{folder} was given its tasks as Python objects ({', '.join(objects)}), which no command line "
            f"can make again; go on from Python: areal_jax.resume({str(folder)!r}, tasks=[...])"
        )
    use_compilation_cache()
    with SqliteQueue.open(folder / JOURNAL) as journal:
        parts = assemble(config, tasks)
        found = journal.latest_snapshot()
        seq, snapshot = found if found else (0, None)
        control = ControlPlane.fold(config, (row.event for row in journal.rows(seq)), snapshot)
        return _train(parts, control, journal, folder, stream)


def read_config(folder: Path, overrides: Sequence[str] = ()) -> Config:
    """The config of the run in `folder`, with keys that change no past. Raises ConfigError."""
    if not (folder / JOURNAL).exists():
        if (folder / "config.yaml").exists():
            raise ConfigError(
                f"the run in {folder} ended before its journal began, so there is nothing to go on from; "
                "remove the folder and start it again"
            )
        raise ConfigError(
            f"{folder} is not a run's folder: it has no {JOURNAL}; start one with `areal-jax run`"
        )
    for word in overrides:
        if not word.split("=")[0].startswith(CHANGES_NO_PAST):
            raise ConfigError(
                f"{word}: a resumed run takes only keys that change no past ({', '.join(CHANGES_NO_PAST)}); "
                "start a new run for anything else"
            )
    return load_config(folder / "config.yaml", *overrides, f"run.dir={folder}")


def dry_run(config: Config, tasks: Sequence[Task] = ()) -> dict[str, Any]:
    """The resolved config, the meshes and the memory table; nothing is written, no program compiled."""
    parts = assemble(config, tasks)
    meshes = {"trainer": dict(parts.devices.trainer.shape)} | {
        f"host-{i}": dict(mesh.shape) for i, mesh in enumerate(parts.devices.hosts)
    }
    return {
        "config": resolved(config),
        "placement": parts.devices.placement,
        "meshes": meshes,
        "parameters": parts.model.parameter_count,
        "memory": [
            {"who": who, "what": what, "bytes": size}
            for who, what, size in memory_table(
                config, parts.model, parts.devices.placement, parts.teacher and parts.teacher.model
            )
        ],
    }


# --- inside -------------------------------------------------------------------------------------------------


def _naming(config: Config, parts: Parts) -> Config:
    """The config with the names of tasks given as objects, so that nobody goes on with the config's own."""
    is_text = all(weighted.task.tokenizer is None for weighted in parts.tasks.values())
    model = config.model.model_copy(update={"tokenizer": "byte"}) if is_text else config.model
    return config.model_copy(update={"tasks": {name: {} for name in parts.tasks}, "model": model})


def _train(
    parts: Parts, control: ControlPlane, journal: SqliteQueue, folder: Path, stream: TextIO | None
) -> RunResult:
    c = parts.config
    is_resumed = control.version >= 0
    batches = [row.event for row in journal.rows() if isinstance(row.event, BatchTrained)]
    rows = [batch.metrics for batch in batches]
    rewrite(folder, rows)
    timeline = Timeline(folder / "logs" / "timeline.jsonl")
    start_s = rows[-1]["wall_s"] if rows else 0.0
    with _view(c, stream, rows) as view, _metrics(c, folder) as metrics:
        if is_resumed:
            _name_differences(journal.header, header(c), view)
        state, restored = _state(parts, control, folder, view)
        trained = [(batch.step + 1, batch.ordinals) for batch in batches]
        driver = LocalRun(
            parts, state, control, journal, folder, view, metrics, timeline, start_s, trained, restored
        )
        if is_resumed:
            _redo(parts, driver.trainer, control, journal, view)
        view.note(f"{folder}: {c.run.steps} steps, {parts.devices.placement} placement")
        driver.run()
    tasks = [weighted.task for weighted in parts.tasks.values()]
    report = write_report(folder, c, tasks) if c.observe.report else None
    return RunResult(folder, read_rows(folder), report)


def _state(parts: Parts, control: ControlPlane, folder: Path, view: View) -> tuple[TrainState, int | None]:
    """From the newest whole checkpoint that the journal has come to, and its version; or 0's, and None."""
    for version in discard_newer(folder / "checkpoints", control.trained_version):
        view.note(f"checkpoint {version} discarded: the journal ends at version {control.trained_version}")
    restored = restore(folder / "checkpoints", parts.learner.abstract_state())
    for reason in restored.refused:
        view.note(f"refused: {reason}; going back to the one before")
    if restored.state is None:
        return parts.first_state(), None
    return restored.state, int(restored.state.version)


def _redo(parts: Parts, trainer: Trainer, control: ControlPlane, journal: SqliteQueue, view: View) -> None:
    """Train the journaled batches after the checkpoint again, from kept payloads; compare every digest."""
    first, last = int(trainer.state.version), control.trained_version
    if first > last:
        raise ArealError(
            f"the checkpoint holds version {first}, the journal ends at version {last}: they are not of one "
            "run"
        )
    if first == last:
        return
    view.note(f"training steps {first} to {last - 1} again from the journal")
    plans: dict[int, Train] = {}
    digests: dict[int, str] = {}
    for row in journal.rows():
        if isinstance(row.event, BatchTrained):
            digests[row.event.step] = row.event.digest
        plans |= {action.step: action for action in row.actions if isinstance(action, Train)}
    for step in range(first, last):
        plan, size = plans[step], parts.config.algorithm.group_size
        groups = [
            Group(o, parts.prompts.prompt(o), journal.group(o, a, size))
            for o, a in zip(plan.ordinals, plan.attempts, strict=True)
        ]
        value, _ = trainer.train(held_batch(parts, step, groups))
        if value.digest != digests[step]:
            view.note(f"version {value.version} has digest {value.digest}, was {digests[step]}: reissued")
            if value.version <= control.version:
                new = wire_copy(value, parts.config.weights.wire_dtype).digest
                event: Event = VersionReissued(value.version, control.digest(value.version), new)
                journal.append([Entry(event, control.handle(event))])


def _name_differences(then: Mapping[str, Any], now: Mapping[str, Any], view: View) -> None:
    for key, value in now.items():
        if then.get(key) != value:
            view.note(f"{key} was {then.get(key)!r}, is {value!r}: versions trained again may differ in bits")


@contextmanager
def _view(config: Config, stream: TextIO | None, rows: Sequence[Mapping[str, Any]]) -> Iterator[View]:
    view = make_view(stream or sys.stdout, config.observe.live, config.run.steps, rows)
    try:
        yield view
    finally:
        view.close()


@contextmanager
def _metrics(config: Config, folder: Path) -> Iterator[MetricsWriter]:
    wandb = {"project": "areal-jax", "name": config.run.name} if config.observe.wandb else None
    writer = MetricsWriter(folder, config.observe.tensorboard, wandb)
    try:
        yield writer
    finally:
        writer.close()


def use_compilation_cache() -> None:
    """Keep compiled programs between runs, unless the process or its environment has chosen a place."""
    import jax

    if jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]
        return
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "areal-jax" / "xla"
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
