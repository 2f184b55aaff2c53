"""Returns the result of a run at its end, and writes its report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_jax.assembly.parts import Inputs
from areal_jax.observe.metrics import read_rows
from areal_jax.report.reading import read_selection, write_report


@dataclass(frozen=True)
class RunResult:
    folder: Path
    metrics: list[dict[str, Any]]
    """One row for each training step, as in metrics.jsonl."""
    report: Path | None
    warnings: tuple[str, ...] = ()
    """What to look at: by how much the trained groups differ from the generated ones, and why."""


def write_result(folder: Path, inputs: Inputs) -> RunResult:
    """Write the report of the run in `folder` if observe.report is set; return the run's result.

    `inputs`: the run's config and tasks.
    """
    report = write_report(folder, inputs.config, inputs.tasks) if inputs.config.observe.report else None
    selection = read_selection(folder)
    return RunResult(folder, read_rows(folder), report, () if selection is None else selection.alarms)
