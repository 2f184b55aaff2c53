"""Renders report.html: the results of a run as one file that needs no network and no server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np

from areal_jax.observe.live import clock
from areal_jax.observe.waits import Interval, is_idle
from areal_jax.report import curves, figures, lanes
from areal_jax.report.report_samples import sample_groups
from areal_jax.report.report_selection import selection_section
from areal_jax.report.report_staleness import staleness_section
from areal_jax.report.sample import SampleView
from areal_jax.report.selection import Selection
from areal_jax.report.sharing import sharing
from areal_jax.report.staleness import Staleness
from areal_jax.report.svg import figures_html, page_html


class FailedReward(NamedTuple):
    """A group that could not be scored, or that has a prompt that could not be used, and why."""

    ordinal: int
    task: str
    outcome: str
    message: str


@dataclass(frozen=True)
class ReportData:
    """All data that a report shows."""

    title: str
    command: str
    """The shell command that repeats this run."""
    config_yaml: str
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the run's processes on GPUs; empty for a run without GPUs."""
    rows: Sequence[Mapping[str, Any]] = ()
    intervals: Sequence[Interval] = ()
    token_ages: Mapping[int, int] = field(default_factory=dict)
    """Age in versions -> number of trained tokens of that age."""
    head_ages: Mapping[int, int] = field(default_factory=dict)
    """Age in versions -> number of trained samples with a first token of that age."""
    lengths: Sequence[int] = ()
    """Number of completion tokens of each trained sample."""
    staleness: Staleness | None = None
    """Rewards by age; None if the run has nothing to compare."""
    selection: Selection | None = None
    """Which of the generated groups were trained; None if none was."""
    samples: Sequence[tuple[str, Sequence[SampleView]]] = ()
    """(title, the samples shown under this title), in the report's order."""
    samples_missing: str = ""
    """Why no sample can be shown; empty if samples can be shown."""
    evals: Sequence[Mapping[str, Any]] = ()
    """The run's evaluations: the objects of evals.jsonl."""
    failures: Sequence[FailedReward] = ()
    """Failed rewards and prompts to list, newest first."""


def page_css() -> str:
    """Returns the report's style sheet; its rule `:root` defines all colours as CSS variables."""
    return files("areal_jax.report").joinpath("report.css").read_text(encoding="utf-8")


def render(data: ReportData) -> str:
    """Returns the report as HTML, also for a run without a trained step."""
    body = "\n".join(
        [
            f"<header><h1>{escape(data.title)}</h1>{_tiles(data)}</header>",
            _section("Learning", _learning(data)),
            _section("Answers", _answers(data)),
            _section("Samples", sample_groups(data.samples) or _note(data.samples_missing)),
            _section("Failed rewards and prompts", _failures(data)),
            _section("Selection", selection_section(data.selection)),
            _section("Asynchrony", _asynchrony(data)),
            _section("Reproduce", _reproduce(data)),
        ]
    )
    return page_html(data.title, page_css(), body, COPY)


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
        ("interruptions", f"{_total(rows, 'interruptions'):,}", "samples continued under newer weights"),
        (
            "dropped",
            f"{sum(drops.values()):,}",
            ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in drops.items()),
        ),
    ]
    if shared := sharing(rows):
        note = f"of {shared.sequence_tokens:,} tokens; a prefix tree has {shared.compression:.2f} times fewer"
        tiles.append(("repeated prefixes", f"{shared.repeated_share:.0%}", note))
    bubble = figures.column(rows, "completion_bubble_share")
    if np.isfinite(bubble).any():
        tiles.append(
            ("length bubble", f"{np.nanmean(bubble):.0%}", "(longest − mean) / longest, mean of steps")
        )
    tiles += _over_age_tiles(rows)
    if failed := _total(rows, "failed_rewards"):
        tiles.append(("failed rewards", f"{failed:,}", "groups that could not be scored"))
    return '<dl class="tiles">' + "".join(map(_tile, tiles)) + "</dl>"


def _tile(tile: tuple[str, str, str]) -> str:
    name, figure, note = map(escape, tile)
    return f"<div><dt>{name}</dt><dd>{figure}</dd><dd class=note>{note}</dd></div>"


def _over_age_tiles(rows: figures.MetricsRows) -> list[tuple[str, str, str]]:
    """Returns what the bound on the age of tokens costs (control.over_age), if the run has a bound."""
    tiles = []
    if any("hold_share" in row for row in rows):
        share = mean_share(rows, "hold_share")
        tiles.append(("held", f"{share:.1%}", "of the trainer's time, for groups near the age bound"))
    masked = figures.column(rows, "masked_token_share")
    if np.isfinite(masked).any():
        tiles.append(("masked tokens", f"{np.nanmean(masked):.2%}", "too old to be trained, mean of steps"))
    if restarts := sum((row.get("reissued_by_reason") or {}).get("over_age", 0) for row in rows):
        tiles.append(("restarts for age", f"{restarts:,}", "groups generated again"))
    return tiles


def drops_by_reason(rows: figures.MetricsRows) -> dict[str, int]:
    """Returns reason -> number of groups that the whole run dropped for this reason.

    The drops of rows without the field `dropped_by_reason` are counted under `dropped`.
    """
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(row.get("dropped_by_reason") or {"dropped": row["dropped"]})
    return {reason: int(count) for reason, count in counts.items() if count}


def mean_share(rows: figures.MetricsRows, name: str) -> float:
    """Returns the mean of the field `name` over all steps, weighted by each step's wall time.

    The field is a fraction of the step's time. Rows in which it is null are left out; the result is 0 if it
    is null in all rows.
    """
    total, weights, before = 0.0, 0.0, 0.0
    for row in rows:
        now = float(row["wall_s"] or before)
        weight, before = max(now - before, 0.0), now
        if row[name] is not None:
            total, weights = total + weight * float(row[name]), weights + weight
    return total / weights if weights else 0.0


def _over(steps: int) -> str:
    return "of the last step" if steps == 1 else f"mean of the last {steps} steps"


def _total(rows: Sequence[Mapping[str, Any]], name: str) -> int:
    return sum(int(row[name] or 0) for row in rows)


# --- sections -----------------------------------------------------------------------------------------------


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>' if text else ""


def _learning(data: ReportData) -> str:
    wide = [figures.reward_curve(data.rows), curves.parts_curve(data.rows), curves.eval_curve(data.evals)]
    by_task = [curves.task_curve(data.rows, field, title) for field, title in curves.BY_TASK.items()]
    updates = [curves.update_curve(data.rows, field, title) for field, title in curves.OF_UPDATES.items()]
    return "".join(figures_html([figure]) for figure in wide) + figures_html(by_task) + figures_html(updates)


def _answers(data: ReportData) -> str:
    return figures_html(
        [curves.length_curve(data.rows), figures.lengths(data.lengths), curves.bubble_curve(data.rows)]
    )


def _failures(data: ReportData) -> str:
    """Returns HTML with the curve of failed rewards and a table of messages; "" if nothing failed.

    The newest message comes first; equal messages share one line.
    """
    alike: dict[tuple[str, str, str], list[int]] = {}
    for ordinal, task, outcome, message in data.failures:
        alike.setdefault((task, outcome, message), []).append(ordinal)
    if not alike:
        return ""
    lines = (
        f"<tr><td>{escape(task)}</td><td>{_words(outcome)}</td><td>{_few(ordinals)}</td>"
        f"<td class=message>{escape(message)}</td></tr>"
        for (task, outcome, message), ordinals in alike.items()
    )
    head = "<tr><th>task</th><th>outcome</th><th>prompts</th><th>message</th></tr>"
    table = f'<table class="failures"><thead>{head}</thead><tbody>{"".join(lines)}</tbody></table>'
    return f"{figures_html([curves.failure_curve(data.rows)])}<article>{table}</article>"


def _few(ordinals: Sequence[int]) -> str:
    """Returns a text with the first three distinct ordinals, and how many more there are."""
    each = list(dict.fromkeys(ordinals))
    more = f" and {len(each) - 3} more" if len(each) > 3 else ""
    return ", ".join(map(str, each[:3])) + more


def _words(name: str) -> str:
    return name.replace("_", " ")


def _asynchrony(data: ReportData) -> str:
    wide = [lanes.timeline(data.intervals), lanes.timeline_zoom(data.intervals)]
    rest = [
        figures.ages(data.token_ages, data.head_ages),
        figures.throughput(data.rows),
        figures.logp_gap(data.rows),
        figures.effective_sizes(data.rows),
    ]
    stacked = "".join(figures_html([figure]) for figure in wide)
    table = _waits_table(data.intervals)
    return (
        stacked
        + _orchestration(data.intervals)
        + table
        + figures_html(rest)
        + staleness_section(data.staleness)
    )


def _orchestration(intervals: Sequence[Interval]) -> str:
    found = lanes.orchestration(intervals)
    if not found.whole_s:
        return ""

    def share(seconds: float) -> str:
        return f"{seconds:.1f} s ({100 * seconds / found.whole_s:.1f} %)"

    return (
        f'<p class="note">In the {found.whole_s:.1f} s from the first update to the last, the control plane '
        f"worked for {share(found.control_s)}. Every device was idle for {share(found.idle_s)}; every device "
        f"was idle and only the control plane was busy for {share(found.alone_s)}.</p>"
    )


def _waits_table(intervals: Sequence[Interval]) -> str:
    """Returns an HTML table of the seconds that each component spent in each activity.

    A component's activities add up to its recorded time.
    """
    if not intervals:
        return ""
    lines = []
    for component, spent in lanes.totals(intervals).items():
        whole = sum(spent.values()) or 1.0
        for activity, span in sorted(spent.items(), key=lambda item: -item[1]):
            idle = " class=idle" if is_idle(activity) else ""
            lines.append(
                f"<tr{idle}><th scope=row>{escape(component)}</th><td>{escape(activity)}</td>"
                f"<td>{span:.1f} s</td><td>{100 * span / whole:.1f} %</td></tr>"
            )
    head = "<tr><th>component</th><th>activity</th><th>seconds</th><th>share</th></tr>"
    return (
        "<details><summary>Every activity in figures</summary>"
        f"<table><thead>{head}</thead><tbody>{''.join(lines)}</tbody></table></details>"
    )


def _reproduce(data: ReportData) -> str:
    variables = "\n".join(f"{name}={value}" for name, value in data.environment.items())
    environment = f"<p>Environment of the processes on GPUs</p><pre>{escape(variables)}</pre>"
    return (
        f'<div class="command"><pre id="command">{escape(data.command)}</pre>'
        '<button type="button" data-copy="command">copy</button></div>'
        f"{environment if variables else ''}"
        f"<details><summary>The resolved config</summary><pre>{escape(data.config_yaml)}</pre></details>"
    )
