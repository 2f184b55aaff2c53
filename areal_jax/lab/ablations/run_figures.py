"""Figures of a run for ablations, from its metrics rows."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

from areal_jax.lab.ablations.ablation import RunRecord

LATE = 4
"""Final figures are means over the last 1 / LATE (a quarter) of the steps."""

WARM_UP = 5
"""Rates and speeds leave out the first 1 / WARM_UP (a fifth) of the steps, which compile programs."""


def mean_of(figure: str) -> Callable[[RunRecord], float]:
    return lambda run: fmean(row[figure] for row in run.rows)


def last_mean(figure: str) -> Callable[[RunRecord], float]:
    """Return a function of a run: the mean of the field `figure` over the last quarter of its rows."""
    return lambda run: fmean(row[figure] for row in run.rows[-max(1, len(run.rows) // LATE) :])


def warm_mean(figure: str) -> Callable[[RunRecord], float]:
    """Return a function of a run: the mean of the field `figure` over its rows, without the first fifth."""
    return lambda run: fmean(row[figure] for row in run.rows[len(run.rows) // WARM_UP :])


def per_s(figure: str) -> Callable[[RunRecord], float]:
    """Return a function of a run: the sum of the field `figure` over its rows per second of wall time.

    The first fifth (1 / WARM_UP) of the rows, but at least one row, is left out.
    """

    def rate(run: RunRecord) -> float:
        rows = run.rows
        first = max(1, len(rows) // WARM_UP)
        counted = sum(row[figure] for row in rows[first:])
        return counted / (rows[-1]["wall_s"] - rows[first - 1]["wall_s"])

    return rate


def warm_step_s(run: RunRecord) -> float:
    """Return the mean seconds of a training step, without the first fifth (1 / WARM_UP) of the steps."""
    rows = run.rows
    first = max(1, len(rows) // WARM_UP)
    return (rows[-1]["wall_s"] - rows[first - 1]["wall_s"]) / (len(rows) - first)
