"""Starts and resumes runs in one process, and describes a run without starting it.

Here the core (`areal_jax.runtime`) meets what may stand beside it: evaluation, servers and the report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from areal_jax.assembly.devices import header, use_compilation_cache
from areal_jax.assembly.gpus import gpu_environment, use_gpu_environment
from areal_jax.assembly.memory_table import memory_table
from areal_jax.assembly.parts import Parts, assemble, with_measured_layout
from areal_jax.assembly.run_folder import CONFIG_DIGEST, JOURNAL, config_digest
from areal_jax.config.loading import resolved
from areal_jax.config.tree import Config
from areal_jax.evaluation.follower import Follower
from areal_jax.observe.waits import Timeline
from areal_jax.report.run_result import RunResult, write_result
from areal_jax.runtime.context import RunContext, make_folder, open_context
from areal_jax.runtime.one_process import LocalRun, Services
from areal_jax.runtime.recovery import start_state, train_again
from areal_jax.runtime.resuming import read_config, require_new
from areal_jax.serving.run_services import make_endpoint, make_gateway
from areal_jax.tasks.source import BUILTIN
from areal_jax.tasks.task import Task
from areal_jax.trajectories.sqlite import Entry, SqliteQueue
from areal_jax.types import ArealError
from areal_jax.weights.folder import cleaned_weights


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
        driver = LocalRun(parts, state, context, _services(parts, context), restored)
        for reissued in train_again(parts, driver.trainer, journal, last, note):
            journal.append([Entry(reissued, control.handle(reissued))])
        note(f"{folder}: {parts.config.run.steps} steps, {parts.devices.placement} placement")
        driver.run()
    return write_result(folder, parts)


def _services(parts: Parts, context: RunContext) -> Services:
    observed = parts.config.observe

    def make_follower(note: Callable[[str], None], fail: Callable[[BaseException], None]) -> Follower | None:
        if not (observed.evaluate or observed.exports):
            return None
        own = (parts, context.folder, parts.devices.evaluation, note, fail)
        return Follower(*own, make_gateway=make_gateway)

    return Services(make_endpoint, make_gateway, make_follower)
