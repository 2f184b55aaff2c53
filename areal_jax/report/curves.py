"""Draws curves: figures by task, failed rewards, completion lengths, evaluations, and an ablation's arms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from areal_jax.report.figures import MetricsRows, column, last_tenth, median, plot_lines, smooth
from areal_jax.report.svg import INK, LINE, SERIES, Figure, draw_svg, legend_above

BY_TASK = {
    "reward_mean": "Reward by task",
    "signal_share": "Share of groups with a signal, by task",
    "completion_tokens_mean": "Completion length by task, tokens",
    "truncated_share": "Share cut off by length, by task",
}
"""Field of a metrics row -> title of its figure; rows contain the field once per task, as `<field>/<task>`.
"""


OF_UPDATES = {
    "loss": "Loss",
    "entropy": "Entropy, nats per token",
    "grad_norm": "Norm of the gradient before clipping",
    "clip_share": "Share of tokens with a clipped ratio",
    "router_load_max": "Tokens of the busiest expert over the mean",
    "router_entropy": "Entropy of the router, nats per token",
}
"""Field of a metrics row -> title of its figure."""


def task_names(rows: MetricsRows) -> list[str]:
    """Returns the sorted names of the run's tasks; empty if the run has only one task.

    The names are read from the fields `reward_mean/<task>`, which the rows of a run with several tasks have.
    """
    names = {name.partition("/")[2] for row in rows for name in row if name.startswith("reward_mean/")}
    return sorted(names)


def task_curve(rows: MetricsRows, field: str, title: str) -> Figure | None:
    """Draws the fields `<field>/<task>` of the metrics rows over the training steps, one line per task.

    `title`: the text above the figure. Returns None if the run has only one task.
    """
    columns = {task: column(rows, f"{field}/{task}") for task in task_names(rows)}
    if not columns:
        return None

    def draw(figure: Any) -> None:
        axes = plot_lines(figure, rows, {task: smooth(values) for task, values in columns.items()})
        if field == "truncated_share":
            axes.set_ylim(0, _share_top(*columns.values()))
        elif field != "reward_mean":
            axes.set_ylim(bottom=0)

    last = ", ".join(f"{task} {last_tenth(values):.2f}" for task, values in columns.items())
    alt = f"{title}; over the last tenth: {last}."
    return Figure(title, draw_svg(f"task-{field}", draw, (5.2, 2.9), alt), alt)


def update_curve(rows: MetricsRows, field: str, title: str) -> Figure | None:
    """Draws the field of the metrics rows over the training steps, smoothed and as it is.

    `title`: the text above the figure. Returns None if no row has a finite value.
    """
    values = column(rows, field)
    if not np.isfinite(values).any():
        return None

    def draw(figure: Any) -> None:
        axes = plot_lines(figure, rows, {"each step": values, "smoothed": smooth(values)}, (LINE, SERIES[0]))
        if field != "loss":
            axes.set_ylim(bottom=0)

    alt = f"{title} by step: {last_tenth(values):.3g} in the last tenth; median {median(values):.3g}."
    return Figure(title, draw_svg(f"update-{field}", draw, (5.2, 2.9), alt), alt)


def parts_curve(rows: MetricsRows) -> Figure | None:
    """Draws over the steps the mean of each part of the rewards, with a mark at each step with a closed gate.

    Returns None if no reward has parts.
    """
    names = list(dict.fromkeys(name for row in rows for name in row.get("reward_parts") or ()))
    if not names:
        return None
    parts = [row.get("reward_parts") or {} for row in rows]
    columns = {name: column(parts, name) for name in names}
    closed = {row["step"] for row in rows if not all((row.get("gates") or {}).values())}

    def draw(figure: Any) -> None:
        axes = plot_lines(figure, rows, {name: smooth(values) for name, values in columns.items()})
        if closed:
            low, _ = axes.get_ylim()
            axes.plot(sorted(closed), [low] * len(closed), "|", color=INK, clip_on=False)

    last = ", ".join(f"{name} {last_tenth(values):.2f}" for name, values in columns.items())
    gated = ", ".join(dict.fromkeys(name for row in rows for name in row.get("gates") or ()))
    gate = f"; {gated} was withheld in {len(closed)} of {len(rows)} steps (marks)" if gated else ""
    alt = f"Means of the reward's parts as they were scored; over the last tenth: {last}{gate}."
    return Figure("Parts of the reward", draw_svg("parts", draw, (10.6, 3.2), alt), alt)


def failure_curve(rows: MetricsRows) -> Figure | None:
    """Draws over the steps the cumulative number of groups that could not be scored, one line per task.

    Returns None if every group was scored.
    """
    names = {f"failed_rewards/{task}": task for task in task_names(rows)} or {"failed_rewards": "all tasks"}
    counts = {label: np.nancumsum(column(rows, name)) for name, label in names.items()}
    if not any(count.any() for count in counts.values()):
        return None

    def draw(figure: Any) -> None:
        axes = plot_lines(figure, rows, counts)
        axes.set_ylim(bottom=0)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.set_ylabel("groups")

    in_all = ", ".join(f"{label} {count[-1]:.0f}" for label, count in counts.items())
    alt = f"Groups that could not be scored: {in_all}."
    return Figure("Failed rewards so far", draw_svg("failures", draw, (10.6, 2.2), alt), alt)


def _share_top(*columns: np.ndarray) -> float:
    """Returns the upper end of a y axis for these fractions: 1.2 times the largest, clipped to 0.1..1.05."""
    return min(1.05, max(0.1, 1.2 * max(np.nanmax(values, initial=0.0) for values in columns)))


def length_curve(rows: MetricsRows) -> Figure | None:
    """Draws over the steps the mean and 99th percentile of completion lengths, and the fraction cut off.

    A completion is cut off if it reaches its length limit. Returns None if there are no rows.
    """
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
        f"Completion length by step: mean {last_tenth(mean):.0f} and 99th percentile {last_tenth(p99):.0f} "
        f"tokens in the last tenth, where {last_tenth(cut):.0%} were cut off; median {median(cut):.0%}."
    )
    return Figure("Length and truncation over time", draw_svg("length-curve", draw, (5.2, 2.9), alt), alt)


def bubble_curve(rows: MetricsRows) -> Figure | None:
    """Draws over the steps the bubble of completion lengths, and how often the median fits into the longest.

    The bubble is (longest - mean) / longest. Returns None if no row has it.
    """
    bubble = column(rows, "completion_bubble_share")
    if not np.isfinite(bubble).any():
        return None
    longest, p50 = column(rows, "completion_tokens_max"), column(rows, "completion_tokens_p50")
    ratio = longest / np.where(p50 > 0, p50, np.nan)

    def draw(figure: Any) -> None:
        top, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
        step = column(rows, "step")
        top.plot(step, bubble, color=SERIES[0], alpha=0.35, linewidth=0.8)
        top.plot(step, smooth(bubble), color=SERIES[0])
        top.set_ylim(0, 1.05)
        top.set_title("(longest − mean) / longest, and its running mean")
        below.plot(step, smooth(ratio), color=SERIES[1])
        below.set_ylim(0, 1.1 * max(1.0, np.nanmax(ratio, initial=0.0)))
        below.set_title("longest / median")
        below.set_xlabel("step")

    alt = (
        f"Length bubble of the batches: mean {last_tenth(bubble):.1%} in the last tenth, where the longest "
        f"completion has {last_tenth(ratio):.1f} times the tokens of the median one."
    )
    return Figure("Length bubble", draw_svg("bubble", draw, (5.2, 2.9), alt), alt)


def eval_curve(evals: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Draws greedy accuracy and pass@1 by policy version with 95 % intervals, in one colour per task.

    `evals`: the objects of evals.jsonl, oldest first. If a version was evaluated several times on the same
    prompts, the newest evaluation is drawn. Returns None if no evaluation has a scored prompt.
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
"""Policy version -> (value, low end, high end of its 95 % interval)."""


def _eval_series(evals: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], Points]:
    """Returns the points of each curve: (task label, `greedy` or `pass@1`) -> version -> (value, low, high).

    `low`, `high`: the ends of the 95 % interval. The label contains the task's name, number of prompts and
    split. `evals`: the objects of evals.jsonl.
    """
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


# --- an ablation --------------------------------------------------------------------------------------------


def arm_curves(runs: Sequence[Mapping[str, Any]], key: str) -> Figure:
    """Draws the `curves` of an ablation's runs by step: one row of axes per curve, one column per value.

    `runs`: what `ablate` returns as `runs`, at least one; `key`: the config key that differs between columns.
    A line is the mean over an arm's seeds, smoothed.
    """
    names = list(runs[0]["curves"])
    by_arm: dict[tuple[Any, str], list[Mapping[str, Sequence[float]]]] = {}
    for run in runs:
        by_arm.setdefault((run["value"], run["arm"]), []).append(run["curves"])
    values, arms = (list(dict.fromkeys(each)) for each in zip(*by_arm, strict=True))

    def draw(figure: Any) -> None:
        grid = figure.subplots(len(names), len(values), sharex=True, sharey="row", squeeze=False)
        for (value, arm), curves in by_arm.items():
            colour, place = SERIES[arms.index(arm) % len(SERIES)], values.index(value)
            for axes, name in zip(grid[:, place], names, strict=True):
                mean = np.mean([np.array(each[name], float) for each in curves], axis=0)
                axes.plot(np.arange(1, len(mean) + 1), smooth(mean), color=colour, label=arm)
        for axes, name in zip(grid[:, 0], names, strict=True):
            axes.set_ylabel(name.replace("/", ": ").replace("_", " "))
        for axes, value in zip(grid[0], values, strict=True):
            axes.set_title(f"{key}={value}")
        for axes in grid[-1]:
            axes.set_xlabel("step")
        lines = grid[0, 0].get_legend_handles_labels()
        figure.legend(*lines, loc="outside upper left", ncols=len(arms))

    alt = f"Means over seeds, by step, of {', '.join(names)}: one line for each of {', '.join(arms)}."
    size = (max(5.2, 3.5 * len(values)), 0.6 + 1.9 * len(names))
    return Figure("Arms", draw_svg("arms", draw, size, alt), alt)
