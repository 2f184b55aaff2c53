"""Renders the report's comparison of trained with generated groups: distributions, tables, alarms."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np

from areal_jax.report.selection import NAMES, Fate, Gap, Selection, p_text
from areal_jax.report.svg import SERIES, Figure, draw_svg, figures_html, legend_above, table_html

FATES = ("fate", "finished", "unfinished", "mean tokens", "longest", "difficulty")
GAPS = ("quantity", "trained", "generated", "difference", "share", "distribution", "test")

POINTS = 400
"""Largest number of points of a distribution function in the figure."""


def selection_section(found: Selection | None) -> str:
    """Returns HTML with alarms, figure, tables and explanation; "" without a trained group."""
    if found is None:
        return ""
    alarms = "".join(f"<p><strong>Alarm:</strong> {escape(text)}</p>" for text in found.alarms)
    tables = table_html(FATES, map(fate_cells, found.fates))
    if found.gaps:
        tables += table_html(GAPS, map(gap_cells, found.gaps))
    return (
        f"{figures_html([distributions(found)])}<article><h3>Trained and generated groups</h3>{alarms}"
        f'{tables}<p class="note">{escape(explained(found))}</p></article>'
    )


def fate_cells(each: Fate) -> tuple[str, ...]:
    """Returns the texts of a line of the table of fates, in the order of FATES."""
    means = (each.completion_tokens, each.longest, each.difficulty)
    return (
        each.fate,
        f"{each.finished:,}",
        f"{each.unfinished:,}",
        *("–" if mean is None else f"{mean:,.4g}" for mean in means),
    )


def gap_cells(gap: Gap) -> tuple[str, ...]:
    """Returns the texts of a line of the table of gaps, in the order of GAPS."""
    return (
        NAMES[gap.quantity],
        f"{gap.trained_mean:,.4g}",
        f"{gap.generated_mean:,.4g}",
        f"{gap.difference:+,.3g}",
        "–" if gap.relative is None else f"{gap.relative:+.1%}",
        f"{gap.distribution:.1%}",
        p_text(gap.p),
    )


def explained(found: Selection) -> str:
    """Returns in words what was compared, and what is not known."""
    trained, *others = found.fates
    unfinished = sum(each.unfinished for each in found.fates)
    known = sum(each.known_tokens for each in found.fates)
    withdrawn = (
        f" {unfinished:,} attempts were withdrawn, or are under way, before all their samples had ended. "
        f"Their lengths are not known and not compared: the journal has only their samples that had ended, "
        f"{known:,} tokens."
        if unfinished
        else ""
    )
    if not found.gaps:
        return f"No finished group was discarded: {trained.finished:,} were trained.{withdrawn}"
    discarded = sum(each.finished for each in others if each.fate != "pending")
    return (
        f"Generated are the attempts of groups that finished: {trained.finished:,} trained and {discarded:,} "
        "discarded. The distribution is the largest difference of both distribution functions, in per cent "
        "of the groups; p is that of Smirnov's test between trained and discarded groups."
        f"{withdrawn}"
    )


def distributions(found: Selection) -> Figure | None:
    """Draws the distribution functions of trained and of generated groups; None if none was discarded."""
    if not found.gaps:
        return None

    def draw(figure: Any) -> None:
        for axes, gap in zip(
            np.atleast_1d(figure.subplots(1, len(found.gaps), sharey=True)), found.gaps, strict=True
        ):
            for number, (values, label) in enumerate(
                zip(found.values[gap.quantity], ("trained", "generated"), strict=True)
            ):
                # Of many groups only some, to keep report.html small.
                ranks = np.unique(np.linspace(0, len(values) - 1, POINTS).round().astype(int))
                axes.step(
                    np.sort(values)[ranks],
                    (ranks + 1) / len(values),
                    where="post",
                    color=SERIES[number],
                    label=label,
                )
            axes.set_xlabel(NAMES[gap.quantity])
            axes.set_ylim(0, 1.02)
            legend_above(axes)

    means = "; ".join(
        f"{NAMES[gap.quantity]}: {gap.trained_mean:,.4g} trained, {gap.generated_mean:,.4g} generated"
        for gap in found.gaps
    )
    alt = f"Share of the groups up to each value. Means: {means}."
    return Figure("Trained and generated groups", draw_svg("selection", draw, (10.6, 2.9), alt), alt)
