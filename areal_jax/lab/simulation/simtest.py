"""Simulates runs with random schedules and faults, for `areal-jax simtest`.

Every second run has episodes. Runs draw crashes and pauses of every process; hosts and other processes that
were lost in a pause come back late.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from areal_jax.control.audit import MALFORMED
from areal_jax.control.events import HostJoined, SamplesMoved
from areal_jax.lab.simulation.schedule import random_schedule, with_episodes
from areal_jax.lab.simulation.world import SimResult, simulate
from areal_jax.types import ArealError


def simtest(schedules: int, first_seed: int, strategy: str | None = None) -> dict[str, Any]:
    """Simulate `schedules` runs, with consecutive seeds from `first_seed` on; return totals over all runs.

    `strategy`: value of control.strategy in all runs; None: each run draws one. Runs of odd seeds have
    episodes. `failed` in the result maps the seed of each run that hung or broke an invariant to the reason;
    `came_back` counts samples of which hosts had some left when they joined again.
    """
    started = time.perf_counter()
    failed: dict[str, str] = {}
    faults: Counter[str] = Counter()
    strategies: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + schedules):
        config, schedule = random_schedule(seed, strategy)
        if seed % 2:
            schedule = with_episodes(seed, schedule)
        strategies[config.control.strategy] += 1
        try:
            result = simulate(config, schedule)
        except (ArealError, *MALFORMED) as error:
            failed[str(seed)] = f"{type(error).__name__}: {error}"
            continue
        faults.update(result.faults)
        totals.update(_counts(result))
        totals["episodes"] += seed % 2
        if broken := _broken(result):
            failed[str(seed)] = "; ".join(broken[:3])
    return {
        "schedules": schedules,
        "failed": failed,
        "strategies": dict(strategies),
        **totals,
        "faults": dict(faults),
        "seconds": time.perf_counter() - started,
    }


def _counts(result: SimResult) -> dict[str, int]:
    events = [event for _, event, _ in result.rows]
    return {
        "events": len(events),
        "versions": result.versions,
        "trained": result.audit.trained,
        "dropped": sum(result.audit.dropped.values()),
        "moves": sum(isinstance(event, SamplesMoved) for event in events),
        "came_back": sum(len(event.samples) for event in events if isinstance(event, HostJoined)),
    }


def _broken(result: SimResult) -> list[str]:
    """Returns a sentence for each promise that the run broke."""
    calls = [
        f"tool call {call} of {sample} was made {count} times"
        for (sample, call), count in result.tool_calls.items()
        if count > 1
    ]
    return [*result.audit.violations, *calls]
