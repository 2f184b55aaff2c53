"""Renders the report's samples. A token's tint shows its version, and its underline how unlikely it was.

Thoughts have a quieter tint, and answers a border.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

from areal_jax.report.sample import SampleView, TokenView, version_name
from areal_jax.types import NOT_SAMPLED

TINTS = 7
"""Number of background tints in report.css; version v has tint v % TINTS."""

FIRST, LAST = 900, 300
"""Numbers of tokens shown from the start and the end of a longer completion, to keep report.html small: each
token shown is an HTML element.
"""

BLOCKS = {"think": "thought", "answer": "answer"}
"""Kind of block, which is also its CSS class, -> its name in the legend."""

NARROW = 160
"""The report shows samples side by side if each has at most this many prompt characters + completion tokens.
"""


def sample_groups(groups: Sequence[tuple[str, Sequence[SampleView]]]) -> str:
    """Returns the HTML of the samples under their titles; titles without samples are left out."""
    return "".join(
        f'<h3>{escape(title)}</h3><div class="{_columns(views)}">{"".join(map(_sample, views))}</div>'
        for title, views in groups
        if views
    )


def _columns(views: Sequence[SampleView]) -> str:
    """Returns the CSS class for a row of samples: `samples` (side by side) if all are short, else `wide`."""
    return "samples" if all(len(view.prompt) + len(view.pieces) <= NARROW for view in views) else "wide"


def _sample(view: SampleView) -> str:
    legend = " ".join(
        f'<span class="{_tint(version)}">{version_name(version)}: {end - start} tokens</span>'
        for version, start, end in view.spans
    )
    used = {piece.block for piece in view.pieces}
    legend += "".join(
        f' <span class="{block}">{name}</span>' for block, name in BLOCKS.items() if block in used
    )
    note = f'<p class="note">judged: {escape(view.reward_note)}</p>' if view.reward_note else ""
    return (
        f'<article><h4>{escape(view.title)}</h4><p class="note">{escape(view.headline)}</p>{note}'
        f'<p class="prompt">{escape(view.prompt)}</p>'
        f'<p class="completion">{_completion(view)}</p>'
        f'<p class="legend">{legend}</p></article>'
    )


def _completion(view: SampleView) -> str:
    pieces, left_out = view.pieces, len(view.pieces) - FIRST - LAST
    if left_out <= 0:
        return _tokens(pieces)
    gap = f'<span class="gap">… {left_out:,} tokens; areal-jax inspect shows them …</span>'
    return _tokens(pieces[:FIRST]) + gap + _tokens(pieces[-LAST:])


def _tokens(pieces: Iterable[TokenView]) -> str:
    """Returns the HTML of tokens; neighbours of one kind of block are in an element of that class."""
    html = ""
    for block, run in groupby(pieces, key=lambda piece: piece.block):
        tokens = "".join(map(_token, run))
        html += f'<span class="{block}">{tokens}</span>' if block else tokens
    return html


def _token(piece: TokenView) -> str:
    """Returns the HTML of a token in its version's tint, underlined more strongly the less likely it was."""
    text = escape(piece.text).replace("\n", "↵\n")
    if piece.version == NOT_SAMPLED:
        return f'<span class="given" title="not sampled">{text}</span>'
    chance = math.exp(min(piece.logp, 0.0))
    title = f"version {piece.version}, log-prob {piece.logp:.3f}, p {chance:.3g}"
    return (
        f'<span class="{_tint(piece.version)}" style="--rare:{1 - chance:.2f}" title="{title}">{text}</span>'
    )


def _tint(version: int) -> str:
    return "given" if version == NOT_SAMPLED else f"v v{version % TINTS}"
