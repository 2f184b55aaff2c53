"""How every peer is timed, and what it prints; the standard library alone."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable


def report(call: Callable[[], None], repeats: int) -> None:
    """One JSON line: wall and CPU seconds of `repeats` calls after a first one, and the process's peak."""
    call()
    seconds, cpu = [], []
    for _ in range(repeats):
        started, cpu_started = time.perf_counter(), time.process_time()
        call()
        seconds.append(time.perf_counter() - started)
        cpu.append(time.process_time() - cpu_started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sys.stdout.write(json.dumps({"seconds": seconds, "cpu_s": cpu, "peak_bytes": [peak]}) + "\n")


def report_seconds(seconds: list[float], whole: list[float], **more: list[float]) -> None:
    """One JSON line: seconds of a decode step, and of prompt and answers together, a run each."""
    sys.stdout.write(json.dumps({"seconds": seconds, "whole_s": whole, **more}) + "\n")
