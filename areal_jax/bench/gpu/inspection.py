"""What a program contains and what the device did in it: read from its text, and from a trace of a call."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.profiler

_PRODUCT = re.compile(r"stablehlo\.dot_general[^\n]*: \(tensor<(?:\w+x)*(\w+)>, tensor<(?:\w+x)*(\w+)>\)")
_COPY = re.compile(r"= (\w+)\[([\d,]*)\][^ ]* (?:copy|copy-start)\(")
_WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4}
TOP = 5


class Trace(NamedTuple):
    """What the device did during one call."""

    kernels: int
    device_to_host: int
    """Number of copies from the device to the host."""
    top: list[tuple[str, float]]
    """(name, seconds in all) of the TOP kernels that took the most time."""


def traced(call: Callable[[], Any]) -> Trace | None:
    """Returns what the device did during `call` and until its result is computed; None on a CPU."""
    if jax.default_backend() == "cpu":
        return None
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        files = list(Path(folder).rglob("*.xplane.pb"))
        data = jax.profiler.ProfileData.from_file(str(files[0]))
        # A stream is a line of the device's plane; other lines of the plane show the same work in groups.
        events = [
            (event.name, event.duration_ns * 1e-9)
            for plane in data.planes
            if plane.name.startswith("/device:")
            for line in plane.lines
            if "stream" in line.name.lower()
            for event in line.events
        ]
    return summary(events)


def summary(events: list[tuple[str, float]]) -> Trace:
    """Returns the Trace of a device's events, each (name, seconds)."""
    copies = [name for name, _ in events if name.startswith(("Memcpy", "Memset"))]
    totals: Counter[str] = Counter()
    for name, seconds in events:
        totals[name] += seconds  # type: ignore[assignment]
    back = sum(name.startswith("MemcpyD2H") for name in copies)
    top = [(name, float(seconds)) for name, seconds in totals.most_common(TOP)]
    return Trace(len(events) - len(copies), back, top)


def products_by_dtype(text: str) -> dict[str, int]:
    """Returns the number of matrix products in a lowered program's StableHLO `text`, by operand dtypes.

    The keys are of the form "bf16 x f32".
    """
    return dict(Counter(" x ".join(found) for found in _PRODUCT.findall(text)))


def large_copies(text: str, least: int) -> list[str]:
    """Returns the copies of at least `least` bytes in a compiled program's HLO `text`, as "bf16[2,65,8]"."""
    found = []
    for dtype, sizes in _COPY.findall(text):
        count = 1
        for size in filter(None, sizes.split(",")):
            count *= int(size)
        if count * _WIDTHS.get(dtype, jnp.dtype("float32").itemsize) >= least:
            found.append(f"{dtype}[{sizes}]")
    return found
