"""Renders an ablation's result as one HTML page: tables; figures of speed, idle time, ages and rewards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from areal_jax.report.figures import smooth
from areal_jax.report.report import page_css
from areal_jax.report.svg import SERIES, Figure, draw_svg, figures_html, legend_above, page_html, table_html

Runs = Mapping[str, Sequence[Mapping[str, Any]]]
"""Label of a value and arm -> its runs, one for each seed."""

VERDICTS = {True: "met", False: "not met", None: "not in this table"}

AGES = 6
"""Largest age with a bar of its own; the bar after it is of all older tokens."""


def page(tables: Mapping[str, Sequence[Mapping[str, Any]]], result: Mapping[str, Any], command: str) -> str:
    """Returns the page. `tables`: title -> rows; `result`: what `ablate` returned; `command` repeats it."""
    runs = by_label(result["runs"])
    idle = [name for name in result["table"][0] if name.startswith(("trainer_waits", "hosts_wait"))]
    drawn = [speeds(runs), idle_time(runs, idle), age_shares(runs), reward_bands(runs)]
    title = f"Ablation {result['ablation']}"
    shown = {name: _table(_without_lone_arm(rows), result["key"]) for name, rows in tables.items()}
    claims = "".join(
        f"<tr><td>{escape(claim)}</td><td>{VERDICTS[holds]}</td></tr>"
        for claim, holds in result["claims"].items()
    )
    body = "\n".join(
        [
            f"<header><h1>{escape(title)}</h1></header>",
            *(f"<section><h2>{escape(name)}</h2>{table}</section>" for name, table in shown.items()),
            f"<section><h2>Figures</h2>{figures_html(drawn)}</section>",
            f"<section><h2>Expected</h2><table>{claims}</table></section>",
            f"<section><h2>Reproduce</h2><pre>{escape(command)}</pre></section>",
        ]
    )
    return page_html(title, page_css(), body)


def by_label(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Returns the runs by value, or by value and arm if there are several arms."""
    has_arms = len({run["arm"] for run in runs}) > 1
    found: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        label = f"{run['value']}, {run['arm']}" if has_arms else str(run["value"])
        found.setdefault(label, []).append(run)
    return found


def _without_lone_arm(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows without their arm, if all have the same one."""
    hidden = {"arm"} if len({row.get("arm") for row in rows}) == 1 else set()
    return [{name: value for name, value in row.items() if name not in hidden} for row in rows]


def _table(rows: Sequence[Mapping[str, Any]], key: str) -> str:
    """Returns the rows as an HTML table; the column `value` has the name of the varied `key`."""
    if not rows:
        return ""
    names = [key if name == "value" else _words(str(name)) for name in rows[0]]
    return table_html(names, (map(_text, row.values()) for row in rows))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(_text(each) for each in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# --- figures ------------------------------------------------------------------------------------------------


def speeds(runs: Runs, field: str = "trained_tokens_per_s") -> Figure | None:
    """Draws the trained tokens per second of each label: a bar of the mean, and a point for each seed."""
    numbers = {label: [run[field] for run in own] for label, own in runs.items() if field in own[0]}
    if not numbers:
        return None

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for place, each in enumerate(numbers.values()):
            axes.bar(place, np.mean(each), width=0.7, color=SERIES[0], alpha=0.45)
            axes.plot([place] * len(each), each, "o", color=SERIES[0], markersize=4)
        _name(axes, numbers)
        axes.set_ylabel("trained tokens per second")

    alt = "; ".join(f"{label} {np.mean(each):,.0f}" for label, each in numbers.items())
    return Figure(
        "Speed",
        draw_svg("speeds", draw, (5.2, 2.9), alt),
        f"Trained tokens per second, mean over seeds: {alt}.",
    )


def idle_time(runs: Runs, names: Sequence[str]) -> Figure | None:
    """Draws the share of time of each cause of idleness, mean over seeds; the causes of a label stand beside
    one another. Returns None without `names`.
    """
    if not names:
        return None
    means = {name: [float(np.mean([run[name] for run in own])) for own in runs.values()] for name in names}

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        _bars(axes, {_words(name): [100 * share for share in each] for name, each in means.items()})
        _name(axes, runs)
        axes.set_ylabel("% of the time")
        legend_above(axes, columns=1)

    alt = "; ".join(
        f"{_words(name)}: "
        + ", ".join(f"{label} {share:.0%}" for label, share in zip(runs, each, strict=True))
        for name, each in means.items()
    )
    return Figure("Idle time by cause", draw_svg("idle", draw, (5.2, 3.4), alt), f"{alt}.")


def age_shares(runs: Runs) -> Figure | None:
    """Draws the share of trained tokens of each age in versions. Returns None if no run has ages."""
    counts = {label: _ages(own) for label, own in runs.items()}
    if not any(counts.values()):
        return None
    top = min(AGES, max(age for own in counts.values() for age in own))

    def draw(figure: Any) -> None:
        axes, shares = figure.subplots(), {}
        for label, own in counts.items():
            total = sum(own.values()) or 1
            shares[label] = [100 * own.get(age, 0) / total for age in range(top + 1)]
            shares[label][top] += 100 * sum(count for age, count in own.items() if age > top) / total
        _bars(axes, shares)
        axes.set_xticks(range(top + 1), [*map(str, range(top)), f"{top}+"])
        axes.set_xlabel("age: trained version − version of the token")
        axes.set_ylabel("% of the tokens")
        legend_above(axes, columns=3)

    means = {
        label: sum(age * count for age, count in own.items()) / max(1, sum(own.values()))
        for label, own in counts.items()
    }
    alt = "Mean age of the trained tokens: " + ", ".join(f"{label} {age:.2f}" for label, age in means.items())
    return Figure("Token age", draw_svg("ages", draw, (5.2, 2.9), alt), f"{alt} versions.")


def _ages(runs: Sequence[Mapping[str, Any]]) -> Counter[int]:
    found: Counter[int] = Counter()
    for run in runs:
        found.update({int(age): count for age, count in run.get("token_ages", {}).items()})
    return found


def reward_bands(runs: Runs, field: str = "reward_mean") -> Figure | None:
    """Draws the mean reward by step, with a band from the lowest to the highest seed.

    Returns None if the runs have no rewards.
    """
    curves = {
        label: np.array([smooth(np.array(run["curves"][field], float)) for run in own])
        for label, own in runs.items()
        if own[0]["curves"].get(field)
    }
    if not curves:
        return None

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for number, (label, each) in enumerate(curves.items()):
            steps, colour = np.arange(1, each.shape[1] + 1), SERIES[number % len(SERIES)]
            axes.fill_between(steps, each.min(0), each.max(0), color=colour, alpha=0.15, linewidth=0)
            axes.plot(steps, each.mean(0), color=colour, label=label)
        axes.set_xlabel("step")
        axes.set_ylabel("mean reward")
        legend_above(axes, columns=3)

    last = ", ".join(f"{label} {np.nanmean(each[:, -1]):.2f}" for label, each in curves.items())
    alt = f"Mean reward by step, with bands over seeds; at the last step: {last}."
    return Figure("Reward", draw_svg("rewards", draw, (5.2, 2.9), alt), alt)


def _bars(axes: Any, heights: Mapping[str, Sequence[float]]) -> None:
    """Draws a bar of each label beside those of the others, at each place."""
    width = 0.8 / len(heights)
    for number, (label, own) in enumerate(heights.items()):
        places = np.arange(len(own)) + (number - (len(heights) - 1) / 2) * width
        axes.bar(places, own, width, color=SERIES[number % len(SERIES)], label=label)


def _name(axes: Any, labels: Mapping[str, Any]) -> None:
    axes.set_xticks(range(len(labels)), list(labels))
    axes.grid(axis="x", visible=False)
    axes.set_ylim(bottom=0)


def _words(name: str) -> str:
    return name.replace("_", " ")
