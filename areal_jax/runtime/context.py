"""Opens a run's files and state before it starts.

These functions serve new and resumed runs, in one process and on a cluster.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from areal_jax.assembly.devices import header
from areal_jax.assembly.run_folder import make_folders
from areal_jax.config.loading import resolved, to_yaml
from areal_jax.config.tree import Config
from areal_jax.control.machine import ControlPlane
from areal_jax.file_errors import writing
from areal_jax.observe.busy_watch import BusyWatch
from areal_jax.observe.live import View, make_view
from areal_jax.observe.metrics import MetricsWriter, rewrite, rows_so_far
from areal_jax.observe.waits import Timeline
from areal_jax.trajectories.journal import Row
from areal_jax.trajectories.sqlite import SqliteQueue
from areal_jax.types import PolicyVersion


@dataclass(frozen=True)
class RunContext:
    """One open run: its config, files and state.

    `view` shows progress to the user, and `timeline` records when each component works or waits.
    """

    config: Config
    folder: Path
    journal: SqliteQueue
    control: ControlPlane
    """The control plane, rebuilt from the journal's events; its version is -1 for a new run."""
    view: View
    metrics: MetricsWriter
    timeline: Timeline
    trained: Sequence[tuple[PolicyVersion, tuple[int, ...]]]
    """(version, ordinals) of each batch that was trained before this process started, in order; without those
    of which no trajectory is stored."""
    wall_s: float
    """Seconds that the run took before this process started, up to its newest batch."""
    uncounted: Sequence[Row]
    """The journal's rows after the newest batch: the next row of metrics counts their events, too."""
    watch: BusyWatch
    """Names what the thread of the control plane is stuck in, such as a task's code."""


def make_folder(config: Config, folder: Path) -> None:
    """Create the run's folder with logs/ and config.yaml; an existing config.yaml is kept."""
    make_folders(folder, "logs")
    if not (path := folder / "config.yaml").exists():
        with writing(path):
            path.write_text(to_yaml(config))


@contextmanager
def open_context(
    config: Config, folder: Path, journal: SqliteQueue, timeline: Timeline, stream: TextIO | None = None
) -> Iterator[RunContext]:
    """Context manager: rebuild the control plane from the journal; open the view and the metrics writer.

    Before that, metrics.jsonl is rewritten from the journal. The view writes progress to `stream`; None:
    stdout. If a resumed run has another device, number of cores, jaxlib or XLA flags than the journal's
    header, the view shows each difference; if all steps of the run are trained, the view says so.
    """
    seq, snapshot = journal.latest_snapshot() or (0, None)
    control = ControlPlane.fold(config, (row.event for row in journal.rows(seq)), snapshot)
    uncounted: list[Row] = list(journal.rows(journal.last("BatchTrained")))
    trained: list[tuple[PolicyVersion, tuple[int, ...]]] = []
    wall_s = rewrite(folder, _metrics(journal, trained))
    view = make_view(stream or sys.stdout, config.observe.live, config.run.steps, rows_so_far(folder))
    wandb = None
    if config.observe.wandb:
        wandb = {"project": "areal-jax", "name": config.run.name, "config": resolved(config)}
    with (
        closing(view),
        closing(MetricsWriter(folder, config.observe.tensorboard, wandb)) as metrics,
        closing(BusyWatch("the control plane", view.note)) as watch,
    ):
        if control.state.version >= 0:
            for key, value in header(config).items():
                if (then := journal.header.get(key)) != value:
                    view.note(
                        f"this machine differs from the one on which the run started: {key} was {then!r}, "
                        f"now {value!r}; the run continues, but steps that are trained again may give "
                        "different parameters"
                    )
            if control.state.trained_version >= config.run.steps:
                view.note(
                    f"all {config.run.steps} steps of this run (run.steps) are trained already; "
                    "to train more, resume the run with a larger run.steps"
                )
        yield RunContext(
            config, folder, journal, control, view, metrics, timeline, trained, wall_s, uncounted, watch
        )


def _metrics(
    journal: SqliteQueue, trained: list[tuple[PolicyVersion, tuple[int, ...]]]
) -> Iterator[Mapping[str, Any]]:
    """Yields the metrics row of each batch; adds those with stored trajectories to `trained`."""
    stored = {sample.ordinal for sample in journal.stored_samples()}
    for batch in journal.events("BatchTrained"):
        if not stored.isdisjoint(batch.ordinals):
            trained.append((batch.step + 1, batch.ordinals))
        yield batch.metrics
