"""Simulates runs with random schedules and faults, for `areal-jax simtest`."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from areal_jax.control.events import SamplesMoved
from areal_jax.simulation.schedule import random_schedule
from areal_jax.simulation.world import SimulationError, simulate


def simtest(schedules: int, first_seed: int, strategy: str | None = None) -> dict[str, Any]:
    """Simulate `schedules` runs, with consecutive seeds from `first_seed` on; return totals over all runs.

    `strategy`: value of control.strategy in all runs; None: each run draws one.
    `failed` in the result maps the seed of each run that hung or broke an invariant to the reason.
    """
    started = time.perf_counter()
    failed: dict[str, str] = {}
    faults: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + schedules):
        try:
            result = simulate(*random_schedule(seed, strategy))
        except SimulationError as error:
            failed[str(seed)] = str(error)
            continue
        faults.update(result.faults)
        totals.update(
            {"events": len(result.rows), "versions": result.versions, "trained": result.audit.trained}
        )
        totals["dropped"] += sum(result.audit.dropped.values())
        totals["moves"] += sum(isinstance(event, SamplesMoved) for _, event, _ in result.rows)
        if not result.audit.ok:
            failed[str(seed)] = "; ".join(result.audit.violations[:3])
    return {
        "schedules": schedules,
        "failed": failed,
        **totals,
        "faults": dict(faults),
        "seconds": time.perf_counter() - started,
    }
