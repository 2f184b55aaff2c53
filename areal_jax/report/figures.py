"""Draws the report's curves and histograms. Each drawing function returns a Figure, or None without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from areal_jax.report.svg import INK, SERIES, Figure, draw_svg, legend_above

MetricsRows = Sequence[Mapping[str, Any]]


def reward_curve(rows: MetricsRows) -> Figure | None:
    if not rows:
        return None
    step, reward = column(rows, "step"), column(rows, "reward_mean")

    def draw(figure: Any) -> None:
        top, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
        spread = column(rows, "reward_std")
        top.fill_between(step, reward - spread, reward + spread, color=SERIES[0], alpha=0.12, linewidth=0)
        top.plot(step, reward, color=SERIES[0], alpha=0.35, linewidth=0.8)
        top.plot(step, smooth(reward), color=SERIES[0])
        top.set_title("mean reward, its running mean, ± standard deviation")
        below.plot(step, smooth(column(rows, "signal_share")), color=SERIES[1])
        below.set_ylim(0, 1.05)
        below.set_title("share of groups with a signal (rewards that differ)")
        below.set_xlabel("step")

    first, last = _mean(reward[: max(len(reward) // 10, 1)]), last_tenth(reward)
    alt = f"Mean reward over {len(rows)} steps: {first:.2f} in the first tenth, {last:.2f} in the last."
    return Figure("Reward", draw_svg("reward", draw, (10.6, 4.2), alt), alt)


def ages(token_ages: Mapping[int, int], head_ages: Mapping[int, int]) -> Figure | None:
    """Draws the fractions of trained tokens by age, and of trained samples by their first token's age.

    An age is the version at the start of the update that trained a token, minus the token's version.
    `token_ages`: age -> number of tokens; `head_ages`: age -> number of samples. Returns None without tokens.
    """
    if not token_ages:
        return None
    span = range(max([*token_ages, *head_ages]) + 1)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for place, (counts, label) in enumerate(((token_ages, "tokens"), (head_ages, "first tokens"))):
            total = sum(counts.values()) or 1
            shares = [100 * counts.get(age, 0) / total for age in span]
            offset = (place - 0.5) * 0.38
            axes.bar([age + offset for age in span], shares, width=0.36, color=SERIES[place], label=label)
        axes.set_xlabel("age: trained version − version of the token")
        axes.set_ylabel("% of all")
        axes.set_xticks(list(span) if len(span) <= 16 else list(span)[:: len(span) // 8])
        axes.grid(axis="x", visible=False)
        legend_above(axes)

    total = sum(token_ages.values())
    mean = sum(age * count for age, count in token_ages.items()) / total
    alt = f"Age of {total:,} trained tokens: mean {mean:.2f} versions, at most {max(token_ages)} versions."
    return Figure("Token age", draw_svg("ages", draw, (5.2, 2.9), alt), alt)


def lengths(of_samples: Sequence[int]) -> Figure | None:
    values = np.asarray(of_samples)
    if not len(values):
        return None
    p50, p99 = (float(np.percentile(values, q)) for q in (50, 99))

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        top = int(values.max())
        edges = np.arange(0.5, top + 1.5) if top <= 60 else np.linspace(0.5, top + 0.5, 49)
        counts, _ = np.histogram(values, edges)  # matplotlib would make an object of each value
        axes.hist(edges[:-1], bins=edges, weights=counts, color=SERIES[0], rwidth=0.9)
        for value, label, side in ((p50, "median", "right"), (p99, "99 %", "left")):  # they may be neighbours
            axes.axvline(value, color=INK, linewidth=0.9, linestyle=(0, (3, 2)))
            axes.text(value, 1.01, f"{label} {value:.0f}", ha=side, transform=axes.get_xaxis_transform())
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("completion length, tokens")
        axes.set_ylabel("samples")
        axes.grid(axis="x", visible=False)

    alt = f"Length of {len(values):,} completions: median {p50:.0f} tokens, 99th percentile {p99:.0f}."
    return Figure("Completion length", draw_svg("lengths", draw, (5.2, 2.9), alt), alt)


def throughput(rows: MetricsRows) -> Figure | None:
    if not rows:
        return None
    generated, trained = (column(rows, f"{side}_tokens_per_s") for side in ("generate", "train"))

    def draw(figure: Any) -> None:
        axes = plot_lines(figure, rows, {"generated": smooth(generated), "trained": smooth(trained)})
        axes.set_ylim(bottom=0)
        axes.set_ylabel("tokens per second")

    alt = f"Tokens per second, median: {median(generated):,.0f} generated, {median(trained):,.0f} trained."
    return Figure("Throughput", draw_svg("throughput", draw, (5.2, 2.9), alt), alt)


def logp_gap(rows: MetricsRows) -> Figure | None:
    """Draws over the steps how much the log-probs at sampling differ from the trainer's, in nats.

    The lines are the mean, 99.9th percentile and maximum of the absolute difference, and the KL divergence.
    Returns None if there are no rows.
    """
    if not rows:
        return None
    names = ("logp_gap_max", "logp_gap_p999", "logp_gap_mean", "mismatch_kl")
    top, tail, mean, kl = (np.abs(column(rows, name)) for name in names)

    def draw(figure: Any) -> None:
        lines = {"largest": top, "99.9th percentile": tail, "mean": mean, "KL": kl}
        positive = {label: np.where(values > 0, values, np.nan) for label, values in lines.items()}
        colours = (SERIES[1], SERIES[2], SERIES[0], SERIES[3])
        axes = plot_lines(figure, rows, positive, colours, most_columns=2)
        if np.nanmax(top, initial=0.0) > 0:
            axes.set_yscale("log")
        axes.set_ylabel("|difference|, nats")

    alt = (
        "Log-probs at sampling against those of the trainer: "
        f"mean difference {median(mean):.2g}, 99.9th percentile {median(tail):.2g}, "
        f"largest {np.nanmax(top, initial=0.0):.2g}, KL {median(kl):.2g} nats."
    )
    return Figure("Log-prob gap", draw_svg("gap", draw, (5.2, 2.9), alt), alt)


def effective_sizes(rows: MetricsRows) -> Figure | None:
    """Draws over the steps the effective sample sizes of tokens and sequences, as shares of their numbers.

    Returns None if no row has them, as in runs of older versions.
    """
    names = {"tokens": "effective_token_share", "sequences": "effective_sequence_share"}
    columns = {label: column(rows, name) for label, name in names.items()}
    if not any(np.isfinite(values).any() for values in columns.values()):
        return None

    def draw(figure: Any) -> None:
        axes = plot_lines(figure, rows, {label: smooth(values) for label, values in columns.items()})
        axes.set_ylim(0, 1.05)
        axes.set_ylabel("share of all")

    last = ", ".join(f"{last_tenth(values):.0%} of the {label}" for label, values in columns.items())
    alt = f"Effective sample size by the importance weights, over the last tenth of the steps: {last}."
    return Figure("Effective sample size", draw_svg("effective-size", draw, (5.2, 2.9), alt), alt)


def column(rows: MetricsRows, name: str) -> np.ndarray:
    """Returns the field `name` of every row; nan where its value is null or the row lacks it."""
    values = [row.get(name) for row in rows]
    return np.array([np.nan if value is None else float(value) for value in values])


def smooth(values: np.ndarray) -> np.ndarray:
    """Returns the running mean of `values`, which has one value per step.

    A mean is over max(len(values) // 20, 1) steps, the last of which is the step itself. Values that are not
    finite are left out; a mean without a finite value is nan.
    """
    width = max(len(values) // 20, 1)
    kernel = np.ones(width)
    finite = np.isfinite(values)
    weight = np.convolve(finite, kernel)[: len(values)]
    total = np.convolve(np.where(finite, values, 0.0), kernel)[: len(values)]
    return np.where(weight > 0, total / np.maximum(weight, 1), np.nan)


def plot_lines(
    figure: Any,
    rows: MetricsRows,
    columns: Mapping[str, np.ndarray],
    colours: Sequence[str] = SERIES,
    most_columns: int = 3,
) -> Any:
    """Draw a line over the steps of `rows` for each entry of `columns` (label -> values); return the axes.

    Line i has colour i of `colours`; with more lines than colours, colours repeat. `most_columns`: maximum
    number of columns of the legend.
    """
    axes = figure.subplots()
    for number, (label, values) in enumerate(columns.items()):
        axes.plot(column(rows, "step"), values, color=colours[number % len(colours)], label=label)
    axes.set_xlabel("step")
    legend_above(axes, columns=min(len(columns), most_columns))
    return axes


def last_tenth(values: np.ndarray) -> float:
    """Returns the mean of the finite values in the last tenth of `values`; nan if none of them is finite."""
    return _mean(values[-max(len(values) // 10, 1) :])


def _mean(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else float("nan")


def median(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else float("nan")
