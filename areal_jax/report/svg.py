"""Turns matplotlib's figures into inline SVG that uses the page's colours, light or dark; HTML of pages."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any, NamedTuple

PAGE_COLOURS = {
    "#010101": "var(--ink)",
    "#020202": "var(--muted)",
    "#030303": "var(--line)",
    "#040404": "var(--idle)",
    "#0a0000": "var(--c0)",
    "#0a0001": "var(--c1)",
    "#0a0002": "var(--c2)",
    "#0a0003": "var(--c3)",
    "#0a0004": "var(--c4)",
    "#0a0005": "var(--c5)",
    "#0a0006": "var(--c6)",
    "#0a0007": "var(--other)",
}
"""Placeholder colour in matplotlib's output -> the page's CSS variable that replaces it."""

INK, MUTED, LINE, IDLE, *SERIES, OTHER = PAGE_COLOURS

SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "areal-jax",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.borderaxespad": 0.2,
    "lines.linewidth": 1.6,
    "lines.solid_joinstyle": "round",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}


class Figure(NamedTuple):
    title: str
    svg: str
    alt: str
    """The content of the figure in words."""


def draw_svg(name: str, draw: Callable[[Any], None], size: tuple[float, float], alt: str) -> str:
    """Returns the inline SVG of what `draw(figure)` draws on a matplotlib figure.

    `name`: prefix of every id in the SVG, because all figures share one page, on which ids must be unique.
    `size`: width and height in inches. `alt`: the figure in words.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context(SETTINGS):
        figure = Canvas(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"(\d\.\d\d)\d+", r"\1", svg)  # a hundredth of a point is finer than any screen
    svg = re.sub("|".join(PAGE_COLOURS), lambda found: PAGE_COLOURS[found[0]], svg)
    svg = re.sub(r"font(-family)?: ([\d.]+px )?'DejaVu Sans'[^;\"]*", _page_font, svg)
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', _open_tag(alt), svg, count=1)
    return svg


def figures_html(drawn: Sequence[Figure | None]) -> str:
    """Returns the HTML of figures with their titles and contents in words; None is left out."""
    shown = [figure for figure in drawn if figure is not None]
    blocks = (
        f"<figure><figcaption>{escape(figure.title)}</figcaption>{figure.svg}<p>{escape(figure.alt)}</p></figure>"
        for figure in shown
    )
    return f'<div class="figures">{"".join(blocks)}</div>' if shown else ""


def table_html(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns the HTML table with these names of columns, and these texts in its cells."""
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{names}</tr></thead><tbody>{lines}</tbody></table>"


def page_html(title: str, css: str, body: str, script: str = "") -> str:
    """Returns the HTML of a whole page; `script`: JavaScript that runs at its end."""
    code = f"<script>{script}</script>\n" if script else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{css}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n{code}</body>\n</html>\n"
    )


def standalone(figure: Figure, page_css: str) -> str:
    """Returns the figure as the text of an SVG file with the light and dark colours of `page_css`."""
    colours = re.findall(r"(?:@media[^{]*\{\s*)?:root \{[^}]*\}(?:\s*\})?", page_css)
    rules = [*colours, "svg { background: var(--page); }", "text { font-family: system-ui, sans-serif; }"]
    opening, rest = figure.svg.split(">", 1)
    return f"{opening}><style>{' '.join(rules)}</style>{rest}"


def _page_font(found: re.Match[str]) -> str:
    return f"font-size: {found[2].strip()}" if found[2] else ""


def _open_tag(alt: str) -> Callable[[re.Match[str]], str]:
    links = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return lambda found: f'<svg {links} viewBox="{found[1]}" role="img" aria-label="{escape(alt)}">'


def legend_above(axes: Any, columns: int = 2, **settings: Any) -> None:
    """Put the legend in `columns` columns above the axes, where it hides no data.

    `settings`: further arguments of matplotlib's `axes.legend`.
    """
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, handlelength=1.2, **settings)
