"""Starts and resumes local runs, and describes a run without starting it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from areal_jax.assembly.devices import header, use_compilation_cache
from areal_jax.assembly.gpus import gpu_environment, use_gpu_environment
from areal_jax.assembly.memory_table import memory_table
from areal_jax.assembly.parts import Parts, assemble, with_measured_layout
from areal_jax.assembly.run_folder import CONFIG_DIGEST, JOURNAL, config_digest
from areal_jax.config.loading import ConfigError, load_config, resolved
from areal_jax.config.tree import Config
from areal_jax.observe.waits import Timeline
from areal_jax.runtime.context import RunResult, make_folder, open_context, write_result
from areal_jax.runtime.one_process import LocalRun
from areal_jax.runtime.reading import with_steps_asked
from areal_jax.runtime.recovery import start_state, train_again
from areal_jax.tasks.source import BUILTIN
from areal_jax.tasks.task import Task
from areal_jax.trajectories.sqlite import Entry, SqliteQueue
from areal_jax.types import ArealError
from areal_jax.weights.folder import cleaned_weights

RESUMABLE_KEYS = (
    "run.steps",
    "observe.",
    "runtime.",
    "generation.weight_layout",
    "trainer.checkpoint_every",
    "trainer.keep_checkpoints",
    "weights.backend",
    "weights.dir",
    "weights.keep_versions",
    "launch.",
)
"""Config keys that a resumed run may change, since they do not affect the steps already trained. A key with a
dot at its end stands for all keys of that section.
"""


def run(config: Config, tasks: Sequence[Task] = (), stream: TextIO | None = None) -> RunResult:
    """Start a new run and train it to the end.

    `tasks`, if given, replace the config's tasks. Progress is shown on `stream`; None: stdout. Raises
    ArealError if the run's folder exists or the run fails. A run that ended early can be resumed.
    """
    require_new(config.run.folder)
    use_gpu_environment(config)
    use_compilation_cache()
    parts = with_measured_layout(assemble(config, tasks))
    return run_parts(parts, _naming(parts.config, parts) if tasks else parts.config, stream)


def run_parts(parts: Parts, named: Config, stream: TextIO | None = None) -> RunResult:
    """Start a new run of assembled parts and train it to the end.

    `named`: the config that the run's folder records. `stream`, errors: as in `run`.
    """
    folder = named.run.folder
    require_new(folder)
    make_folder(named, folder)
    own = header(named) | {CONFIG_DIGEST: config_digest(folder)}
    with SqliteQueue.create(folder / JOURNAL, own) as journal:
        return _train(parts, journal, folder, stream)


def resume(
    folder: str | Path,
    overrides: Sequence[str] = (),
    tasks: Sequence[Task] = (),
    stream: TextIO | None = None,
) -> RunResult:
    """Continue the run in `folder` to its end.

    `overrides`: KEY=VALUE settings to change; `tasks`, `stream`: as in `run`. Raises ArealError if `folder`
    has no journal, for a key outside RESUMABLE_KEYS, or if the run was given task objects and `tasks` is
    empty.
    """
    folder = Path(folder)
    config = read_config(folder, overrides)
    objects = [name for name in config.tasks if name not in BUILTIN and ":" not in name]
    if objects and not tasks:
        raise ArealError(
            f"{folder} was given its tasks as Python objects ({', '.join(objects)}), which the command "
            f"line cannot make; resume the run in Python: areal_jax.resume({str(folder)!r}, tasks=[...])"
        )
    use_gpu_environment(config)
    use_compilation_cache()
    with SqliteQueue.open(folder / JOURNAL) as journal:
        return _train(assemble(config, tasks), journal, folder, stream)


def read_config(folder: Path, overrides: Sequence[str] = ()) -> Config:
    """Returns the config of the run in `folder`, changed by `overrides` of the form KEY=VALUE.

    Its run.steps, unless overridden, is that of the last resume; other keys are as at the run's start.
    Raises ConfigError if the folder has no journal, or for an override of a key outside RESUMABLE_KEYS.
    """
    if not (folder / JOURNAL).exists():
        if (folder / "config.yaml").exists():
            raise ConfigError(
                f"the run in {folder} ended before its journal was made, so there is nothing to resume; "
                "remove the folder and start the run again"
            )
        raise ConfigError(
            f"{folder} is not a run's folder: it has no {JOURNAL}; start a run with `areal-jax run`"
        )
    for word in overrides:
        if not word.split("=")[0].startswith(RESUMABLE_KEYS):
            raise ConfigError(
                f"{word} can only be set on a new run; a resumed run accepts {', '.join(RESUMABLE_KEYS)}: "
                "leave the key out, or start a new run"
            )
    config = load_config(folder / "config.yaml", *overrides, f"run.dir={folder}")
    has_steps = any(word.startswith("run.steps=") for word in overrides)
    return config if has_steps else with_steps_asked(config, folder)


def dry_run(config: Config, tasks: Sequence[Task] = ()) -> dict[str, Any]:
    """Describe a run without starting it; `tasks`, if given, replace the config's tasks.

    Returns the resolved config, placement (whether trainer and hosts share a device), meshes, number of
    parameters, memory table (bytes per device), and the environment variables of its processes on GPUs.
    """
    use_gpu_environment(config)
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
        "gpu_environment": gpu_environment(config),
        "memory": [
            {"owner": owner, "content": content, "bytes": size}
            for owner, content, size in memory_table(
                config, parts.model, parts.devices.placement, parts.teacher and parts.teacher.model
            )
        ],
    }


def require_new(folder: Path) -> None:
    """Raise ArealError if the folder of a new run exists."""
    if folder.exists():
        raise ArealError(
            f"the run folder {folder} exists; choose another run.name or run.dir, or continue that run with "
            f"`areal-jax resume {folder}`"
        )


# --- inside -------------------------------------------------------------------------------------------------


def _naming(config: Config, parts: Parts) -> Config:
    """Return the config with the names of `parts.tasks`, which are Python objects, instead of its own tasks.

    The names make `resume` ask for the same objects, instead of training on the config's own tasks.
    """
    is_text = all(weighted.task.tokenizer is None for weighted in parts.tasks.values())
    model = config.model.model_copy(update={"tokenizer": "byte"}) if is_text else config.model
    return config.model_copy(update={"tasks": {name: {} for name in parts.tasks}, "model": model})


def _train(parts: Parts, journal: SqliteQueue, folder: Path, stream: TextIO | None) -> RunResult:
    """Train a run to its end: a new run from the initial state, a resumed run from where its journal ends.

    A resumed run loads the newest checkpoint, then trains the journaled batches after that checkpoint again.
    """
    timeline = Timeline(folder / "logs" / "timeline.jsonl")
    with (
        cleaned_weights(parts.config, folder),
        open_context(parts.config, folder, journal, timeline, stream) as context,
    ):
        control, note = context.control, context.view.note
        last = control.state.trained_version
        state, restored = start_state(parts, folder, last, note)
        driver = LocalRun(parts, state, context, restored)
        for reissued in train_again(parts, driver.trainer, journal, last, note):
            journal.append([Entry(reissued, control.handle(reissued))])
        note(f"{folder}: {parts.config.run.steps} steps, {parts.devices.placement} placement")
        driver.run()
    return write_result(folder, parts)
