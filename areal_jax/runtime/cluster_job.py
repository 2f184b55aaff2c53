"""The controller's process: a run's folder and journal from its first second, or from where it ended."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TextIO

from areal_jax.config import Config, to_yaml
from areal_jax.control.events import BatchTrained
from areal_jax.control.machine import ControlPlane
from areal_jax.observe.metrics import read_rows, rewrite
from areal_jax.observe.waits import process_timeline
from areal_jax.runtime.assembly import open_inputs
from areal_jax.runtime.cluster import Controller
from areal_jax.runtime.devices import header
from areal_jax.runtime.jobs import JOURNAL, RunResult, metrics_of, view_of
from areal_jax.runtime.meeting import connect, make_journal, open_journal
from areal_jax.runtime.reading import write_report


def control(config: Config, folder: Path, stream: TextIO | None = None) -> RunResult:
    """Drive the run in `folder` to its end; begun where Redis has no journal of it, else gone on with.

    Raises ArealError, and what ended the run.
    """
    c = config
    inputs = open_inputs(c)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    if not (folder / "config.yaml").exists():
        (folder / "config.yaml").write_text(to_yaml(c))
    is_begun = (folder / JOURNAL).exists()
    journal = open_journal(c, folder) if is_begun else make_journal(c, folder, header(c))
    with journal:
        found = journal.latest_snapshot()
        seq, snapshot = found if found else (0, None)
        plane = ControlPlane.fold(c, (row.event for row in journal.rows(seq)), snapshot)
        batches = [row.event for row in journal.rows() if isinstance(row.event, BatchTrained)]
        rows = [batch.metrics for batch in batches]
        rewrite(folder, rows)
        trained = [(batch.step + 1, batch.ordinals) for batch in batches]
        start_s = rows[-1]["wall_s"] if rows else 0.0
        timeline = process_timeline(folder, "controller")
        with (
            view_of(c, stream or sys.stdout, rows) as view,
            metrics_of(c, folder) as metrics,
            connect(c) as broker,
        ):
            view.note(f"{folder}: {c.run.steps} steps, by processes that meet at {c.runtime.redis}")
            Controller(
                inputs, plane, journal, broker, folder, view, metrics, timeline, start_s, trained
            ).run()
            broker.remove()
    tasks = [weighted.task for weighted in inputs.tasks.values()]
    report = write_report(folder, c, tasks) if c.observe.report else None
    return RunResult(folder, read_rows(folder), report)
