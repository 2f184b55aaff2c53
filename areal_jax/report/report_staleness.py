"""Renders the report's rewards by age: a figure, a table, and what they can show."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np

from areal_jax.observe.estimates import Estimate
from areal_jax.report.staleness import AgeFigures, Staleness
from areal_jax.report.svg import SERIES, Figure, draw_svg, figures_html, legend_above, table_html

COLUMNS = (
    "age of first token",
    "samples",
    "median tokens",
    "reward",
    "raw gap",
    "reward, equally hard",
    "gap, equally hard",
    "gap, same group",
)


def staleness_section(found: Staleness | None) -> str:
    """Returns HTML with figure, table and explanation of rewards by age; "" if there are none to compare."""
    if found is None:
        return ""
    table = table_html(COLUMNS, map(cells, found.ages))
    return (
        f"{figures_html([reward_by_age(found)])}<article><h3>Reward by age</h3>{table}"
        f'<p class="note">{escape(explained(found))}</p></article>'
    )


def cells(each: AgeFigures) -> tuple[str, ...]:
    """Returns the texts of a line of the table, in the order of COLUMNS."""
    within = "–" if each.group_gap.value is None else f"{_gap(each.group_gap)} of {each.groups:,} groups"
    return (
        each.name,
        f"{each.samples:,}",
        f"{each.completion_tokens_p50:,.6g}",
        f"{each.reward:.4f}",
        _gap(each.gap),
        f"{each.stratified_reward:.4f}",
        _gap(each.stratified_gap),
        within,
    )


def explained(found: Staleness) -> str:
    """Returns in words how the figures were made, of how many samples they are, and what they can show."""
    return (
        f"Gaps are to the first line, with 95 % intervals. {found.compared:,} of {found.trained:,} trained "
        f"samples have others in their group and are compared; {found.stratified:,} of them are in the "
        f"{found.strata} strata of prompt difficulty that have samples of every line. A stratum has the same "
        "weight in every line. Hard prompts have long answers, which are old when they are trained, so the "
        "raw gap contains selection bias. The difficulty of a sample's prompt is the mean reward of the "
        f"other samples of its group (reliability {found.reliability:.2f}). Where whole groups have one age, "
        f"about {1 - found.reliability:.0%} of the raw gap remains in the strata, whatever causes it; only "
        "the gap within groups tells the effect of staleness from that of hard prompts."
    )


def reward_by_age(found: Staleness) -> Figure:
    """Draws the mean reward by age, raw and among equally hard prompts, and the median completion length."""
    names = [each.name for each in found.ages]
    columns = {
        "raw": ([each.reward for each in found.ages], [each.gap for each in found.ages]),
        "equally hard prompts": (
            [each.stratified_reward for each in found.ages],
            [each.stratified_gap for each in found.ages],
        ),
    }

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        places = np.arange(len(names))
        for number, (label, (means, gaps)) in enumerate(columns.items()):
            # The intervals are those of the gaps, so the first age has none.
            half = [0.0 if gap.high is None or gap.value is None else gap.high - gap.value for gap in gaps]
            x = places + (number - 0.5) * 0.06
            left.errorbar(x, means, yerr=half, color=SERIES[number], marker="o", capsize=2, label=label)
        left.set_ylabel("mean reward")
        legend_above(left)
        lengths = [each.completion_tokens_p50 for each in found.ages]
        right.bar(places, lengths, width=0.5, color=SERIES[2])
        right.set_ylabel("median completion, tokens")
        for axes in (left, right):
            axes.set_xticks(places, names)
            axes.set_xlim(-0.5, len(names) - 0.5)
            axes.set_xlabel("age of the first token, versions")
            axes.grid(axis="x", visible=False)

    first, last = found.ages[0], found.ages[-1]
    alt = (
        f"Mean reward at age {last.name} against age {first.name}: {_gap(last.gap)} raw, "
        f"{_gap(last.stratified_gap)} among equally hard prompts; median completion "
        f"{last.completion_tokens_p50:,.0f} against {first.completion_tokens_p50:,.0f} tokens."
    )
    return Figure("Reward by age", draw_svg("staleness", draw, (10.6, 2.9), alt), alt)


def _gap(gap: Estimate) -> str:
    if gap.value is None:
        return "–"
    interval = "" if gap.low is None else f" ({gap.low:+.4f} to {gap.high:+.4f})"
    return f"{gap.value:+.4f}{interval}"
