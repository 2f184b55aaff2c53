"""The controller role: the process that starts the run in a folder, or resumes it."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from areal_jax.assembly.devices import header
from areal_jax.assembly.parts import open_inputs
from areal_jax.assembly.run_folder import CONFIG_DIGEST, JOURNAL, config_digest
from areal_jax.cluster.controller import Controller
from areal_jax.cluster.meeting import connect
from areal_jax.cluster.owner import RunOwner
from areal_jax.config.tree import Config
from areal_jax.observe.waits import process_timeline
from areal_jax.report.run_result import RunResult, write_result
from areal_jax.runtime.context import make_folder, open_context
from areal_jax.trajectories.sqlite import SqliteQueue


def control(config: Config, folder: Path, stream: TextIO | None = None) -> RunResult:
    """Drives the run in `folder` to its end; resumes it if the folder has a journal, else starts it.

    `stream`: where the run's progress is printed; None = stdout. Raises ArealError if another controller owns
    the run, or if Redis is too old or deletes keys when its memory is full; otherwise raises the error that
    ended the run.
    """
    inputs = open_inputs(config)
    make_folder(config, folder)
    timeline = process_timeline(folder, "controller")
    with connect(config) as broker:
        broker.link.require_supported()
        owner = RunOwner(broker)
        owner.claim()  # before the journal is opened: raises while another controller is alive and writes it
        with _journal(config, folder, owner.token) as journal:
            with open_context(config, folder, journal, timeline, stream) as context:
                steps, redis = config.run.steps, broker.link.shown
                context.view.note(f"the run in {folder} has {steps} steps; all processes connect to {redis}")
                Controller(inputs, context, broker, owner).run()
            broker.remove()
    return write_result(folder, inputs)


def _journal(config: Config, folder: Path, token: str) -> SqliteQueue:
    if (folder / JOURNAL).exists():
        return SqliteQueue.open(folder / JOURNAL, owner=token)
    own = header(config) | {CONFIG_DIGEST: config_digest(folder)}
    return SqliteQueue.create(folder / JOURNAL, own, owner=token)
