"""Who works and who waits. An actor is always in exactly one activity, so its seconds add up.

Activities that start with "wait" are idle time. Every wait has a deadline and an owner: one that passes
becomes an error that names who waited for what.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from areal_jax.types import ArealError

T = TypeVar("T")

NS = 1_000_000_000

EXACT_NS = 5 * NS
"""The last seconds of a timeline hold every interval as it was; older ones are coalesced."""

WINDOW_NS = NS // 4
"""Coalesced: in a window of this length an activity has one interval as long as all its intervals together,
so shares stay exact and an actor with four activities writes about 1000 intervals a minute at most."""


class WaitTimeout(ArealError):
    """A deadline passed; the message names who waited for what."""


class Interval(NamedTuple):
    """Seconds since the timeline's start."""

    actor: str
    activity: str
    start_s: float
    end_s: float


def is_idle(activity: str) -> bool:
    return activity.startswith("wait")


class Clock:
    """One actor's time. Any thread may switch it; integer nanoseconds, so that sums are exact."""

    def __init__(self, activity: str, now_ns: Callable[[], int], has_record: bool) -> None:
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._activity = activity
        self._since = now_ns()
        self._totals: dict[str, int] = {}
        self._record = _Record() if has_record else None
        self._follower: Callable[[str], None] | None = None

    def follow(self, hear: Callable[[str], None]) -> None:
        """`hear(activity)` is called at every switch from now on, in the thread that switches; not where an
        error ends an activity: what follows it is nobody's choice.
        """
        self._follower = hear

    @property
    def activity(self) -> str:
        return self._activity

    def switch(self, activity: str) -> str:
        """End the present activity, begin this one. Returns the one that ended."""
        former = self._switch(activity)
        if self._follower is not None:
            self._follower(activity)
        return former

    def _switch(self, activity: str) -> str:
        with self._lock:
            self._settle()
            former, self._activity = self._activity, activity
            return former

    @contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """In `activity` for the block, then in the former one again."""
        former = self.switch(activity)
        try:
            yield
        except BaseException:
            self._switch(former)
            raise
        self.switch(former)

    def take_totals(self) -> dict[str, float]:
        """Seconds by activity since the last take; they add up to the time since then."""
        with self._lock:
            self._settle()
            totals, self._totals = self._totals, {}
        return {activity: span / NS for activity, span in totals.items()}

    def take_intervals(self, is_final: bool = False) -> list[tuple[str, int, int]]:
        """(activity, start, end) in nanoseconds of what can be written by now; all there is when final."""
        with self._lock:
            self._settle()
            return [] if self._record is None else self._record.take(self._since, is_final)

    def _settle(self) -> None:
        now = self._now_ns()
        if now == self._since:
            return
        self._totals[self._activity] = self._totals.get(self._activity, 0) + now - self._since
        if self._record is not None:
            self._record.add(self._activity, self._since, now)
        self._since = now


class _Record:
    """Intervals on their way to the file: exact while recent, then binned, then joined with equals."""

    def __init__(self) -> None:
        self._recent: deque[tuple[str, int, int]] = deque()
        self._bin: dict[str, int] = {}
        self._bin_start = 0
        self._ready: list[tuple[str, int, int]] = []

    def add(self, activity: str, start: int, end: int) -> None:
        last = self._recent[-1] if self._recent else None  # joined up to a window, or it would never grow old
        if last is not None and last[0] == activity and end - last[1] < WINDOW_NS:
            self._recent[-1] = (activity, last[1], end)
        else:
            self._recent.append((activity, start, end))
        while self._recent[0][2] < end - EXACT_NS:
            self._coalesce(*self._recent.popleft())

    def take(self, now: int, is_final: bool) -> list[tuple[str, int, int]]:
        while self._recent and self._recent[0][2] < now - EXACT_NS:
            self._coalesce(*self._recent.popleft())
        if is_final:
            self._close_bin()
            while self._recent:
                self._emit(*self._recent.popleft())
        held_back = 0 if is_final else 1  # the last one may still grow
        cut = len(self._ready) - held_back
        taken, self._ready = self._ready[: max(cut, 0)], self._ready[max(cut, 0) :]
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
    """The clocks of a run, and the file their intervals go to.

    A file that exists is gone on with: a resumed run's time starts where the file ends. No path: totals only.
    `zero_ns`: what `now_ns` was when the time started, where that is known; then it passes between runs too.
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
        if zero_ns is None:
            earlier = [] if path is None else read_intervals(path)
            zero_ns = now_ns() - round(max((each.end_s for each in earlier), default=0.0) * NS)
        self._zero = zero_ns

    def actor(self, name: str, activity: str = "wait: start") -> Clock:
        """The clock of that name, made in `activity` when it is new."""
        with self._lock:
            if name not in self._clocks:
                self._clocks[name] = Clock(activity, self._now_ns, has_record=self._path is not None)
            return self._clocks[name]

    def take_totals(self) -> dict[str, dict[str, float]]:
        """Seconds by activity of every actor since the last take (or since the actor's clock was made)."""
        return {name: clock.take_totals() for name, clock in self._all()}

    def flush(self) -> None:
        """Append what is older than the exact tail; `close` appends the rest."""
        self._write(is_final=False)

    def close(self) -> None:
        self._write(is_final=True)

    def _all(self) -> list[tuple[str, Clock]]:
        with self._lock:
            return list(self._clocks.items())

    def _write(self, is_final: bool) -> None:
        if self._path is None:
            return
        lines = [
            json.dumps(Interval(name, activity, self._seconds(start), self._seconds(end))._asdict())
            for name, clock in self._all()
            for activity, start, end in clock.take_intervals(is_final)
            if end - start >= NS // 1_000_000  # the file's times are in microseconds
        ]
        if lines:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write("\n".join(lines) + "\n")

    def _seconds(self, instant: int) -> float:
        return round((instant - self._zero) / NS, 6)


def read_intervals(path: Path) -> list[Interval]:
    """Every whole interval of a timeline's file, none without a file. A line cut short is left out."""
    if not path.exists():
        return []
    intervals = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            intervals.append(Interval(**json.loads(line)))
        except (json.JSONDecodeError, TypeError):
            continue  # a crash cut it short, and what came after began a new line or went on in this one
    return intervals


def process_timeline(folder: Path, name: str) -> Timeline:
    """That of one process of a cluster, in a file of its own and in Unix time, which all processes share."""
    return Timeline(folder / "logs" / f"timeline-{name}.jsonl", time.time_ns, zero_ns=0)


def read_timelines(folder: Path) -> list[Interval]:
    """All intervals of a run: of its threads, or of all its processes, from the first second on.

    Between processes, time in which none ran counts as none.
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
    """Share of an actor's seconds in activities that wait; 0 where no time passed."""
    elapsed = sum(totals.values())
    return sum(span for activity, span in totals.items() if is_idle(activity)) / elapsed if elapsed else 0.0


# --- waits with a deadline ----------------------------------------------------------------------------------

REMEDY = "logs/ says what it did last; where it is only slow, raise runtime.deadline_s"


def get(
    source: queue.Queue[T],
    *,
    who: str,
    what: str,
    deadline_s: float,
    clock: Clock | None = None,
    remedy: str = REMEDY,
) -> T:
    """The next item. `what` names it and its sender: "a batch from the control plane". Raises WaitTimeout."""
    with _waiting(clock, what):
        try:
            return source.get(timeout=deadline_s)
        except queue.Empty:
            raise _timeout(who, what, deadline_s, remedy) from None


def wait(
    event: threading.Event,
    *,
    who: str,
    what: str,
    deadline_s: float,
    clock: Clock | None = None,
    remedy: str = REMEDY,
) -> None:
    """Until the event is set. Raises WaitTimeout."""
    with _waiting(clock, what):
        if not event.wait(deadline_s):
            raise _timeout(who, what, deadline_s, remedy)


def wait_for(
    condition: threading.Condition,
    predicate: Callable[[], Any],
    *,
    who: str,
    what: str,
    deadline_s: float,
    clock: Clock | None = None,
    remedy: str = REMEDY,
) -> None:
    """Until the predicate holds, under the condition's lock, which the caller holds. Raises WaitTimeout."""
    with _waiting(clock, what):
        if not condition.wait_for(predicate, deadline_s):
            raise _timeout(who, what, deadline_s, remedy)


def _waiting(clock: Clock | None, what: str) -> Any:
    return nullcontext() if clock is None else clock.doing(f"wait: {what}")


def _timeout(who: str, what: str, deadline_s: float, remedy: str) -> WaitTimeout:
    return WaitTimeout(f"{who} waited {deadline_s:g} s for {what}; {remedy}")
