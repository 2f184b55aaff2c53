"""Draws timelines with one lane for each thread or process: of the whole run, and of its last seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from areal_jax.observe.waits import CONTROL, NS, WINDOW_NS, Interval, idle_share, is_idle
from areal_jax.report.svg import IDLE, INK, OTHER, SERIES, Figure, draw_svg, legend_above

BINS = 240
"""Maximum number of columns in the whole run's timeline. A column covers at least WINDOW_NS, the resolution
of the timeline's file.
"""

HEIGHT = 0.82
"""Fraction of a lane's height that is coloured; the rest is the gap to the lane above."""

ZOOM_S = 3.0
"""Seconds that the timeline's close-up covers; a run shorter than twice this gets no close-up."""


def timeline(intervals: Sequence[Interval]) -> Figure | None:
    """Draws the whole run with one lane per component (thread or process); returns None without intervals.

    A lane consists of columns of equal duration. In a column, the height of a colour is the fraction of the
    column's duration that the colour's activity took.
    """
    if not intervals:
        return None
    lanes = _Lanes(intervals)
    bins = int(np.clip((lanes.end_s - lanes.begin_s) * NS / WINDOW_NS, 1, BINS))
    edges = np.linspace(lanes.begin_s, max(lanes.end_s, lanes.begin_s + 1e-3), bins + 1)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for lane, component in enumerate(reversed(lanes.components)):
            floor = np.full(bins + 1, float(lane))  # the last edge repeats the last bin
            for label, colour in lanes.colours.items():
                height = HEIGHT * _shares(lanes.of(component, label), edges)
                ceiling = floor + np.append(height, height[-1])
                if height.any():
                    axes.fill_between(edges, floor, ceiling, step="post", color=colour, linewidth=0)
                floor = ceiling
        lanes.finish(axes, (lanes.begin_s, lanes.end_s))

    shares = ", ".join(
        f"{component} {1 - idle_share(spent):.0%}" for component, spent in totals(intervals).items()
    )
    alt = f"Share of the time that each component worked: {shares}."
    return Figure("Work and waits", draw_svg("lanes", draw, lanes.size, alt), alt)


def timeline_zoom(intervals: Sequence[Interval]) -> Figure | None:
    """Draws the last ZOOM_S seconds in which a device worked, every interval at its recorded time.

    The figure ends when the last component other than the control plane stopped working. Returns None if none
    of them worked, or if the run was shorter than 2 ZOOM_S.
    """
    # At the end of a run the control plane writes files for some seconds.
    of_devices = [each for each in intervals if each.component != CONTROL]
    working = [each.end_s for each in of_devices if not is_idle(each.activity)]
    if not working or max(working) - min(each.start_s for each in intervals) < 2 * ZOOM_S:
        return None
    lanes, end = _Lanes(intervals), max(working)
    begin = end - ZOOM_S

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for lane, component in enumerate(reversed(lanes.components)):
            for label, colour in lanes.colours.items():
                spans = _merged(lanes.of(component, label), (begin, end), ZOOM_S / 800)
                bars = [(start, stop - start) for start, stop in spans]
                axes.broken_barh(bars, (lane, HEIGHT), color=colour, linewidth=0)
        lanes.finish(axes, (begin, end))

    alt = f"Each activity of each component from {begin:.1f} s to {end:.1f} s of the run."
    return Figure("The run's last seconds in detail", draw_svg("zoom", draw, lanes.size, alt), alt)


def totals(intervals: Sequence[Interval]) -> dict[str, dict[str, float]]:
    """Returns component -> activity -> total seconds of the activity's intervals."""
    spent: dict[str, dict[str, float]] = {}
    for each in intervals:
        mine = spent.setdefault(each.component, {})
        mine[each.activity] = mine.get(each.activity, 0.0) + each.end_s - each.start_s
    return spent


def shares(intervals: Sequence[Interval]) -> dict[str, dict[str, float]]:
    """Returns role -> activity -> share of the role's time, from the first update's start to the last's end.

    The roles are `trainer` and `hosts`, all hosts together. Empty for a run without an update.
    """
    updates = [each for each in intervals if each.activity == "update"]
    if not updates:
        return {}
    begin, end = min(each.start_s for each in updates), max(each.end_s for each in updates)
    clipped = [
        each._replace(
            component="trainer" if each.component == "trainer" else "hosts",
            start_s=max(each.start_s, begin),
            end_s=min(each.end_s, end),
        )
        for each in intervals
        if each.component == "trainer" or each.component.startswith("host")
    ]
    spent = totals([each for each in clipped if each.end_s > each.start_s])
    return {
        role: {activity: span / sum(own.values()) for activity, span in own.items()}
        for role, own in spent.items()
    }


class Orchestration(NamedTuple):
    """Seconds of control plane work and of idle devices, from the first update's start to the last's end.

    `idle_s` and `alone_s` are approximate, because they depend on which intervals overlap, and the timeline's
    file joins intervals shorter than WINDOW_NS. The field `control_alone_share` of metrics rows is exact.
    """

    whole_s: float
    control_s: float
    """Time in which the control plane worked, whether or not devices did."""
    idle_s: float
    """Time in which every device was idle."""
    alone_s: float
    """Time in which every device was idle and the control plane worked."""


def orchestration(intervals: Sequence[Interval]) -> Orchestration:
    """Returns how long the control plane worked and devices were idle, from the first update to the last.

    All values are 0 for a run without an update.
    """
    updates = [each for each in intervals if each.activity == "update"]
    if not updates:
        return Orchestration(0.0, 0.0, 0.0, 0.0)
    window = min(each.start_s for each in updates), max(each.end_s for each in updates)
    working = [each for each in intervals if not is_idle(each.activity)]
    control = [(each.start_s, each.end_s) for each in working if each.component == CONTROL]
    devices = [(each.start_s, each.end_s) for each in working if each.component != CONTROL]
    control_s, devices_s, either_s = (
        _length(_merged(spans, window)) for spans in (control, devices, control + devices)
    )
    whole_s = _length([window])
    return Orchestration(whole_s, control_s, whole_s - devices_s, either_s - devices_s)


def _merged(
    spans: Sequence[tuple[float, float]], window: tuple[float, float], gap_s: float = 0.0
) -> list[tuple[float, float]]:
    """Returns the parts of `window` that at least one of `spans` covers, in order and without overlaps.

    A span is (start, end) in seconds. Spans are joined if the gap between them is at most `gap_s`.
    """
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        start, end = max(start, window[0]), min(end, window[1])
        if merged and start <= merged[-1][1] + gap_s:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        elif start < end:
            merged.append((start, end))
    return merged


def _length(spans: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)


class _Lanes:
    """The intervals grouped by component and label, for drawing.

    The len(SERIES) activities on which most time was spent have their names as labels. All other work has the
    label `other`, and idle time the label `waits`.
    """

    def __init__(self, intervals: Sequence[Interval]) -> None:
        spent: dict[str, float] = {}
        for each in intervals:
            spent[each.activity] = spent.get(each.activity, 0.0) + each.end_s - each.start_s
        ranked = sorted((name for name in spent if not is_idle(name)), key=lambda name: -spent[name])
        named = dict(zip(ranked, SERIES, strict=False))
        self.colours = {**named, **({"other": OTHER} if len(ranked) > len(named) else {}), "waits": IDLE}
        self.components = list(dict.fromkeys(each.component for each in intervals))
        self.begin_s = min(each.start_s for each in intervals)
        self.end_s = max(each.end_s for each in intervals)
        self._spans: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for each in intervals:
            idle = "waits" if is_idle(each.activity) else "other"
            label = each.activity if each.activity in named else idle
            self._spans.setdefault((each.component, label), []).append((each.start_s, each.end_s))

    def of(self, component: str, label: str) -> list[tuple[float, float]]:
        """Returns (start, end) in seconds of each interval of this component and label, in order."""
        return self._spans.get((component, label), [])

    @property
    def size(self) -> tuple[float, float]:
        """The figure's width and height in inches."""
        return 10.6, 0.95 + 0.42 * len(self.components)

    def finish(self, axes: Any, span: tuple[float, float]) -> None:
        from matplotlib.patches import Patch

        axes.set_xlim(*span)
        axes.set_ylim(-0.1, len(self.components))
        middles = [lane + HEIGHT / 2 for lane in range(len(self.components))]
        axes.set_yticks(middles, list(reversed(self.components)))
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("seconds since the start")
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
        patches = [Patch(color=colour, label=label) for label, colour in self.colours.items()]
        legend_above(axes, columns=len(patches), handles=patches)


def _shares(spans: Sequence[tuple[float, float]], edges: np.ndarray) -> np.ndarray:
    """Returns, for each bin between two successive edges, the fraction of its time that the spans cover."""
    if not spans:
        return np.zeros(len(edges) - 1)
    starts, ends = np.array(spans).T
    return np.diff(_elapsed(starts, edges) - _elapsed(ends, edges)) / np.diff(edges)


def _elapsed(instants: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Returns for each of `edges` the sum of the seconds from every earlier instant to the edge."""
    instants = np.sort(instants)
    count = np.searchsorted(instants, edges)
    return count * edges - np.concatenate([[0.0], np.cumsum(instants)])[count]
