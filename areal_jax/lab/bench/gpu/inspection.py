"""What the device did during a call, read from a trace."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.profiler

TOP = 12


FIGURES = ("kernels", "device_to_host", "busy_s", "top_kernels")
"""What is read from a trace: the number of kernels, and of copies from the device to the host; seconds in
which at least one kernel or copy ran; (name, seconds in all) of the TOP kernels that took the most time.
"""


def traced(call: Callable[[], Any]) -> dict[str, Any]:
    """Returns FIGURES of the device during `call` and until its result is computed; None on a CPU."""
    if jax.default_backend() == "cpu":
        return dict.fromkeys(FIGURES)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        files = list(Path(folder).rglob("*.xplane.pb"))
        data = jax.profiler.ProfileData.from_file(str(files[0]))
        # A stream is a line of the device's plane; other lines of the plane show the same work in groups.
        events = [
            (event.name, event.start_ns * 1e-9, event.duration_ns * 1e-9)
            for plane in data.planes
            if plane.name.startswith("/device:")
            for line in plane.lines
            if "stream" in line.name.lower()
            for event in line.events
        ]
    return summary(events)


def summary(events: list[tuple[str, float, float]]) -> dict[str, Any]:
    """Returns FIGURES of a device's events, each (name, start in seconds, seconds)."""
    copies = [name for name, _, _ in events if name.startswith(("Memcpy", "Memset"))]
    totals: Counter[str] = Counter()
    busy_s, ended_s = 0.0, 0.0
    for name, start_s, seconds in sorted(events, key=lambda event: event[1]):
        totals[name] += seconds  # type: ignore[assignment]
        busy_s += max(0.0, start_s + seconds - max(start_s, ended_s))
        ended_s = max(ended_s, start_s + seconds)
    back = sum(name.startswith("MemcpyD2H") for name in copies)
    top = [(name, float(seconds)) for name, seconds in totals.most_common(TOP)]
    return dict(zip(FIGURES, (len(events) - len(copies), back, busy_s, top), strict=True))
