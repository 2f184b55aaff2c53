"""report.html: what happened in a run, in one file that needs neither network nor server."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import Any

from areal_jax.observe import figures, lanes
from areal_jax.observe.live import clock
from areal_jax.observe.sample import SampleView, version_name
from areal_jax.observe.svg import Figure
from areal_jax.observe.waits import Interval, is_idle
from areal_jax.types import NOT_SAMPLED

TINTS = 7
"""Background tints of report.css that versions take in turn."""


@dataclass(frozen=True)
class ReportData:
    """Everything a report is made of."""

    title: str
    command: str
    """What a shell would run to get this run again."""
    config_yaml: str
    rows: Sequence[Mapping[str, Any]] = ()
    intervals: Sequence[Interval] = ()
    token_ages: Mapping[int, int] = field(default_factory=dict)
    """Age in versions -> trained tokens of that age."""
    head_ages: Mapping[int, int] = field(default_factory=dict)
    """Age in versions -> trained samples whose first token has that age."""
    lengths: Sequence[int] = ()
    """Completion tokens of the trained samples."""
    samples: Sequence[SampleView] = ()


def render(data: ReportData) -> str:
    """The page. A run without a single step renders too."""
    style = files("areal_jax.observe").joinpath("report.css").read_text(encoding="utf-8")
    body = "\n".join(
        [
            f"<header><h1>{escape(data.title)}</h1>{_tiles(data)}</header>",
            _section("Learning", _figures([figures.reward_curve(data.rows)])),
            _section("Asynchrony", _asynchrony(data)),
            _section("Sampling", _figures([figures.lengths(data.lengths), figures.logp_gap(data.rows)])),
            _section("Samples", "".join(map(_sample, data.samples))),
            _section("Reproduce", _reproduce(data)),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(data.title)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n<script>{COPY}</script>\n</body>\n</html>\n"
    )


COPY = (
    "document.querySelectorAll('button[data-copy]').forEach(b => b.onclick = () => "
    "navigator.clipboard.writeText(document.getElementById(b.dataset.copy).textContent)"
    ".then(() => { b.textContent = 'copied'; }));"
)


# --- header -------------------------------------------------------------------------------------------------


def _tiles(data: ReportData) -> str:
    rows = data.rows
    if not rows:
        return "<p>No step was trained.</p>"
    last, tenth = rows[-1], max(len(rows) // 10, 1)
    rewards = [row["reward_mean"] for row in rows[-tenth:] if row["reward_mean"] is not None]
    drops = drops_by_reason(rows)
    tiles = [
        ("final reward", f"{sum(rewards) / len(rewards):.3f}" if rewards else "–", _over(tenth)),
        ("steps", f"{len(rows):,}", f"version {last['version']}"),
        (
            "wall time",
            clock(float(last["wall_s"] or 0.0)),
            f"{_total(rows, 'trained_tokens'):,} tokens trained",
        ),
        ("trainer waits", f"{mean_share(rows, 'trainer_wait_share'):.0%}", "of its time"),
        ("generator idle", f"{mean_share(rows, 'generator_idle_share'):.0%}", "of its time"),
        ("interruptions", f"{_total(rows, 'interruptions'):,}", "samples went on under newer weights"),
        ("dropped", f"{sum(drops.values()):,}", ", ".join(f"{name} {n}" for name, n in drops.items())),
    ]
    return '<dl class="tiles">' + "".join(map(_tile, tiles)) + "</dl>"


def _tile(tile: tuple[str, str, str]) -> str:
    name, figure, note = map(escape, tile)
    return f"<div><dt>{name}</dt><dd>{figure}</dd><dd class=note>{note}</dd></div>"


def _over(steps: int) -> str:
    return "of the last step" if steps == 1 else f"mean of the last {steps} steps"


def _total(rows: Sequence[Mapping[str, Any]], name: str) -> int:
    return sum(int(row[name] or 0) for row in rows)


def drops_by_reason(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Groups dropped in the whole run; `dropped` counts those of a row that names no reasons."""
    counts: dict[str, int] = {}
    for row in rows:
        dropped = row["dropped"]
        by_reason = dropped if isinstance(dropped, Mapping) else {"dropped": dropped}
        for reason, count in by_reason.items():
            if count:
                counts[reason] = counts.get(reason, 0) + int(count)
    return counts


def mean_share(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """Mean of a per-step share, each step weighted by how long it took."""
    total, weights, before = 0.0, 0.0, 0.0
    for row in rows:
        now = float(row["wall_s"] or before)
        weight, before = max(now - before, 0.0), now
        if row[name] is not None:
            total, weights = total + weight * float(row[name]), weights + weight
    return total / weights if weights else 0.0


# --- sections -----------------------------------------------------------------------------------------------


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def _figures(drawn: Sequence[Figure | None]) -> str:
    shown = [figure for figure in drawn if figure is not None]
    blocks = (
        f"<figure><figcaption>{escape(figure.title)}</figcaption>{figure.svg}<p>{escape(figure.alt)}</p></figure>"
        for figure in shown
    )
    return f'<div class="figures">{"".join(blocks)}</div>' if shown else ""


def _asynchrony(data: ReportData) -> str:
    wide = [lanes.timeline(data.intervals), lanes.timeline_zoom(data.intervals)]
    pair = [figures.ages(data.token_ages, data.head_ages), figures.throughput(data.rows)]
    stacked = "".join(_figures([figure]) for figure in wide)
    return stacked + _waits_table(data.intervals) + _figures(pair)


def _waits_table(intervals: Sequence[Interval]) -> str:
    """The timeline in figures: every actor's activities, which add up to its time."""
    if not intervals:
        return ""
    lines = []
    for actor, spent in lanes.totals(intervals).items():
        whole = sum(spent.values()) or 1.0
        for activity, span in sorted(spent.items(), key=lambda item: -item[1]):
            idle = " class=idle" if is_idle(activity) else ""
            lines.append(
                f"<tr{idle}><th scope=row>{escape(actor)}</th><td>{escape(activity)}</td>"
                f"<td>{span:.1f} s</td><td>{100 * span / whole:.1f} %</td></tr>"
            )
    head = "<tr><th>who</th><th>what</th><th>seconds</th><th>share</th></tr>"
    return (
        "<details><summary>Every activity in figures</summary>"
        f"<table><thead>{head}</thead><tbody>{''.join(lines)}</tbody></table></details>"
    )


def _sample(view: SampleView) -> str:
    legend = " ".join(
        f'<span class="{_tint(version)}">{version_name(version)}: {end - start} tokens</span>'
        for version, start, end in view.spans
    )
    return (
        f"<article><h3>sample {escape(view.sample_id)}</h3><p class=note>{escape(view.headline)}</p>"
        f'<p class="prompt">{escape(view.prompt)}</p>'
        f'<p class="completion">{"".join(map(_token, view.pieces))}</p>'
        f'<p class="legend">{legend}</p></article>'
    )


def _token(piece: Any) -> str:
    """A token in its version's tint; the less likely it was, the stronger its underline."""
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


def _reproduce(data: ReportData) -> str:
    return (
        f'<div class="command"><pre id="command">{escape(data.command)}</pre>'
        '<button type="button" data-copy="command">copy</button></div>'
        f"<details><summary>The resolved config</summary><pre>{escape(data.config_yaml)}</pre></details>"
    )
