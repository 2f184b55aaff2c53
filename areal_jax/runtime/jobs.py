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
from areal_jax.control.events import BatchTrained
from areal_jax.control.machine import ControlPlane
from areal_jax.observe.live import View, make_view
from areal_jax.observe.metrics import MetricsWriter, read_rows, rewrite
from areal_jax.observe.waits import Timeline
from areal_jax.runtime.assembly import Parts, assemble
from areal_jax.runtime.devices import header, memory_table
from areal_jax.runtime.local import LocalRun
from areal_jax.runtime.reading import write_report
from areal_jax.runtime.recovery import start_state, train_again
from areal_jax.tasks.source import BUILTIN
from areal_jax.tasks.task import Task
from areal_jax.trajectories.sqlite import Entry, SqliteQueue
from areal_jax.types import ArealError

JOURNAL = "journal.sqlite"
CHANGES_NO_PAST = (
    "run.steps",
    "observe.",
    "runtime.",
    "trainer.checkpoint_every",
    "trainer.keep_checkpoints",
    "weights.backend",
    "weights.keep_versions",
    "launch.",
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
    if parts.devices.evaluation is not None:
        meshes["evaluation"] = dict(parts.devices.evaluation.shape)
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
    with view_of(c, stream, rows) as view, metrics_of(c, folder) as metrics:
        if is_resumed:
            _name_differences(journal.header, header(c), view)
        state, restored = start_state(parts, folder, control.trained_version, view.note)
        trained = [(batch.step + 1, batch.ordinals) for batch in batches]
        driver = LocalRun(
            parts, state, control, journal, folder, view, metrics, timeline, start_s, trained, restored
        )
        if is_resumed:
            last = control.trained_version
            for reissued in train_again(parts, driver.trainer, journal, last, view.note):
                journal.append([Entry(reissued, control.handle(reissued))])
        view.note(f"{folder}: {c.run.steps} steps, {parts.devices.placement} placement")
        driver.run()
    tasks = [weighted.task for weighted in parts.tasks.values()]
    report = write_report(folder, c, tasks) if c.observe.report else None
    return RunResult(folder, read_rows(folder), report)


def _name_differences(then: Mapping[str, Any], now: Mapping[str, Any], view: View) -> None:
    for key, value in now.items():
        if then.get(key) != value:
            view.note(f"{key} was {then.get(key)!r}, is {value!r}: versions trained again may differ in bits")


@contextmanager
def view_of(config: Config, stream: TextIO | None, rows: Sequence[Mapping[str, Any]]) -> Iterator[View]:
    view = make_view(stream or sys.stdout, config.observe.live, config.run.steps, rows)
    try:
        yield view
    finally:
        view.close()


@contextmanager
def metrics_of(config: Config, folder: Path) -> Iterator[MetricsWriter]:
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
