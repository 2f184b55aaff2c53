"""Figures of a run for ablations: functions of its metrics rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from areal_jax.lab.ablations.ablation import Row

LATE = 4
"""Final figures are means over the last 1 / LATE (a quarter) of the steps."""

WARM_UP = 5
"""Rates and speeds leave out the first 1 / WARM_UP (a fifth) of the steps, which compile programs."""


def mean_of(figure: str) -> Callable[[Sequence[Row]], float]:
    return lambda rows: fmean(row[figure] for row in rows)


def last_mean(figure: str) -> Callable[[Sequence[Row]], float]:
    """Return a function of a run's metrics rows: the mean of `figure` over the last quarter (1 / LATE)."""
    return lambda rows: mean_of(figure)(rows[-max(1, len(rows) // LATE) :])


def warm_mean(figure: str) -> Callable[[Sequence[Row]], float]:
    """Return a function of a run's metrics rows: the mean of `figure`, without the first fifth."""
    return lambda rows: mean_of(figure)(rows[len(rows) // WARM_UP :])


def per_s(figure: str) -> Callable[[Sequence[Row]], float]:
    """Return a function of a run's metrics rows: the sum of the field `figure` per second of wall time.

    The first fifth (1 / WARM_UP) of the rows, but at least one row, is left out.
    """

    def rate(rows: Sequence[Row]) -> float:
        first = max(1, len(rows) // WARM_UP)
        counted = sum(row[figure] for row in rows[first:])
        return counted / (rows[-1]["wall_s"] - rows[first - 1]["wall_s"])

    return rate


def warm_step_s(rows: Sequence[Row]) -> float:
    """Return the mean seconds of a training step, without the first fifth (1 / WARM_UP) of the steps."""
    first = max(1, len(rows) // WARM_UP)
    return (rows[-1]["wall_s"] - rows[first - 1]["wall_s"]) / (len(rows) - first)
