"""Records what each thread or process does, and gives every wait a deadline.

A component (a thread or process with a clock) is always in exactly one activity, so the seconds of its
activities add up to the elapsed time. Activities that start with "wait" are idle time. A wait that passes its
deadline raises an error that names the component and what it waited for.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from areal_jax.file_errors import writing
from areal_jax.types import ArealError

T = TypeVar("T")

NS = 1_000_000_000

EXACT_NS = 5 * NS
"""Age in nanoseconds up to which a timeline keeps every interval as recorded; WINDOW_NS says how older
intervals are joined.
"""

WINDOW_NS = NS // 4
"""Nanoseconds of a window in which an activity's short intervals are joined to one with their total length.

Totals by activity stay exact, and a component with four activities writes at most about 1000 intervals a
minute.
"""


CONTROL = "control"
"""Component name of the control plane; every other component counts as a device."""

HELD = "groups that another update would make too old"
"""What the trainer waits for while control.over_age=hold keeps it from the next batch (`events.Hold`)."""

CONTROL_ALONE = "control alone"
"""Key in the result of `Timeline.take_totals`: the time in which only the control plane worked."""


class WaitTimeout(ArealError):
    """A wait passed its deadline; the message names the component and what it waited for."""


class Interval(NamedTuple):
    """One activity of one component, in seconds since the timeline's start."""

    component: str
    activity: str
    start_s: float
    end_s: float


def is_idle(activity: str) -> bool:
    return activity.startswith("wait")


class Clock:
    """Measures how long one component spends in each activity; any thread may switch the activity."""

    def __init__(
        self,
        activity: str,
        now_ns: Callable[[], int],
        has_record: bool = False,
        on_change: Callable[[str], None] = lambda _: None,
    ) -> None:
        """The clock starts in `activity`; `now_ns()` returns the time in nanoseconds.

        `on_change(activity)` is called now and at every switch. `has_record`: keep each interval for a
        timeline's file, not only totals.
        """
        self._now_ns, self._on_change = now_ns, on_change
        self._lock = threading.Lock()
        self.activity = activity
        self._since = now_ns()
        self._totals: dict[str, int] = {}
        self._record = _Record() if has_record else None
        self._follower: Callable[[str], None] = lambda _: None
        on_change(activity)

    def follow(self, hear: Callable[[str], None]) -> None:
        """From now on, call `hear(activity)` at every switch, in the thread that switches.

        If a block under `with clock.doing(...)` raises, the switch back to the previous activity is not
        reported: a failure must not look like progress.
        """
        self._follower = hear

    def switch(self, activity: str) -> str:
        """End the current activity and begin `activity`. Returns the activity that ended."""
        former = self._switch(activity)
        self._follower(activity)
        return former

    def _switch(self, activity: str) -> str:
        with self._lock:
            self._settle()
            former, self.activity = self.activity, activity
            self._on_change(activity)
            return former

    @contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """Switch to `activity` for the block, then back to the previous one."""
        former = self.switch(activity)
        try:
            yield
        except BaseException:
            self._switch(former)
            raise
        self.switch(former)

    def take_totals(self) -> dict[str, float]:
        """Returns activity -> seconds spent on it since the last call, or since the clock was created.

        The seconds of all activities add up to the elapsed time.
        """
        with self._lock:
            self._settle()
            totals, self._totals = self._totals, {}
        return {activity: span / NS for activity, span in totals.items()}

    def take_intervals(self, is_final: bool = False) -> list[tuple[str, int, int]]:
        """Removes and returns intervals to write to the file, as (activity, start, end) in nanoseconds.

        If `is_final`, these are all intervals not yet written; otherwise only intervals older than EXACT_NS.
        """
        with self._lock:
            self._settle()
            return [] if self._record is None else self._record.take(is_final)

    def _settle(self) -> None:
        now = self._now_ns()
        if now == self._since:
            return
        self._totals[self.activity] = self._totals.get(self.activity, 0) + now - self._since
        if self._record is not None:
            self._record.add(self.activity, self._since, now)
        self._since = now


class _Record:
    """A clock's intervals that are not yet written to the file.

    An interval is kept as recorded until it is EXACT_NS old. Then an activity's short intervals within
    WINDOW_NS are joined to one interval of their total length.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[str, int, int]] = deque()
        self._bin: dict[str, int] = {}
        self._bin_start = 0
        self._ready: list[tuple[str, int, int]] = []

    def add(self, activity: str, start: int, end: int) -> None:
        self._recent.append((activity, start, end))
        while self._recent[0][2] < end - EXACT_NS:
            self._coalesce(*self._recent.popleft())

    def take(self, is_final: bool) -> list[tuple[str, int, int]]:
        if is_final:
            self._close_bin()
            while self._recent:
                self._emit(*self._recent.popleft())
        held_back = [] if is_final else self._ready[-1:]  # the last interval may still be extended
        taken, self._ready = self._ready[: len(self._ready) - len(held_back)], held_back
        return taken

    def _coalesce(self, activity: str, start: int, end: int) -> None:
        if end - start >= WINDOW_NS:
            self._close_bin()
            self._emit(activity, start, end)
            return
        if not self._bin:
            self._bin_start = start
        self._bin[activity] = self._bin.get(activity, 0) + end - start
        if end - self._bin_start >= WINDOW_NS:
            self._close_bin()

    def _close_bin(self) -> None:
        start = self._bin_start
        for activity, span in self._bin.items():
            self._emit(activity, start, start + span)
            start += span
        self._bin.clear()

    def _emit(self, activity: str, start: int, end: int) -> None:
        if self._ready and self._ready[-1][0] == activity and self._ready[-1][2] == start:
            start = self._ready.pop()[1]
        self._ready.append((activity, start, end))


class Timeline:
    """The clocks of a run, and the file to which their intervals are written.

    An existing file is continued. If `path` is None, only totals are kept. `zero_ns`: the value of `now_ns()`
    at the file's time 0. None: time goes on from the end of the file's last interval, so the time between a
    run's end and its resume is not counted.
    """

    def __init__(
        self,
        path: Path | None,
        now_ns: Callable[[], int] = time.perf_counter_ns,
        zero_ns: int | None = None,
    ) -> None:
        self._path = path
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._clocks: dict[str, Clock] = {}
        self._working_lock = threading.Lock()  # clocks call _note under their own lock, and under self._lock
        self._working: set[str] = set()
        # Exact, whereas overlaps computed from the file's coalesced intervals are not.
        self._alone = Clock("wait", now_ns)
        if zero_ns is None:
            earlier = [] if path is None else read_intervals(path)
            zero_ns = now_ns() - round(max((each.end_s for each in earlier), default=0.0) * NS)
        self._zero = zero_ns

    def clock(self, name: str, activity: str = "wait: start") -> Clock:
        """Returns the clock with that name; if it does not exist, creates it, starting in `activity`."""
        with self._lock:
            if name not in self._clocks:
                note = partial(self._note, name)
                self._clocks[name] = Clock(activity, self._now_ns, self._path is not None, note)
            return self._clocks[name]

    def _note(self, component: str, activity: str) -> None:
        """Called when `component` begins `activity`; measures how long only the control plane works."""
        with self._working_lock:
            (self._working.discard if is_idle(activity) else self._working.add)(component)
            is_alone = len(self._working) == 1 and CONTROL in self._working
            if (now := "decide" if is_alone else "wait") != self._alone.activity:
                self._alone.switch(now)

    def take_totals(self) -> dict[str, dict[str, float]]:
        """Returns component -> activity -> seconds spent since the last call, or since the clock was created.

        If the control plane and other components have clocks here, the result also has the key CONTROL_ALONE:
        its activity `decide` is the time in which only the control plane worked, its `wait` all other time.
        """
        # A copy, because other threads may add clocks.
        totals = {name: clock.take_totals() for name, clock in self._clocks.copy().items()}
        if CONTROL in totals and len(totals) > 1:
            totals[CONTROL_ALONE] = self._alone.take_totals()
        return totals

    def close(self) -> None:
        """Append to the file all intervals that it does not contain yet."""
        self.flush(is_final=True)

    def flush(self, is_final: bool = False) -> None:
        """Append the intervals older than EXACT_NS to the file; if `is_final`, younger intervals too."""
        if self._path is None:
            return
        lines = [
            json.dumps(Interval(name, activity, self._seconds(start), self._seconds(end))._asdict())
            for name, clock in self._clocks.copy().items()
            for activity, start, end in clock.take_intervals(is_final)
            if end - start >= NS // 1_000_000  # the file's times are in microseconds
        ]
        if lines:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with writing(self._path), self._path.open("a", encoding="utf-8") as file:
                file.write("\n".join(lines) + "\n")

    def _seconds(self, instant: int) -> float:
        return round((instant - self._zero) / NS, 6)


def read_intervals(path: Path) -> list[Interval]:
    """Returns all intervals in a timeline's file; skips lines that a crash cut short. No file: empty list."""
    if not path.exists():
        return []
    intervals = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            intervals.append(Interval(**json.loads(line)))
        except (json.JSONDecodeError, TypeError):
            continue  # a crash cut it short; a later interval may have been appended to it
    return intervals


def process_timeline(folder: Path, name: str) -> Timeline:
    """Returns the timeline of process `name` in a run of several processes: its own file, with Unix times."""
    return Timeline(folder / "logs" / f"timeline-{name}.jsonl", time.time_ns, zero_ns=0)


def read_timelines(folder: Path) -> list[Interval]:
    """Returns all intervals of a run: of its single timeline, or of the timelines of all its processes.

    From the timelines of several processes, times in which no process was running are cut out.
    """
    logs = folder / "logs"
    if (path := logs / "timeline.jsonl").exists():
        return read_intervals(path)
    found = [each for path in sorted(logs.glob("timeline-*.jsonl")) for each in read_intervals(path)]
    moved, end_s, cut_s = [], 0.0, 0.0
    for each in sorted(found, key=lambda one: one.start_s):
        cut_s += max(0.0, each.start_s - cut_s - end_s)
        moved.append(each._replace(start_s=each.start_s - cut_s, end_s=each.end_s - cut_s))
        end_s = max(end_s, moved[-1].end_s)
    return moved


def idle_share(totals: Mapping[str, float]) -> float:
    """Returns the fraction of a component's seconds spent in waiting activities; 0 if no time passed."""
    elapsed = sum(totals.values())
    return sum(span for activity, span in totals.items() if is_idle(activity)) / elapsed if elapsed else 0.0


# --- waits with a deadline ----------------------------------------------------------------------------------

REMEDY = "the run folder's logs/ show what each process did last; if one was slow, raise runtime.deadline_s"


def get(
    source: queue.Queue[T] | queue.SimpleQueue[T],
    *,
    waiter: str,
    what: str,
    deadline_s: float,
    clock: Clock | None = None,
) -> T:
    """Returns the next item of the queue; raises WaitTimeout if none arrives within `deadline_s`.

    For the message, `waiter` names the waiting component, and `what` the item and its sender, such as "a
    batch from the control plane". `clock`, if given, records the time as a wait.
    """
    with nullcontext() if clock is None else clock.doing(f"wait: {what}"):
        try:
            return source.get(timeout=deadline_s)
        except queue.Empty:
            raise WaitTimeout(
                f"{waiter} ends, because it waited {deadline_s:g} s for {what}; {REMEDY}"
            ) from None
