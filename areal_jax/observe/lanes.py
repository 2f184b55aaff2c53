"""The report's timeline: a lane an actor, the whole run in columns and its last seconds as they were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from areal_jax.observe.svg import IDLE, INK, OTHER, SERIES, Figure, draw_svg, legend_above
from areal_jax.observe.waits import NS, WINDOW_NS, Interval, is_idle

BINS = 240
"""Columns of the whole run's timeline at most; none is narrower than what the file resolves."""

HEIGHT = 0.82
"""Of a lane; the rest is the gap to the next."""

ZOOM_S = 3.0
"""Seconds of the timeline's close-up; a run shorter than twice that has none."""


def timeline(intervals: Sequence[Interval]) -> Figure | None:
    """The whole run: a lane an actor, its height shared out among the activities of each moment."""
    if not intervals:
        return None
    lanes = _Lanes(intervals)
    bins = int(np.clip((lanes.end_s - lanes.begin_s) * NS / WINDOW_NS, 1, BINS))
    edges = np.linspace(lanes.begin_s, max(lanes.end_s, lanes.begin_s + 1e-3), bins + 1)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for lane, actor in enumerate(reversed(lanes.actors)):
            floor = np.full(bins + 1, float(lane))  # the last edge repeats the last bin
            for label, colour in lanes.colours.items():
                height = HEIGHT * _shares(lanes.of(actor, label), edges)
                ceiling = floor + np.append(height, height[-1])
                if height.any():
                    axes.fill_between(edges, floor, ceiling, step="post", color=colour, linewidth=0)
                floor = ceiling
        lanes.finish(axes, (lanes.begin_s, lanes.end_s))

    shares = ", ".join(f"{actor} {lanes.working_share(actor):.0%}" for actor in lanes.actors)
    alt = f"Share of the time that each worked: {shares}."
    return Figure("Who worked and who waited", draw_svg("lanes", draw, lanes.size, alt), alt)


def timeline_zoom(intervals: Sequence[Interval]) -> Figure | None:
    """The last seconds in which anybody worked, every interval as it was."""
    working = [each.end_s for each in intervals if not is_idle(each.activity)]
    if not working or max(working) - min(each.start_s for each in intervals) < 2 * ZOOM_S:
        return None
    lanes, end = _Lanes(intervals), max(working)
    begin = end - ZOOM_S

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for lane, actor in enumerate(reversed(lanes.actors)):
            for label, colour in lanes.colours.items():
                shown = [
                    (start, stop) for start, stop in lanes.of(actor, label) if stop > begin and start < end
                ]
                axes.broken_barh(_bars(shown, begin, end), (lane, HEIGHT), color=colour, linewidth=0)
        lanes.finish(axes, (begin, end))

    alt = f"The same from {begin:.1f} s to {end:.1f} s, activity by activity."
    return Figure("A close-up of its last seconds", draw_svg("zoom", draw, lanes.size, alt), alt)


def totals(intervals: Sequence[Interval]) -> dict[str, dict[str, float]]:
    """Seconds by actor and activity."""
    spent: dict[str, dict[str, float]] = {}
    for each in intervals:
        mine = spent.setdefault(each.actor, {})
        mine[each.activity] = mine.get(each.activity, 0.0) + each.end_s - each.start_s
    return spent


def orchestration(intervals: Sequence[Interval]) -> tuple[float, float]:
    """From the first update to the end of the last: the seconds in which nobody worked but the control plane,
    and all of them. To WINDOW_NS, as what is older than a few seconds was coalesced.
    """
    updates = [each for each in intervals if each.activity == "update"]
    if not updates:
        return 0.0, 0.0
    begin_s, end_s = min(each.start_s for each in updates), max(each.end_s for each in updates)
    others = [each for each in intervals if each.actor != "control" and not is_idle(each.activity)]
    alone_s, until_s = 0.0, begin_s
    for each in sorted(others, key=lambda each: each.start_s):
        alone_s += max(0.0, min(each.start_s, end_s) - until_s)
        until_s = max(until_s, each.end_s)
    return alone_s, end_s - begin_s


class _Lanes:
    """The intervals by actor and label: working activities by name, most time first, and all waits as one."""

    def __init__(self, intervals: Sequence[Interval]) -> None:
        spent: dict[str, float] = {}
        for each in intervals:
            spent[each.activity] = spent.get(each.activity, 0.0) + each.end_s - each.start_s
        ranked = sorted((name for name in spent if not is_idle(name)), key=lambda name: -spent[name])
        named = dict(zip(ranked, SERIES, strict=False))
        self.colours = {**named, **({"other": OTHER} if len(ranked) > len(named) else {}), "waits": IDLE}
        self.actors = list(dict.fromkeys(each.actor for each in intervals))
        self.begin_s = min(each.start_s for each in intervals)
        self.end_s = max(each.end_s for each in intervals)
        self._spans: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for each in intervals:
            idle = "waits" if is_idle(each.activity) else "other"
            label = each.activity if each.activity in named else idle
            self._spans.setdefault((each.actor, label), []).append((each.start_s, each.end_s))

    def of(self, actor: str, label: str) -> list[tuple[float, float]]:
        """(start, end) of each, in order."""
        return self._spans.get((actor, label), [])

    def working_share(self, actor: str) -> float:
        seconds = {label: sum(b - a for a, b in self.of(actor, label)) for label in self.colours}
        return 1.0 - seconds["waits"] / (sum(seconds.values()) or 1.0)

    @property
    def size(self) -> tuple[float, float]:
        """Inches."""
        return 10.6, 0.95 + 0.42 * len(self.actors)

    def finish(self, axes: Any, span: tuple[float, float]) -> None:
        from matplotlib.patches import Patch

        axes.set_xlim(*span)
        axes.set_ylim(-0.1, len(self.actors))
        middles = [lane + HEIGHT / 2 for lane in range(len(self.actors))]
        axes.set_yticks(middles, list(reversed(self.actors)))
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("seconds since the start")
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
        patches = [Patch(color=colour, label=label) for label, colour in self.colours.items()]
        legend_above(axes, columns=len(patches), handles=patches)


def _shares(spans: Sequence[tuple[float, float]], edges: np.ndarray) -> np.ndarray:
    """Of each bin, the share that the spans cover."""
    if not spans:
        return np.zeros(len(edges) - 1)
    starts, ends = np.array(spans).T
    return np.diff(_elapsed(starts, edges) - _elapsed(ends, edges)) / np.diff(edges)


def _elapsed(instants: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """At each edge, the seconds since every instant before it, added up."""
    instants = np.sort(instants)
    count = np.searchsorted(instants, edges)
    return count * edges - np.concatenate([[0.0], np.cumsum(instants)])[count]


def _bars(spans: Sequence[tuple[float, float]], begin: float, end: float) -> list[tuple[float, float]]:
    """(start, width) cut to the window; neighbours closer than can be seen are one bar."""
    bars: list[tuple[float, float]] = []
    for start, stop in spans:
        start, stop = max(start, begin), min(stop, end)
        if bars and start - sum(bars[-1]) < (end - begin) / 800:
            start = bars.pop()[0]
        bars.append((start, stop - start))
    return bars
