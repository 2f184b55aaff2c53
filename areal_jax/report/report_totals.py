"""What the report says of a whole run, from the metrics rows of all its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from areal_jax.report import figures


def over_age_tiles(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
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


def drops_by_reason(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Returns reason -> number of groups that the whole run dropped for this reason.

    The drops of rows without the field `dropped_by_reason` are counted under `dropped`.
    """
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(row.get("dropped_by_reason") or {"dropped": row["dropped"]})
    return {reason: int(count) for reason, count in counts.items() if count}


def mean_share(rows: Sequence[Mapping[str, Any]], name: str) -> float:
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
