"""The report's curves over a run: by task, lengths and truncation, evaluations by version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from areal_jax.observe.figures import Rows, column, median, smooth
from areal_jax.observe.svg import SERIES, Figure, draw_svg, legend_above

BY_TASK = {
    "reward_mean": "Reward by task",
    "signal_share": "Share of groups with a signal, by task",
    "completion_tokens_mean": "Completion length by task, tokens",
    "truncated_share": "Share cut off by length, by task",
}
"""Field of a row, `<field>/<task>` there -> the title of its figure."""


def task_names(rows: Rows) -> list[str]:
    """Tasks that the rows tell apart, by name."""
    names = {name.partition("/")[2] for row in rows for name in row if name.startswith("reward_mean/")}
    return sorted(names)


def task_curve(rows: Rows, field: str, title: str) -> Figure | None:
    """A line a task; None for a run of one task."""
    columns = {task: column(rows, f"{field}/{task}") for task in task_names(rows)}
    if not columns:
        return None
    step = column(rows, "step")

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        _lines(axes, step, {task: smooth(values) for task, values in columns.items()})
        if field == "truncated_share":
            axes.set_ylim(0, _share_top(*columns.values()))
        elif field != "reward_mean":
            axes.set_ylim(bottom=0)
        axes.set_xlabel("step")

    last = ", ".join(f"{task} {_last(values):.2f}" for task, values in columns.items())
    alt = f"{title}; over the last tenth: {last}."
    return Figure(title, draw_svg(f"task-{field}", draw, (5.2, 2.9), alt), alt)


def failure_curve(rows: Rows) -> Figure | None:
    """Groups that could not be scored, counted up over the run; a line a task where there are several."""
    names = {f"failed_rewards/{task}": task for task in task_names(rows)} or {"failed_rewards": "all tasks"}
    counts = {label: np.nancumsum(column(rows, name)) for name, label in names.items()}
    if not any(count.any() for count in counts.values()):
        return None

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        _lines(axes, column(rows, "step"), counts)
        axes.set_ylim(bottom=0)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("step")
        axes.set_ylabel("groups")

    in_all = ", ".join(f"{label} {count[-1]:.0f}" for label, count in counts.items())
    alt = f"Groups that could not be scored: {in_all}."
    return Figure("Failed rewards so far", draw_svg("failures", draw, (10.6, 2.2), alt), alt)


def _lines(axes: Any, step: np.ndarray, columns: Mapping[str, np.ndarray]) -> None:
    for number, (label, values) in enumerate(columns.items()):
        axes.plot(step, values, color=SERIES[number % len(SERIES)], label=label)
    legend_above(axes, columns=min(len(columns), 3))


def _share_top(*columns: np.ndarray) -> float:
    """Upper end of an axis on which small shares can still be read."""
    return min(1.05, max(0.1, 1.2 * max(np.nanmax(values, initial=0.0) for values in columns)))


def length_curve(rows: Rows) -> Figure | None:
    """Lengths over time, and below them the share of answers that their limit cut off."""
    if not rows:
        return None
    step = column(rows, "step")
    mean, p99 = column(rows, "completion_tokens_mean"), column(rows, "completion_tokens_p99")
    cut = column(rows, "truncated_share")

    def draw(figure: Any) -> None:
        top, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
        top.plot(step, smooth(p99), color=SERIES[1], label="99 %")
        top.plot(step, smooth(mean), color=SERIES[0], label="mean")
        top.set_ylim(bottom=0)
        top.set_ylabel("tokens")
        legend_above(top)
        below.plot(step, smooth(cut), color=SERIES[5])
        below.set_ylim(0, _share_top(cut))
        below.set_ylabel("cut off")
        below.set_xlabel("step")

    alt = (
        f"Completion length by step: mean {_last(mean):.0f} and 99th percentile {_last(p99):.0f} tokens in "
        f"the last tenth, where {_last(cut):.0%} were cut off; median {median(cut):.0%}."
    )
    return Figure("Length and truncation over time", draw_svg("length-curve", draw, (5.2, 2.9), alt), alt)


def eval_curve(evals: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Greedy accuracy and pass@1 by version with 95 % intervals, a colour a task.

    Of several evaluations of a version on the same prompts the newest counts.
    """
    series = _eval_series(evals)
    if not series:
        return None
    tasks = list(dict.fromkeys(task for task, _ in series))

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        evaluated = sorted({version for points in series.values() for version in points})
        dodge = max(evaluated[-1] - evaluated[0], 1) / 250  # so that intervals stand beside each other
        for number, ((task, measure), points) in enumerate(series.items()):
            versions, values, lows, highs = np.array([(v, *points[v]) for v in sorted(points)]).T
            axes.errorbar(
                versions + (number - (len(series) - 1) / 2) * dodge,
                values,
                yerr=[values - lows, highs - values],
                color=SERIES[tasks.index(task) % len(SERIES)],
                linestyle="-" if measure == "greedy" else "--",
                marker="o" if measure == "greedy" else "s",
                markersize=4,
                capsize=2,
                elinewidth=0.8,
                label=f"{task}, {measure}",
            )
        axes.set_ylim(-0.02, 1.05)
        axes.set_xticks(evaluated if len(evaluated) <= 16 else evaluated[:: len(evaluated) // 8])
        axes.margins(x=0.06)
        axes.set_xlabel("version")
        legend_above(axes, columns=min(len(series), 4))

    newest = ", ".join(
        f"{task} {measure} {points[max(points)][0]:.3f} at version {max(points)}"
        for (task, measure), points in series.items()
    )
    alt = f"Evaluations, with 95 % intervals: {newest}."
    return Figure("Evaluations by version", draw_svg("evals", draw, (10.6, 3.4), alt), alt)


Points = dict[int, tuple[float, float, float]]
"""version -> (value, low, high)"""


def _eval_series(evals: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], Points]:
    """(task and prompts, greedy | pass@1) -> its points."""
    series: dict[tuple[str, str], Points] = {}
    for line in evals:
        for name, task in line["tasks"].items():
            split = f", {task['split']}" if task["split"] else ""
            label = f"{name} ({task['prompts']}{split})"
            measured = {"greedy": task["greedy"]["accuracy"]}
            if "sampled" in task:
                measured["pass@1"] = task["sampled"]["pass@1"]
            for measure, found in measured.items():
                if found["value"] is not None:
                    points = series.setdefault((label, measure), {})
                    points[line["version"]] = (found["value"], found["low"], found["high"])
    return series


def _last(values: np.ndarray) -> float:
    """Mean of the last tenth's finite values."""
    tail = values[-max(len(values) // 10, 1) :]
    finite = tail[np.isfinite(tail)]
    return float(finite.mean()) if finite.size else float("nan")
